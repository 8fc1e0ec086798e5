"""A gRPC server of scripted answers, plans and results made by hand, and `dragoman load` as a process."""

import asyncio
import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
from grpc import aio

from dragoman.load.plan import Plan, Server, Work
from dragoman.load.result import Result
from dragoman.load.run import Run
from dragoman.load.sender import Progress
from dragoman.load.tally import Outcome, Tally
from dragoman.load.texts import Lengths
from dragoman.v1 import generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 60


class Scripted(generation_pb2_grpc.GenerationServicer):
    """Answers every request at once; a text that begins with `refuse` is refused in a batch.

    `failures` are the statuses of the next requests that fail, `refusals` statuses and messages of the next probes. While `stall`
    or `stall_probes` is set, no request or probe is answered. What comes is kept in `requests`, `probes` and `metadata`.
    """

    def __init__(self) -> None:
        self.address = ""
        self.requests, self.probes, self.metadata = [], [], []
        self.failures: list[grpc.StatusCode] = []
        self.refusals: list[tuple[grpc.StatusCode, str]] = []
        self.stall, self.stall_probes = threading.Event(), threading.Event()
        self.num_cancelled = 0

    async def _begin(self, request: Any, context: Any) -> None:
        is_probe = "-probe-" in request.request_id
        (self.probes if is_probe else self.requests).append(request)
        self.metadata.append(dict(context.invocation_metadata()))
        try:
            while (self.stall_probes if is_probe else self.stall).is_set():
                await asyncio.sleep(0.005)
        except asyncio.CancelledError:
            self.num_cancelled += 1
            raise
        if is_probe and self.refusals:
            await context.abort(*self.refusals.pop(0))
        if not is_probe and self.failures:
            await context.abort(self.failures.pop(0), "no")

    def _answer(self, request: Any) -> Any:
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


@contextlib.contextmanager
def serving(credentials: grpc.ServerCredentials | None = None) -> Iterator[Scripted]:
    """Serve scripted answers from a thread with an event loop of its own, over TLS with credentials."""
    service, started, loop, over = Scripted(), threading.Event(), asyncio.new_event_loop(), asyncio.Event()

    async def serve() -> None:
        server = aio.server()
        generation_pb2_grpc.add_GenerationServicer_to_server(service, server)
        address = "127.0.0.1:0"
        port = server.add_secure_port(address, credentials) if credentials else server.add_insecure_port(address)
        service.address = f"127.0.0.1:{port}"
        await server.start()
        started.set()
        await over.wait()
        await server.stop(None)

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(PATIENCE_SECONDS)
    yield service
    service.stall.clear()
    service.stall_probes.clear()
    loop.call_soon_threadsafe(over.set)
    thread.join()
    loop.close()


def make_plan(target: str = "127.0.0.1:1", token: str | None = None, work: dict[str, Any] | None = None, **fields: Any) -> Plan:
    """Return a plan of sources of three words."""
    return Plan(server=Server(target, token=token), work=Work(**{"words": Lengths("constant", (3.0,))} | (work or {})), **fields)


def run_of(plan: Plan, progress: Progress) -> Run:
    """Return a run of one process that has told its progress."""
    run = Run(plan)
    run._take(0, progress)
    return run


def make_result(latencies: list[list[float]], slos: dict[str, float] | None = None, **fields: Any) -> Result:
    """Return a result from the latencies of each second: every request is due and answered in its second."""
    tally, plan = Tally(), make_plan(seconds=float(len(latencies)), slos=slos or {})
    for second, times in enumerate(latencies):
        tally.slice_at(second)
        for time in times:
            due = second + 0.25
            tally.record(Outcome("unary", False, due, due + time, generated_tokens=10), plan.slos, 0.0, plan.seconds)
    run = run_of(plan, Progress(tally, sum(map(len, latencies)), 0, 0.1, plan.seconds, is_last=True))
    model = {"name": "en-de", "version": "3", "precision": "fp32", "device": "cpu", "max_slots": "64"}
    result = run.result({"--server": "somewhere:8500"}, {"python": "3"}, [model])
    return msgspec.structs.replace(result, **{"warnings": []} | fields)


@contextlib.contextmanager
def started(*arguments: object) -> Iterator[subprocess.Popen[str]]:
    """Start `dragoman load` as a process, which is killed if it still runs at the end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
    command = [sys.executable, "-m", "dragoman", "load", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, env=environment, text=True, **pipes) as process:
        try:
            yield process
        finally:
            process.kill()
