"""Plans, results and servers for the tests of the load generator."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from grpc import aio

from dragoman.load import histogram
from dragoman.load.plan import Plan, Server, Work
from dragoman.load.result import (
    Result,
    SenderResult,
    TimelineResult,
    summarise,
    summarise_group,
)
from dragoman.load.tally import Group, Outcome, Slice, Tally
from dragoman.load.texts import Lengths
from dragoman.v1 import generation_pb2, generation_pb2_grpc

PATIENCE_SECONDS = 60


class Scripted(generation_pb2_grpc.GenerationServicer):
    """Answers at once; while `is_stalled` it lets everybody wait; `failures` are the codes of the next calls.

    A probe goes by other rules: it is answered once `is_silent` is not set, or refused with the next of `refusals`; it counts among
    the `probes` only.
    """

    def __init__(self) -> None:
        self.is_stalled = threading.Event()
        self.requests = []
        self.metadata = []
        self.failures = []
        self.probes = []
        self.is_silent = threading.Event()
        self.refusals = []
        self.num_cancelled = 0

    async def _begin(self, request, context):
        if "-probe-" in request.request_id:
            self.probes.append(request)
            while self.is_silent.is_set():
                await asyncio.sleep(0.005)
            if self.refusals:
                await context.abort(*self.refusals.pop(0))
            return
        self.requests.append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            while self.is_stalled.is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if self.failures:
            await context.abort(self.failures.pop(0), "no")

    def _answer(self, request):
        return generation_pb2.GenerateResponse(
            request_id=request.request_id,
            tokens=[1, 2, 3],
            usage=generation_pb2.Usage(source_tokens=5, generated_tokens=4),
            timings=generation_pb2.Timings(queue_seconds=0.001, total_seconds=0.002),
        )

    async def Generate(self, request, context):
        await self._begin(request, context)
        return self._answer(request)

    async def GenerateStream(self, request, context):
        await self._begin(request, context)
        for token in (1, 2, 3):
            yield generation_pb2.GenerateStreamResponse(tokens=[token])
        yield generation_pb2.GenerateStreamResponse(result=self._answer(request))

    async def GenerateBatch(self, requests, context):
        async for request in requests:
            await self._begin(request, context)
            response = generation_pb2.GenerateBatchResponse(request_id=request.request_id)
            if request.text.startswith("refuse"):
                response.error.code = 3
            else:
                response.response.CopyFrom(self._answer(request))
            yield response

    async def ListModels(self, request, context):
        model = generation_pb2.Model(name="en-de", version="3", is_ready=True, precision="fp32", device="cpu", max_slots=64)
        return generation_pb2.ListModelsResponse(models=[model])


class FakeServer:
    """A real gRPC server of scripted answers, on a thread with an event loop of its own."""

    def __init__(self) -> None:
        self.service = Scripted()
        self.address = ""
        self._began = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        assert self._began.wait(PATIENCE_SECONDS)

    async def _serve(self) -> None:
        self._over = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        server = aio.server()
        generation_pb2_grpc.add_GenerationServicer_to_server(self.service, server)
        self.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        self._began.set()
        await self._over.wait()
        await server.stop(None)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()


@pytest.fixture
def fake_server() -> Iterator[FakeServer]:
    server = FakeServer()
    yield server
    server.service.is_stalled.clear()
    server.service.is_silent.clear()
    server.stop()


@pytest.fixture
def make_plan() -> Callable[..., Plan]:
    """Make a plan; sources are of three words."""

    def make(target: str = "127.0.0.1:1", **fields) -> Plan:
        work = fields.pop("work", {})
        return Plan(server=Server(target), work=Work(**{"words": Lengths("constant", (3.0,)), **work}), **fields)

    return make


@pytest.fixture
def make_result() -> Callable[..., Result]:
    """Make a result from the latencies of each second: every request is due and answered in its second."""

    def make(latencies: list[list[float]], **fields) -> Result:
        tally = Tally()
        slos = fields.get("slos", {})
        for second, times in enumerate(latencies):
            for time in times:
                outcome = Outcome("unary", False, due=second + 0.25, generated_tokens=10)
                outcome.ended = outcome.due + time
                tally.record(outcome, slos, 0.0, float(len(latencies)))
        seconds = float(len(latencies))
        total = summarise_group(tally.groups.get("unary", Group()), seconds)
        empty = summarise(histogram.Histogram())
        values = {
            "created": "2026-01-02T03:04:05+00:00",
            "settings": {"--server": "somewhere:8500"},
            "versions": {"python": ".".join(map(str, sys.version_info[:3]))},
            "models": [{"name": "en-de", "version": "3", "precision": "fp32", "device": "cpu", "max_slots": "64"}],
            "seconds": seconds,
            "warmup_seconds": 0.0,
            "is_interrupted": False,
            "slos": {},
            "total": total,
            "groups": {"unary": total},
            "timeline": TimelineResult(1, [tally.slices.get(second, Slice()) for second in range(len(latencies))]),
            "sender": SenderResult(1, total.counts.num, summarise(histogram.of([0.001])), empty, 0.1),
        }
        return Result(**(values | fields))

    return make
