"""Load on a server, from a process of its own: arrivals that wait for nobody, or callers that each wait for their answer.

`python -m benchmarks.harness.load` reads a `Load` as JSON on standard input and writes a `Record` as JSON on standard output. Calls
are made with the bare stubs: no retries, no deadlines.
"""

import asyncio
import gc
import itertools
import random
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
from grpc import aio

from dragoman.v1 import generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).parents[2]
CONNECT_SECONDS = 30.0
LEAD_SECONDS = 0.2
GRACE_SECONDS = 60.0
UNFINISHED = "UNFINISHED"


class Load(msgspec.Struct, frozen=True):
    """What to send.

    Attributes:
        address: Of the server.
        texts: Sources, taken in random order, again and again.
        num_beams: Of each request.
        seconds: How long to send.
        rate: Arrivals a second, as a Poisson process; None for callers that wait.
        concurrency: Callers, where they wait.
        seed: Of the arrivals and the order of the texts.
        batch_size: Requests in a message of a `GenerateBulk` stream, `concurrency` of them under way; 0 for a call each.
    """

    address: str
    texts: list[str]
    num_beams: int
    seconds: float
    rate: float | None = None
    concurrency: int = 0
    seed: int = 0
    batch_size: int = 0


class Outcome(msgspec.Struct, frozen=True, array_like=True):
    """One call; times are seconds since the first could have been sent.

    Attributes:
        due: When it was to be sent.
        sent: When it was.
        ended: When its status came; for one that has none, when that was given up.
        code: Name of its gRPC status, or `UNFINISHED`.
    """

    due: float
    sent: float
    ended: float
    code: str


class Record(msgspec.Struct, frozen=True):
    """What came of a load.

    Attributes:
        outcomes: Of every call, in the order of sending.
        cpu_seconds: Processor time of the sending process, from the first call to the last answer.
        wall_seconds: How long that took.
    """

    outcomes: list[Outcome]
    cpu_seconds: float
    wall_seconds: float


Call = Callable[[str], Awaitable[str]]
"""Sends a text and returns the name of the status."""


async def send_openly(call: Call, load: Load) -> list[Outcome]:
    """Send when it is due, whatever has been answered; return how every call ended."""
    assert load.rate is not None
    loop = asyncio.get_running_loop()
    start = loop.time() + LEAD_SECONDS
    texts = _shuffled(load)
    calls: list[tuple[float, float, asyncio.Task[tuple[str, float]]]] = []

    async def timed(text: str) -> tuple[str, float]:
        code = await call(text)
        return code, loop.time() - start

    for due in arrivals(load.rate, load.seconds, load.seed):
        await asyncio.sleep(max(0.0, start + due - loop.time()))
        calls.append((due, loop.time() - start, asyncio.create_task(timed(next(texts)))))
    if calls:
        await asyncio.wait([task for _, _, task in calls], timeout=GRACE_SECONDS)
    given_up = loop.time() - start
    outcomes = []
    for due, sent, task in calls:
        code, ended = task.result() if task.done() else (UNFINISHED, given_up)
        task.cancel()
        outcomes.append(Outcome(due, sent, ended, code))
    return outcomes


async def send_in_turns(call: Call, load: Load) -> list[Outcome]:
    """Keep `concurrency` calls under way; return how every call ended."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    texts = _shuffled(load)
    outcomes: list[Outcome] = []

    async def work() -> None:
        while (sent := loop.time() - start) < load.seconds:
            code = await call(next(texts))
            outcomes.append(Outcome(sent, sent, loop.time() - start, code))

    await asyncio.gather(*(work() for _ in range(load.concurrency)))
    return sorted(outcomes, key=lambda outcome: outcome.sent)


async def send_in_bulk(stub: Any, load: Load) -> list[Outcome]:
    """Keep `concurrency` requests under way on one stream, `batch_size` in a message; return how each ended."""
    loop = asyncio.get_running_loop()
    start = loop.time()
    texts = _shuffled(load)
    sent: list[float] = []
    ended: dict[int, tuple[float, str]] = {}
    stream = stub.GenerateBulk()

    async def fill() -> None:
        """Send whole messages as long as there is room for one, and time."""
        while len(sent) - len(ended) + load.batch_size <= load.concurrency and loop.time() - start < load.seconds:
            numbers = range(len(sent), len(sent) + load.batch_size)
            requests = [
                generation_pb2.GenerateRequest(text=next(texts), num_beams=load.num_beams, request_id=str(i)) for i in numbers
            ]
            sent.extend([loop.time() - start] * load.batch_size)
            await stream.write(generation_pb2.GenerateBulkRequest(requests=requests))

    await fill()
    while len(ended) < len(sent):
        response = await stream.read()
        if response is aio.EOF:
            break
        now = loop.time() - start
        for answer in response.answers:
            ended[answer.index] = now, _status_name(answer.error.code) if answer.HasField("error") else "OK"
        await fill()
    await stream.done_writing()
    code = await stream.code()
    given_up = loop.time() - start, UNFINISHED if code is grpc.StatusCode.OK else code.name
    return [Outcome(at, at, *ended.get(i, given_up)) for i, at in enumerate(sent)]


def _status_name(number: int) -> str:
    return next(code.name for code in grpc.StatusCode if code.value[0] == number)


def arrivals(rate: float, seconds: float, seed: int) -> Iterator[float]:
    """Yield the times of a Poisson process, up to `seconds`."""
    generator = random.Random(seed)
    due = generator.expovariate(rate)
    while due < seconds:
        yield due
        due += generator.expovariate(rate)


def run(load: Load) -> Record:
    """Put a load on a server from a new process, and return what came of it.

    Raises:
        subprocess.CalledProcessError: If that process fails; it has said why on standard error.
    """
    command = [sys.executable, "-m", "benchmarks.harness.load"]
    done = subprocess.run(command, input=msgspec.json.encode(load), stdout=subprocess.PIPE, cwd=ROOT, check=True)
    return msgspec.json.decode(done.stdout, type=Record)


def _shuffled(load: Load) -> Iterator[str]:
    texts = list(load.texts)
    random.Random(load.seed).shuffle(texts)
    return itertools.cycle(texts)


async def send(load: Load) -> Record:
    """Put a load on its server from this process.

    Raises:
        TimeoutError: If there is no server.
    """
    async with aio.insecure_channel(load.address) as channel:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_SECONDS)
        stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]

        async def call(text: str) -> str:
            try:
                await stub.Generate(generation_pb2.GenerateRequest(text=text, num_beams=load.num_beams))
            except aio.AioRpcError as error:
                return error.code().name
            return "OK"

        wall, cpu = time.perf_counter(), time.process_time()
        if load.batch_size:
            outcomes = await send_in_bulk(stub, load)
        else:
            outcomes = await (send_in_turns if load.rate is None else send_openly)(call, load)
        return Record(outcomes, time.process_time() - cpu, time.perf_counter() - wall)


def main() -> None:
    """Do what standard input says."""
    gc.disable()  # calls are kept until the end: looking through a hundred thousand of them again and again holds sending up
    load = msgspec.json.decode(sys.stdin.buffer.read(), type=Load)
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(send(load))))


if __name__ == "__main__":
    main()
