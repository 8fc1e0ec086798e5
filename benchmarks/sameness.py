"""Whether answers depend on anything but the request: every search, asked alone and in company, of every number of processes.

    python -m benchmarks.sameness --data data/multi30k [--answers 1000] [--replicas 1 2] [--front-ends 1 2]

The same requests, each with its own search, are sent to servers with one engine and several, one front end and several: one after
the other, 64 at once, 64 at once among other callers' requests, and on one batch stream. An answer is the whole message, scores and
log-probabilities included, and has to be, bit for bit, the one that the first server gave to the request alone. The exit code is 1
if one is not.
"""

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grpc import aio

from benchmarks.engines.table import commit
from benchmarks.harness.models import SHIPPED, bundle_of
from benchmarks.harness.report import environment, write
from benchmarks.harness.served import ServedModel
from benchmarks.harness.setting import Setting, has_setting
from benchmarks.harness.widened import widened_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.corpus import read_lines
from dragoman.v1 import generation_pb2, generation_pb2_grpc

SEARCHES: Mapping[str, dict[str, Any]] = {
    "greedy": {},
    "beams": {"num_beams": 4, "num_return_sequences": 4},
    "beams, early stopping": {"num_beams": 4, "early_stopping": True, "length_penalty": 0.6},
    "8 beams": {"num_beams": 8, "num_return_sequences": 3},
    "samples": {"do_sample": True, "temperature": 1.1, "num_return_sequences": 3},
    "samples, top k and p": {"do_sample": True, "top_k": 20, "top_p": 0.9},
    "alternatives": {"return_alternatives": True, "num_return_sequences": 4},
    "repetition penalty": {"repetition_penalty": 1.3},
    "no repeated pairs": {"no_repeat_ngram_size": 2, "num_beams": 2},
    "at least 20 tokens": {"min_new_tokens": 20},
    "forced prefix": {"forced_prefix": "Ein", "num_beams": 4},
    "suppressed tokens": {"suppressed_tokens": [5, 6, 7, 8, 9]},
    "likeliest tokens": {"top_log_probs": 5},
}
CONCURRENCY, NUM_NOISY, NUM_CHANNELS = 64, 16, 8
CALL_SECONDS = 300.0

Answers = dict[str, bytes]
"""Whole messages by the request's id; one that failed has none."""


@dataclass(slots=True)
class Asked:
    """What one server answered under one load.

    Attributes:
        answers: See there.
        failures: Requests that were not answered, by status.
    """

    answers: Answers = field(default_factory=dict)
    failures: Counter[str] = field(default_factory=Counter)

    def take(self, response: generation_pb2.GenerateResponse) -> None:
        """Take an answer in; only how long it took may differ."""
        response.ClearField("timings")
        self.answers[response.request_id] = response.SerializeToString(deterministic=True)


Send = Callable[[int, generation_pb2.GenerateRequest], Awaitable[None]]


def requests(texts: Sequence[str], count: int) -> list[generation_pb2.GenerateRequest]:
    """Return so many requests: the texts in turn, each with another search, log-probabilities and a seed of its own."""
    found = []
    for i, text, search in zip(range(count), itertools.cycle(texts), itertools.cycle(SEARCHES.values()), strict=False):
        request = generation_pb2.GenerateRequest(text=text, return_log_probs=True, request_id=f"same-{i}", **search)
        if request.do_sample:
            request.seed = i
        found.append(request)
    return found


async def ask(address: str, asked: Sequence[generation_pb2.GenerateRequest], load: str) -> Asked:
    """Send everything under a load, one of `LOADS`, over several connections, so that every front end has some."""
    found = Asked()
    async with AsyncExitStack() as stack:
        options = [("grpc.use_local_subchannel_pool", 1)]
        channels = [await stack.enter_async_context(aio.insecure_channel(address, options)) for _ in range(NUM_CHANNELS)]
        stubs: list[Any] = [generation_pb2_grpc.GenerationStub(channel) for channel in channels]  # type: ignore[no-untyped-call]

        async def send(i: int, request: generation_pb2.GenerateRequest) -> None:
            try:
                found.take(await stubs[i % NUM_CHANNELS].Generate(request, timeout=CALL_SECONDS))
            except aio.AioRpcError as error:
                found.failures[error.code().name] += 1

        if load == BATCH:
            await _on_a_stream(stubs[0], asked, found)
        else:
            await LOADS[load](send, asked, stubs)
    return found


async def _alone(send: Send, asked: Sequence[generation_pb2.GenerateRequest], stubs: Sequence[Any]) -> None:
    for i, request in enumerate(asked):
        await send(i, request)


async def _at_once(send: Send, asked: Sequence[generation_pb2.GenerateRequest], stubs: Sequence[Any]) -> None:
    waiting = iter(random.Random(1).sample([*enumerate(asked)], len(asked)))

    async def work(waiting: Iterator[tuple[int, generation_pb2.GenerateRequest]]) -> None:
        for i, request in waiting:
            await send(i, request)

    await asyncio.gather(*(work(waiting) for _ in range(CONCURRENCY)))


async def _in_company(send: Send, asked: Sequence[generation_pb2.GenerateRequest], stubs: Sequence[Any]) -> None:
    """As `_at_once`, while others ask for other texts with other seeds and priorities, and some of them give up."""
    draws = random.Random(2)

    async def disturb(stub: Any) -> None:
        while True:
            other = generation_pb2.GenerateRequest()
            other.CopyFrom(draws.choice(asked))
            other.request_id, other.text = "", f"{other.text} {draws.choice(asked).text}"
            other.priority = draws.randint(-5, 5)
            try:
                await stub.Generate(other, timeout=draws.choice((0.05, CALL_SECONDS)))
            except aio.AioRpcError:
                await asyncio.sleep(0.01)

    noise = [asyncio.create_task(disturb(stubs[i % NUM_CHANNELS])) for i in range(NUM_NOISY)]
    try:
        await _at_once(send, asked, stubs)
    finally:
        for task in noise:
            task.cancel()
        await asyncio.gather(*noise, return_exceptions=True)


async def _on_a_stream(stub: Any, asked: Sequence[generation_pb2.GenerateRequest], found: Asked) -> None:
    """Send everything on one batch stream, `CONCURRENCY` requests at a time."""
    room = asyncio.Semaphore(CONCURRENCY)

    async def sending() -> Any:
        for request in asked:
            await room.acquire()
            yield request

    async for answer in stub.GenerateBatch(sending(), timeout=CALL_SECONDS):
        room.release()
        if answer.HasField("response"):
            found.take(answer.response)
        else:
            found.failures[str(answer.error.code)] += 1


ALONE, AT_ONCE, COMPANY, BATCH = "alone", f"{CONCURRENCY} at once", f"{CONCURRENCY} at once, in company", "on one stream"
LOADS: dict[str, Callable[[Send, Sequence[generation_pb2.GenerateRequest], Sequence[Any]], Awaitable[None]]] = {
    ALONE: _alone,
    AT_ONCE: _at_once,
    COMPANY: _in_company,
}


def row(setting: Setting, load: str, found: Asked, first: Answers) -> dict[str, Any]:
    """Compare answers with those that the first server gave, and return the figures for the table."""
    different = [name for name, answer in found.answers.items() if first.get(name) != answer]
    failures = ", ".join(f"{count} {code}" for code, count in sorted(found.failures.items()))
    about = {"replicas": setting.replicas, "front ends": setting.front_ends, "load": load, "answers": len(found.answers)}
    return about | {"different": len(different), "not answered": failures or "none", "first of them": ", ".join(different[:3])}


def measure(
    bundle: Path, asked: Sequence[generation_pb2.GenerateRequest], settings: Sequence[Setting], flags: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Ask every server under every load; return a row for each."""
    rows: list[dict[str, Any]] = []
    first: Answers = {}
    for setting in settings:
        with ServedModel(bundle, *setting.flags(), *flags) as server:
            for load in (*LOADS, BATCH):
                found = asyncio.run(ask(server.address, asked, load))
                first = first or found.answers
                rows.append(row(setting, load, found, first))
                print(rows[-1], flush=True)
    return rows


def verdict(rows: Sequence[Mapping[str, Any]], count: int) -> tuple[bool, str]:
    """Say whether every answer came and was the same."""
    different, missing = sum(line["different"] for line in rows), sum(count - line["answers"] for line in rows)
    is_kept = not different and not missing
    total = sum(line["answers"] for line in rows)
    return is_kept, f"- {'kept' if is_kept else 'MISSED'}: {different} of {total:,} answers differ, {missing} are missing"


def main() -> None:
    """Ask, compare and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--model", choices=("en-de", "en-de-base"), default="en-de")
    parser.add_argument("--precision", choices=("int8", "fp32"), default="int8")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "dragoman-benchmark-bundles")
    parser.add_argument("--answers", type=int, default=1000)
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 2] if has_setting("replicas") else [1])
    parser.add_argument("--front-ends", type=int, nargs="+", default=[1, 2] if has_setting("front_ends") else [1])
    arguments = parser.parse_args()
    checkpoint = Checkpoint.load(SHIPPED) if arguments.model == "en-de" else widened_checkpoint()
    asked = requests(read_lines(arguments.data / "test_2016_flickr.en.gz"), arguments.answers)
    settings = [Setting(n, 1, CONCURRENCY, fronts) for n in arguments.replicas for fronts in arguments.front_ends]
    rows = measure(bundle_of(checkpoint, arguments.cache, arguments.precision), asked, settings)
    is_kept, text = verdict(rows, arguments.answers)
    notes = [
        f"`{arguments.model}`, {arguments.precision}, {CONCURRENCY} slots a replica: {arguments.answers:,} captions, each with one "
        f"of {len(SEARCHES)} searches ({', '.join(SEARCHES)}), log-probabilities asked for. `alone`: one after the other; `in "
        f"company`: {NUM_NOISY} other callers send other requests meanwhile, some with a short deadline; `on one stream`: "
        "GenerateBatch. Different is a message that is not, bit for bit but for its timings, the first row's.",
        "",
        text,
    ]
    about = environment("onnxruntime", "grpcio") | {"commit": commit(), "model": arguments.model}
    write("sameness", "The same answers, whatever else is going on", about | {"precision": arguments.precision}, rows, notes)
    sys.exit(not is_kept)


if __name__ == "__main__":
    main()
