"""What an engine runs in: a process of its own, or a thread of this one."""

import asyncio
import contextlib
import os
import sys
import threading
from collections.abc import Callable
from typing import Protocol

import msgspec
import structlog

from dragoman.server.engine.settings import EngineSettings

log = structlog.get_logger("dragoman.supervisor")


class Host(Protocol):
    """What an engine runs in."""

    async def wait(self) -> str:
        """Return how it ended, once it has."""
        ...

    def kill(self) -> None:
        """End it at once."""
        ...


class ProcessHost:
    """An engine in a process of its own, which also ends when this process does: its standard input closes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    @classmethod
    async def start(cls, settings: EngineSettings) -> "ProcessHost":
        """Start the process, with this one's import path and never what happens to lie in the working directory.

        Raises:
            OSError: If the system has no room for it.
        """
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "dragoman.server.engine.process", msgspec.json.encode(settings).decode()),
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,
        )
        return cls(process)

    async def wait(self) -> str:
        """See `Host`."""
        code = await self.process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """See `Host`."""
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()


class ThreadHost:
    """The same engine on a thread of this process, for debugging and tests."""

    def __init__(self, settings: EngineSettings) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[str] = self._loop.create_future()
        self._stop: Callable[[], None] = lambda: None
        threading.Thread(target=self._run, args=(settings,), name="engine", daemon=True).start()

    async def wait(self) -> str:
        """See `Host`."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """Ask it to end after its current step: a thread cannot be killed."""
        self._stop()

    def _run(self, settings: EngineSettings) -> None:
        try:
            from dragoman.server.engine.process import EngineLoop  # not part of a front end whose engines are processes

            engine_loop = EngineLoop(settings)
            self._stop = engine_loop.stop
            reason = f"exit code {engine_loop.run()}"
        except Exception as error:
            log.exception("engine thread failed")
            reason = f"{type(error).__name__}: {error}"
        with contextlib.suppress(RuntimeError):  # the event loop may be gone already
            self._loop.call_soon_threadsafe(self._ended.set_result, reason)
