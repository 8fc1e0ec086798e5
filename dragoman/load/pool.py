"""The sender processes of a run: started together, listened to, stopped. It adds nothing up itself."""

import asyncio
import json
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable
from types import TracebackType
from typing import ClassVar, Self

import msgspec

from dragoman.client.errors import CallError
from dragoman.load.plan import Plan
from dragoman.load.sender import Progress
from dragoman.load.worker import Message
from dragoman.model.errors import InputError

LEAD_SECONDS = 0.2
# Longest line a sender may write: an hour's histograms would fit.
_MAX_LINE_BYTES = 64 * 1024 * 1024
# A sender imports from where this process does, in the same order, whatever its own environment would add. Not by PYTHONPATH: a
# folder with a colon in its name cannot stand there, nor can an empty one, which is the working directory.
_START = "import json, sys; sys.path[:] = json.loads(sys.argv.pop()); from dragoman.load.worker import main; main()"


class SenderFailed(CallError):
    """A sender process ended before its work; its own words are on standard error."""

    default_code: ClassVar[str] = "ABORTED"


class SenderPool:
    """The sender processes, as an async context: entering starts them and waits for their connections.

    Args:
        plan: The whole run.
        on_progress: What to call with the number of a process and what it counted.
    """

    def __init__(self, plan: Plan, on_progress: Callable[[int, Progress], None]) -> None:
        self._plans = plan.parts()
        self._on_progress = on_progress
        self._processes: list[Process] = []
        self._num_stops = 0
        self.start = 0.0

    async def __aenter__(self) -> Self:
        try:
            path = json.dumps(sys.path)
            for plan in self._plans:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-P", "-c", _START, path),
                    stdin=PIPE,
                    stdout=PIPE,
                    limit=_MAX_LINE_BYTES,
                    start_new_session=True,  # Ctrl-C in a terminal is for us
                )
                self._processes.append(process)
                self._tell(process, msgspec.json.encode(plan))
            for process in self._processes:
                await self._read(process)
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._end()

    async def run(self) -> None:
        """Start the clock, and hand on what comes until every process has said its last.

        Raises:
            InputError: If a process cannot do what it was told.
            CallError: If it cannot reach the server.
            SenderFailed: If one ends before its time.
        """
        self.start = time.monotonic() + LEAD_SECONDS
        for process in self._processes:
            self._tell(process, repr(self.start).encode())
        for _ in range(self._num_stops):  # said while they were being started, when they could not have understood it
            self._tell_all_to_stop()
        try:
            async with asyncio.TaskGroup() as group:
                for number, process in enumerate(self._processes):
                    group.create_task(self._listen(number, process))
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None

    def stop(self) -> None:
        """Have them send no more; said again, give up what is under way."""
        self._num_stops += 1
        if self.start:
            self._tell_all_to_stop()

    def _tell_all_to_stop(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                self._tell(process, b"stop")

    async def _listen(self, number: int, process: Process) -> None:
        is_last = False
        while not is_last:
            message = await self._read(process)
            if message.progress is not None:
                self._on_progress(number, message.progress)
                is_last = message.progress.is_last

    async def _read(self, process: Process) -> Message:
        assert process.stdout is not None
        line = await process.stdout.readline()
        if not line:
            raise SenderFailed(f"a sender process ended with exit code {await process.wait()}")
        message = msgspec.json.decode(line, type=Message)
        if message.error:
            raise CallError(message.error, code=message.code) if message.code else InputError(message.error)
        return message

    def _tell(self, process: Process, line: bytes) -> None:
        assert process.stdin is not None
        process.stdin.write(line + b"\n")

    async def _end(self) -> None:
        """Let the processes go; whoever does not go by itself is ended."""
        for process in self._processes:
            assert process.stdin is not None
            process.stdin.close()
        for process in self._processes:
            try:
                await asyncio.wait_for(process.wait(), 5.0)
            except TimeoutError:
                process.kill()
                await process.wait()
