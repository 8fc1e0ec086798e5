"""Our server as a side of a comparison: requests over gRPC from a process of their own, so many at a time."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpc import aio

from benchmarks.engines.sides import Run, Workload
from benchmarks.harness.apart import Apart
from benchmarks.harness.served import ROOT, ServedModel, cpu_seconds
from dragoman.client.sync import Client
from dragoman.v1 import generation_pb2, generation_pb2_grpc

CONNECT_SECONDS = 30.0
CALL_SECONDS = 600.0


class Sender:
    """Callers on one process."""

    def __init__(self, address: str) -> None:
        self._address = address

    def run(self, workload: Workload, concurrency: int) -> Run:
        """Send a workload by callers that each wait for their answer before they send again; bare stubs, no retries, no deadlines.

        Returns:
            Its answers, the time it took, and the share of a core that sending took.

        Raises:
            TimeoutError: If there is no server.
            grpc.aio.AioRpcError: If a call fails.
        """
        return asyncio.run(self._send(workload, concurrency))

    def run_in_bulk(self, workload: Workload, concurrency: int) -> Run:
        """Give a workload to our client's `generate_many`, as somebody does who has a file to translate; returns as `run`.

        Raises:
            CallError: If a request fails.
        """
        with Client(self._address, timeout_seconds=CALL_SECONDS) as client:
            client.generate(workload.texts[0], max_new_tokens=1)  # connects, as `channel_ready` does above
            options: dict[str, Any] = {"num_beams": workload.num_beams}
            if workload.num_beams > 1:
                options["early_stopping"] = True
            started, used = time.perf_counter(), time.process_time()
            found = client.generate_many(workload.texts, concurrency=concurrency, max_new_tokens=workload.max_new_tokens, **options)
            answers = [list(result.tokens) for result in found]
            seconds = time.perf_counter() - started
        return Run(seconds, answers, {"sender": (time.process_time() - used) / seconds})

    async def _send(self, workload: Workload, concurrency: int) -> Run:
        answers: list[list[int]] = [[] for _ in workload.texts]
        waiting = iter(enumerate(workload.texts))
        async with aio.insecure_channel(self._address) as channel:
            await asyncio.wait_for(channel.channel_ready(), CONNECT_SECONDS)
            stub: Any = generation_pb2_grpc.GenerationStub(channel)  # type: ignore[no-untyped-call]

            async def call_in_turns() -> None:
                for i, text in waiting:
                    request = generation_pb2.GenerateRequest(text=text, max_new_tokens=workload.max_new_tokens)
                    if workload.num_beams > 1:
                        request.num_beams, request.early_stopping = workload.num_beams, True
                    answers[i] = list((await stub.Generate(request)).tokens)

            started, used = time.perf_counter(), time.process_time()
            await asyncio.gather(*(call_in_turns() for _ in range(concurrency)))
            seconds = time.perf_counter() - started
        return Run(seconds, answers, {"sender": (time.process_time() - used) / seconds})


class DragomanServer:
    """A real `dragoman serve` with one model, and its sender; both are started on entering and stopped on leaving."""

    def __init__(self, bundle: Path, flags: Sequence[str], source: Path = ROOT) -> None:
        """Describe the server, of that checkout; every setting that the flags do not tell is its default."""
        self._served = ServedModel(bundle, *flags, source=source)

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(self._served)
            self._sender = stack.enter_context(Apart(Sender, self._served.address))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.__exit__(kind, value, traceback)

    def run(self, workload: Workload, concurrency: int, *, is_bulk: bool = False) -> Run:
        """Send a workload, `concurrency` requests at a time: each by a call of its own, or in bulk."""
        pids = self._served.processes()
        before = {name: cpu_seconds(*own) for name, own in pids.items()}
        run: Run = self._sender.call("run_in_bulk" if is_bulk else "run", workload, concurrency)
        cores = {name: (cpu_seconds(*own) - before[name]) / run.seconds for name, own in pids.items()}
        return Run(run.seconds, run.answers, run.cores | cores)
