"""Requests by each of the three ways that give whole answers, from a process of its own.

`python -m benchmarks.harness.bulk_load` reads a `BulkLoad` as JSON on standard input and writes a `BulkRecord` as JSON on standard
output. As soon as something is answered as much is sent again, so that the same number of requests is always under way.
"""

import asyncio
import itertools
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
from grpc import aio

from dragoman.v1 import generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).parents[2]
CONNECT_SECONDS = 30.0
Way = Literal["Generate", "GenerateBatch", "GenerateBulk"]


class BulkLoad(msgspec.Struct, frozen=True):
    """What to send.

    Attributes:
        address: Of the server.
        texts: Sources, again and again.
        way: The RPC.
        seconds: How long to send.
        concurrency: Requests under way.
        per_stream: Of those, on one stream; in `GenerateBulk` as many begin as one message.
    """

    address: str
    texts: list[str]
    way: Way
    seconds: float
    concurrency: int = 64
    per_stream: int = 16


class BulkRecord(msgspec.Struct, frozen=True):
    """What came of it.

    Attributes:
        num_answers: Answers; one that is an error fails all of it.
        cpu_seconds: Processor time of the sender.
        wall_seconds: From the first request to the last answer.
    """

    num_answers: int
    cpu_seconds: float
    wall_seconds: float


class Sender:
    """Sends until its time is over."""

    def __init__(self, load: BulkLoad, stub: Any) -> None:
        """Start with nothing sent."""
        self._load, self._stub = load, stub
        self._texts, self._ids = itertools.cycle(load.texts), itertools.count()
        self._end = time.perf_counter() + load.seconds
        self.num_answers = 0

    async def call(self) -> None:
        """Make calls of one request, one after the other."""
        while time.perf_counter() < self._end:
            await self._stub.Generate(self._request())
            self.num_answers += 1

    async def stream(self) -> None:
        """Keep requests under way on a stream."""
        is_bulk = self._load.way == "GenerateBulk"
        call = getattr(self._stub, self._load.way)()

        async def send(count: int) -> None:
            requests = [self._request() for _ in range(count)]
            for message in [generation_pb2.GenerateBulkRequest(requests=requests)] if is_bulk else requests:
                await call.write(message)

        await send(self._load.per_stream)
        num_open = self._load.per_stream
        while num_open:
            response = await call.read()
            answers = response.answers if is_bulk else [response]
            if any(answer.HasField("error") for answer in answers):
                raise RuntimeError(f"every request should be answered: {answers}")
            self.num_answers += len(answers)
            num_open -= len(answers)
            if time.perf_counter() < self._end:
                await send(len(answers))
                num_open += len(answers)
        await call.done_writing()

    def _request(self) -> generation_pb2.GenerateRequest:
        return generation_pb2.GenerateRequest(text=next(self._texts), num_beams=1, request_id=f"r{next(self._ids)}")


def run(load: BulkLoad) -> BulkRecord:
    """Put a load on a server from a new process, and return what came of it.

    Raises:
        subprocess.CalledProcessError: If that process fails; it has said why on standard error.
    """
    command = [sys.executable, "-m", "benchmarks.harness.bulk_load"]
    done = subprocess.run(command, input=msgspec.json.encode(load), stdout=subprocess.PIPE, cwd=ROOT, check=True)
    return msgspec.json.decode(done.stdout, type=BulkRecord)


async def send(load: BulkLoad) -> BulkRecord:
    """Put a load on its server from this process.

    Raises:
        TimeoutError: If there is no server.
    """
    async with aio.insecure_channel(load.address) as channel:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_SECONDS)
        sender = Sender(load, generation_pb2_grpc.GenerationStub(channel))  # type: ignore[no-untyped-call]
        wall, cpu = time.perf_counter(), time.process_time()
        if load.way == "Generate":
            await asyncio.gather(*(sender.call() for _ in range(load.concurrency)))
        else:
            await asyncio.gather(*(sender.stream() for _ in range(load.concurrency // load.per_stream)))
        return BulkRecord(sender.num_answers, time.process_time() - cpu, time.perf_counter() - wall)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(asyncio.run(send(msgspec.json.decode(sys.stdin.buffer.read(), type=BulkLoad)))))
