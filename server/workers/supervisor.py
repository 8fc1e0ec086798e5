"""Supervision of child processes (engines and frontend workers): start, watch, restart with backoff, stop."""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass

import structlog

from dragoman.server.system import kill_group

log = structlog.get_logger("dragoman.supervisor")

STOP_SECONDS = 1.0
STABLE_SECONDS = 60.0
# The first restart is almost immediate; a model that crashes at each start must not take the cores that others need.
INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 30.0
RESTART_RETRY_SECONDS = 0.5
"""Retry hint while an engine is away."""
WATCH_SECONDS = 1.0
LAST_WORDS_SECONDS = 0.5


class CannotStart(Exception):
    """A child process failed before it was ready for the first time; the message gives the reason."""


class EngineCannotStart(CannotStart):
    """No engine of a model could be started."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """Restart of a dead or silent child process."""

    initial_backoff_seconds: float = INITIAL_BACKOFF_SECONDS  # wait before the first restart; doubled for each following restart
    max_backoff_seconds: float = MAX_BACKOFF_SECONDS
    watchdog_seconds: float = 30.0  # silence after which a process counts as hung; the heartbeat interval is a second

    def backoff_seconds(self, previous: float | None, ready_seconds: float) -> float:
        """Return the wait before a restart, given the last one (None for none); reset after `STABLE_SECONDS` of readiness."""
        if previous is None or ready_seconds > STABLE_SECONDS:
            return min(self.initial_backoff_seconds, self.max_backoff_seconds)
        return min(2 * previous, self.max_backoff_seconds)


class ProcessSupervisor(ABC):
    """Keeps one child process running; `failure` is a more specific reason of the exit than the exit code, or empty."""

    def __init__(
        self,
        kind: str,
        subject: str,
        policy: RestartPolicy,
        fields: dict[str, object],
        on_restart: Callable[[], None] = lambda: None,
    ) -> None:
        """Describe a child process, named `subject` in errors; `begin` starts it, `on_restart` is called before each restart."""
        self.policy = policy
        self.process: Process | None = None
        self.num_restarts = 0
        self.failure = ""
        self._kind, self._subject, self._fields = kind, subject, fields
        self._on_restart = on_restart
        self._num_heard = 0
        self._ready_at: float | None = None
        self._first_ready: asyncio.Future[None] | None = None
        self._stopping = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def process_id(self) -> int | None:
        """Id of the process; None while there is none."""
        return None if self.process is None else self.process.pid

    @property
    def is_ready(self) -> bool:
        """Whether the child takes work."""
        return self._ready_at is not None and not self._stopping.is_set()

    @property
    def is_stopping(self) -> bool:
        """Whether `stop` was called."""
        return self._stopping.is_set()

    def begin(self, *, is_persistent: bool = False) -> asyncio.Future[None]:
        """Start the child and keep it running; with `is_persistent`, retry even if the first start fails.

        Return a future that is done when the child is first ready, and fails with `CannotStart` if the first start does.
        """
        self._first_ready = first_ready = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._keep_running(first_ready, is_persistent), name=f"{self._kind} {self._subject}")
        return first_ready

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Stop the child, and kill it after some seconds; a child that is not ready is killed at once."""
        self._stopping.set()
        if self.process is not None:
            self._request_stop()
            if self._ready_at is None:
                kill_group(self.process)
        if self._task is not None:
            done, _ = await asyncio.wait([self._task], timeout=seconds)
            if not done:
                log.warning(f"{self._kind} does not stop, killing it", **self._fields)
                self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def hear(self) -> None:
        """Record a heartbeat."""
        self._num_heard += 1

    def set_ready(self) -> None:
        """Record that the child is ready."""
        self._ready_at = time.monotonic()
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_result(None)

    def set_broken(self) -> None:
        """Kill the child, which has sent an unreadable message."""
        self.failure = "it sent what cannot be handled"
        if self.process is not None:
            kill_group(self.process)

    @abstractmethod
    def _run_process(self) -> AbstractAsyncContextManager[Process]:
        """Start the process and exchange messages with it; on exit release its resources."""

    @abstractmethod
    def _request_stop(self) -> None:
        """Send the stop message."""

    @abstractmethod
    async def _read_last_words(self) -> None:
        """Read the remaining messages of an exited process."""

    async def _keep_running(self, first_ready: asyncio.Future[None], is_persistent: bool) -> None:
        """Run process after process until stopped; fail `first_ready` if the first never becomes ready."""
        backoff: float | None = None
        reason = "it was stopped"
        try:
            while not self._stopping.is_set():
                ended, ready_seconds = await self._run_once()
                if self._stopping.is_set():  # it was killed for that
                    return
                reason = ended
                if not (first_ready.done() or is_persistent):
                    return
                self._fail_start(first_ready, reason)
                backoff = self.policy.backoff_seconds(backoff, ready_seconds)
                log.error(f"{self._kind} ended, restarting", **self._fields, reason=reason, backoff_seconds=backoff)
                self.num_restarts += 1
                self._on_restart()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff):
                        await self._stopping.wait()
        finally:
            self._fail_start(first_ready, reason)

    def _fail_start(self, first_ready: asyncio.Future[None], reason: str) -> None:
        if not first_ready.done():
            kind = EngineCannotStart if self._kind == "engine" else CannotStart
            first_ready.set_exception(kind(f"{self._subject}: {reason}"))
            first_ready.exception()  # retrieved, even where nothing awaits it

    async def _run_once(self) -> tuple[str, float]:
        """Run one process to its end; return the reason and the time for which it was ready."""
        self._ready_at, self.failure = None, ""
        reason = ""
        try:
            async with self._run_process() as process:
                self.process = process
                try:
                    reason = await self._until_end(process)
                finally:
                    ready_seconds = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
                    self.process = self._ready_at = None
        except Exception as error:
            log.exception(f"{self._kind} cannot be run", **self._fields)
            return f"{type(error).__name__}: {error}", 0.0
        return self.failure or reason, ready_seconds

    async def _until_end(self, process: Process) -> str:
        """Wait until the process has exited or is killed as silent; silence is counted in waits, as this process may be paused."""
        if self._stopping.is_set():
            kill_group(process)
        ended = asyncio.create_task(process.wait())
        silence = 0.0
        try:
            while True:
                num_heard = self._num_heard
                if (await asyncio.wait([ended], timeout=WATCH_SECONDS))[0]:
                    await self._read_last_words()
                    return _describe_exit(ended.result())
                is_silent = self._ready_at is not None and self._num_heard == num_heard
                silence = silence + WATCH_SECONDS if is_silent else 0.0
                if silence >= self.policy.watchdog_seconds:
                    return f"silent for {silence:.0f} s"
        finally:
            if not ended.done():
                kill_group(process)
                await asyncio.wait([ended], timeout=STOP_SECONDS)
                await self._read_last_words()
            ended.cancel()


def _describe_exit(code: int) -> str:
    return f"killed by signal {-code}" if code < 0 else f"exit code {code}"
