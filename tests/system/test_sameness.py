"""The same answer to the last bit, whatever else is going on: alone and in company, in one process and in several.

An answer is the whole message, scores and log-probabilities included, and has to be what one engine answered to the request alone.
"""

import asyncio
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from dragoman.v1.generation_pb2 import FinishReason, GenerateBulkRequest, GenerateRequest, GenerateResponse, ScoreRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.conftest import TWO_ENGINES, TWO_OF_EACH
from tests.system.harness.callers import CALL_SECONDS, NATIVE, OPTIONS, Callers
from tests.system.harness.server import LONG, Server, serving
from tests.system.test_soak import late

pytestmark = pytest.mark.e2e

SEARCHES: tuple[dict[str, Any], ...] = (
    {},
    {"num_beams": 4, "num_return_sequences": 4},
    {"num_beams": 4, "early_stopping": True, "length_penalty": 0.6},
    {"num_beams": 6, "num_return_sequences": 3, "min_new_tokens": 3, "length_penalty": 0.0},
    {"do_sample": True, "temperature": 1.1, "num_return_sequences": 3},
    {"do_sample": True, "top_k": 20, "top_p": 0.9},
    {"do_sample": True, "temperature": 0.3, "top_p": 0.5, "repetition_penalty": 1.2},
    {"return_alternatives": True, "num_return_sequences": 4},
    {"repetition_penalty": 1.3, "suppressed_tokens": list(range(5, 45))},
    {"repetition_penalty": 0.8, "no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2, "num_beams": 2},
    {"min_new_tokens": 20},
    {"forced_prefix": "Ein", "num_beams": 4},
    {"top_log_probs": 5},
    {"terms": [{"source": "man", "targets": ["Herr", "Herren"]}, {"source": "a", "targets": ["Klavier"]}, {"source": "dog"}]},
    {"terms": [{"source": "woman", "targets": ["Dame"]}], "num_beams": 6, "num_return_sequences": 2},
)
NUM_REQUESTS = 1000 if LONG else 84
CONCURRENCY, NUM_DISTURBING, NUM_CHANNELS = 64, 8, 8
# Few slots, so that requests wait, and join others in the middle; the widest search needs 6.
FLAGS = ("--max-slots", "24", "--num-threads", "1")

Answers = dict[str, bytes]
Requests = Sequence[GenerateRequest | ScoreRequest]


@pytest.fixture(scope="module")
def requests(captions: list[str]) -> Requests:
    """Requests of all kinds, from one word to sixty, with limits, priorities and seeds of their own."""
    draws, found = random.Random(1), []
    for number, search in zip(range(NUM_REQUESTS), itertools.cycle(SEARCHES), strict=False):
        words = " ".join(draws.sample(captions, 9)).split()
        text = " ".join(words[: draws.choice([1, 2, draws.randint(3, 20), draws.randint(3, 60)])])
        options = {"return_log_probs": True, "max_new_tokens": draws.choice([4, 16, 32, 64]), "priority": draws.choice([0, 0, 2])}
        options = {**options, **search}
        options["max_new_tokens"] = max(options["max_new_tokens"], options.get("min_new_tokens", 0) + 1)
        seed = {"seed": number} if search.get("do_sample") else {}
        found.append(GenerateRequest(model="en-de", text=text, request_id=f"r-{number}", **options, **seed))
    scored = [
        ScoreRequest(model="en-de", text=request.text, target="Ein Hund läuft.", return_alignment=True, request_id=f"s-{number}")
        for number, request in enumerate(found[::12])
    ]
    return [*found, *scored]


def kept(response: Any) -> bytes:
    """Return a whole answer; only how long it took may differ."""
    if isinstance(response, GenerateResponse):
        response.ClearField("timings")
    return bytes(response.SerializeToString(deterministic=True))


async def ask_all(server: Server, requests: Requests, concurrency: int, seed: int = 0) -> Answers:
    """Ask for all in a random order, so many at once, over several connections, so that every frontend has some."""
    answers: Answers = {}
    waiting = iter(random.Random(seed).sample(list(requests), len(requests)))

    async def work(stub: Any) -> None:
        for request in waiting:
            method = stub.Score if isinstance(request, ScoreRequest) else stub.Generate
            answers[request.request_id] = kept(await method(request, timeout=CALL_SECONDS))

    async with AsyncExitStack() as stack:
        connections = [aio.insecure_channel(server.address, OPTIONS) for _ in range(min(concurrency, NUM_CHANNELS))]
        stubs: list[Any] = [GenerationStub(await stack.enter_async_context(each)) for each in connections]
        await asyncio.gather(*(work(stubs[i % len(stubs)]) for i in range(concurrency)))
    return answers


async def ask_on_a_stream(server: Server, requests: Requests, *, is_bulk: bool) -> Answers:
    generated = [request for request in requests if isinstance(request, GenerateRequest)]
    async with aio.insecure_channel(server.address, OPTIONS) as channel:
        stub: Any = GenerationStub(channel)
        if is_bulk:
            messages = [GenerateBulkRequest(requests=generated[i : i + 32]) for i in range(0, len(generated), 32)]
            items = [item async for message in stub.GenerateBulk(iter(messages), timeout=300) for item in message.answers]
        else:
            items = [item async for item in stub.GenerateBatch(iter(generated), timeout=300)]
    assert all(item.HasField("response") for item in items), items
    return {item.response.request_id: kept(item.response) for item in items}


@pytest.fixture(scope="module", params=["fp32", "int8"])
def bundle(request: pytest.FixtureRequest, shipped_bundle: Callable[..., Path]) -> Path:
    return shipped_bundle("en-de", request.param)


@pytest.fixture(scope="module")
def one(bundle: Path) -> Iterator[Server]:
    with serving(bundle, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
def alone(one: Server, requests: Requests) -> Answers:
    """The answers that one engine gives to one request after another; they are of all lengths, and some end by themselves."""
    answers = asyncio.run(ask_all(one, requests, 1))
    assert len(answers) == len(requests)
    told = [GenerateResponse.FromString(answers[each.request_id]) for each in requests if isinstance(each, GenerateRequest)]
    found = [answer for response in told for answer in response.answers]
    assert {FinishReason.Name(answer.finish_reason)[14:] for answer in found} == {"EOS", "LENGTH"}
    assert len({response.usage.source_tokens for response in told}) > 20 and len({len(answer.tokens) for answer in found}) > 15
    return answers


def check(answers: Answers, alone: Mapping[str, bytes]) -> None:
    different = [name for name in answers if answers[name] != alone[name]]
    assert not different, f"{len(different)} requests have other answers than alone: {different[:5]}"


def test_answers_in_company_are_those_given_alone(one: Server, requests: Requests, alone: Answers) -> None:
    """In random orders of arrival, among requests of others, some of whom give up."""
    kinds, texts = NATIVE | {"late": late}, [request.text[::-1] for request in requests]
    for seed in range(20 if LONG else 2):
        with Callers(one, ["en-de"], kinds=kinds, texts=texts, num=NUM_DISTURBING, seed=seed):
            answers = asyncio.run(ask_all(one, requests, CONCURRENCY, seed))
        assert answers.keys() == alone.keys()
        check(answers, alone)
    for is_bulk in (False, True):
        answers = asyncio.run(ask_on_a_stream(one, requests, is_bulk=is_bulk))
        assert len(answers) == NUM_REQUESTS
        check(answers, alone)


@pytest.mark.parametrize("flags", [TWO_ENGINES, TWO_OF_EACH])
def test_answers_of_several_processes_are_those_of_one(
    bundle: Path, requests: Requests, alone: Answers, flags: tuple[str, ...]
) -> None:
    """On other numbers of slots and of threads, too."""
    if not LONG and ("int8" in str(bundle)) == ("--front-ends" in flags):
        pytest.skip("tried with TEST_LONG=1")
    with serving(bundle, *flags, "--max-slots", "9", "--num-threads", "2") as server:
        server.wait_until_whole()
        answers = asyncio.run(ask_all(server, requests, CONCURRENCY))
        assert answers.keys() == alone.keys()
        check(answers, alone)
        rows = [server.metric("dragoman_engine_rows_total", replica=number) for number in "01"]
        assert min(rows) > 0.2 * max(rows), "both engines had something to do"
