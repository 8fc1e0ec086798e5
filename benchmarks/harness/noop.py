"""A minimal gRPC server in Python: grpc.aio, the native protocol, no interceptor, and one fixed answer.

`python -m benchmarks.harness.noop` reads that answer, a serialised `GenerateResponse`, from standard input, writes its port to
standard output, and answers every `Generate`, and every request of a `GenerateBulk`, with it until SIGTERM.
"""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from grpc import aio

from dragoman.v1 import generation_pb2, generation_pb2_grpc

ROOT = Path(__file__).parents[2]
STOP_SECONDS = 10.0


class NoopServicer(generation_pb2_grpc.GenerationServicer):
    """Answers every request with a new copy of one message."""

    def __init__(self, answer: bytes) -> None:
        """Take the serialised answer."""
        self._answer = generation_pb2.GenerateResponse.FromString(answer)

    async def Generate(self, request: generation_pb2.GenerateRequest, context: Any) -> generation_pb2.GenerateResponse:
        """Return the answer."""
        response = generation_pb2.GenerateResponse()
        response.CopyFrom(self._answer)
        return response

    async def GenerateBulk(
        self, requests: AsyncIterator[generation_pb2.GenerateBulkRequest], context: Any
    ) -> AsyncIterator[generation_pb2.GenerateBulkResponse]:
        """Answer every message with one message of as many answers."""
        index = 0
        async for message in requests:
            response = generation_pb2.GenerateBulkResponse()
            for _ in message.requests:
                answer = response.answers.add(index=index)
                answer.response.CopyFrom(self._answer)
                index += 1
            yield response


class NoopServer:
    """The server in its own process, as a context manager.

    Attributes:
        address: Address of its port.
        pid: Process id.
    """

    def __init__(self, answer: generation_pb2.GenerateResponse) -> None:
        """Take the answer to give."""
        self._answer = answer.SerializeToString()
        self.address = ""
        self.pid = 0

    def __enter__(self) -> Self:
        """Start it and wait until it listens."""
        command = [sys.executable, "-m", "benchmarks.harness.noop"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
        try:
            assert self._process.stdin is not None and self._process.stdout is not None
            self._process.stdin.write(self._answer)
            self._process.stdin.close()
            port = self._process.stdout.readline()
            if not port.strip().isdigit():
                raise RuntimeError("the no-op server did not start; standard error has the cause")
        except BaseException:
            self._end()
            raise
        self.address, self.pid = f"127.0.0.1:{int(port)}", self._process.pid
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        """Stop it."""
        self._process.terminate()
        try:
            self._process.wait(STOP_SECONDS)
        finally:
            self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None and not pipe.closed:
                pipe.close()


async def serve(answer: bytes) -> None:
    """Serve until SIGTERM."""
    stopping = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stopping.set)
    server = aio.server()
    generation_pb2_grpc.add_GenerationServicer_to_server(NoopServicer(answer), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(port, flush=True)
    await stopping.wait()
    await server.stop(None)


if __name__ == "__main__":
    asyncio.run(serve(sys.stdin.buffer.read()))
