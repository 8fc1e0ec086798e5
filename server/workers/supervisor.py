"""Engines: start, watch, restart with back-off, stop."""

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec
import structlog

from dragoman.server.engine.client import EngineClient
from dragoman.server.engine.link import ZmqLink
from dragoman.server.engine.messages import Ready, Statistics
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.errors import NotReady, Unavailable
from dragoman.server.workers.engine_calls import EngineCalls
from dragoman.server.workers.hosts import Host, ProcessHost, ThreadHost

log = structlog.get_logger("dragoman.supervisor")

STOP_SECONDS = 1.0
STABLE_SECONDS = 60.0
# A first crash is replaced at once; a model that crashes at each start must not take the processors that others need.
INITIAL_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS = 0.1, 30.0
WATCH_SECONDS = 1.0
LAST_WORDS_SECONDS = 0.5


class EngineCannotStart(Exception):
    """An engine failed before it was ready for the first time; the message says why."""


@contextlib.asynccontextmanager
async def stopped_unless_started(stop: Callable[[], Awaitable[None]], *, is_persistent: bool) -> AsyncIterator[None]:
    """Have what is started within the `with` be stopped if that fails, unless it is tried again.

    Args:
        stop: Stops it.
        is_persistent: Whether it is tried again if it cannot be started.
    """
    try:
        yield
    except BaseException as error:
        if not (is_persistent and isinstance(error, EngineCannotStart)):
            await stop()
        raise


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead or silent engine is replaced.

    Attributes:
        initial_backoff_seconds: Wait before the first restart; doubles with each one that follows.
        max_backoff_seconds: Longest wait.
        watchdog_seconds: Silence after which a process counts as hung; it sends a sign of life every second.
    """

    initial_backoff_seconds: float = INITIAL_BACKOFF_SECONDS
    max_backoff_seconds: float = MAX_BACKOFF_SECONDS
    watchdog_seconds: float = 30.0

    def backoff_seconds(self, previous: float | None, ready_seconds: float) -> float:
        """Return how long to wait before a restart.

        Args:
            previous: The wait before the engine's last start; None if that was its first.
            ready_seconds: How long it has been ready since; after long enough, what came before is forgotten.
        """
        if previous is None or ready_seconds > STABLE_SECONDS:
            return min(self.initial_backoff_seconds, self.max_backoff_seconds)
        return min(2 * previous, self.max_backoff_seconds)


class Attachment(Protocol):
    """What listens to one incarnation of an engine, see `EngineClient`."""

    ready: asyncio.Future[Ready]
    last_heard: float
    fatal: str | None

    @property
    def has_failed(self) -> bool:
        """Whether `fail` was called."""
        ...

    def stop_engine(self) -> None:
        """Tell the engine process to end."""
        ...

    def fail(self, error: Unavailable) -> None:
        """End everything that waits."""
        ...

    async def close(self) -> None:
        """Detach."""
        ...


A = TypeVar("A", bound=Attachment)


class Supervisor(Generic[A]):
    """Keeps one engine running, whichever process it lives in at the moment."""

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        policy: RestartPolicy,
        attach: Callable[[str], A],
        *,
        is_inline: bool,
        on_end: Callable[[], None],
        on_change: Callable[[], None],
        on_restart: Callable[[], None],
        replica: int | None = None,
    ) -> None:
        """Describe an engine; `start` starts it.

        Args:
            name: Of the model, for messages.
            settings: What the process is told; its endpoint is chosen anew for each start.
            policy: When to restart.
            attach: Attaches to an endpoint.
            is_inline: Run the engine on a thread instead.
            on_end: Called when an incarnation has ended, whether it was ready or not.
            on_change: Called when `is_ready` has changed, and after `on_end`.
            on_restart: Called when a dead engine is about to be replaced.
            replica: Which of the model's replicas it is, for the log; None for its only engine.
        """
        self._names = {"model": name} if replica is None else {"model": name, "replica": replica}
        self.name, self.settings, self.policy = name, settings, policy
        self.ready: Ready | None = None
        self.device = ""
        self._attach, self._is_inline = attach, is_inline
        self._on_end, self._on_change, self._on_restart = on_end, on_change, on_restart
        self._client: A | None = None
        self._host: Host | None = None
        self._watch: asyncio.Task[None] | None = None
        self._stopping = asyncio.Event()
        self._ready_at: float | None = None

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        return self._client is not None and self.ready is not None and not self._stopping.is_set()

    @property
    def process_id(self) -> int | None:
        """Of the engine's process; None when there is none."""
        return self._host.process.pid if isinstance(self._host, ProcessHost) else None

    @property
    def process_ids(self) -> list[int]:
        """Of the engine's process, if it has one at the moment."""
        return [] if self.process_id is None else [self.process_id]

    async def start(self, *, is_persistent: bool = False) -> None:
        """Start the engine, wait until it is ready, and keep it running from then on.

        Args:
            is_persistent: Whether it is tried again also if it never was ready.

        Raises:
            EngineCannotStart: If the first try ends, or is stopped, before it is ready.
        """
        async with stopped_unless_started(self.stop, is_persistent=is_persistent):
            await self.begin(is_persistent=is_persistent)

    def begin(self, *, is_persistent: bool = False) -> asyncio.Future[None]:
        """Start the engine and keep it running.

        Args:
            is_persistent: Whether it is tried again also if it never was ready.

        Returns:
            What is done when it is ready for the first time; it fails with `EngineCannotStart` if the first try does.
        """
        ready = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._keep_running(ready, is_persistent), name=f"engine {self.name}")
        return ready

    async def stop(self) -> None:
        """End the engine; what still runs ends with `Unavailable`. One that is not ready has nothing to finish, and is killed."""
        self._stopping.set()
        if self._client is not None:
            self._client.stop_engine()
        if self._host is not None and self.ready is None:
            self._host.kill()
        if self._watch is not None:
            done, _ = await asyncio.wait([self._watch], timeout=STOP_SECONDS)
            if not done:
                log.warning("engine does not stop, killing it", **self._names)
                self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    async def _keep_running(self, first_ready: asyncio.Future[None], is_persistent: bool) -> None:
        """Run incarnation after incarnation until stopped; fail `first_ready` if the very first does not get there."""
        backoff: float | None = None
        reason = "it was stopped"
        try:
            while not self._stopping.is_set():
                reason = await self._run_once(first_ready)
                if self._stopping.is_set() or not (first_ready.done() or is_persistent):
                    return
                self._fail_start(first_ready, reason)
                ready_seconds = 0.0 if self._ready_at is None else time.monotonic() - self._ready_at
                backoff = self.policy.backoff_seconds(backoff, ready_seconds)
                log.error("engine ended, restarting", **self._names, reason=reason, backoff_seconds=backoff)
                self._on_restart()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff):
                        await self._stopping.wait()
        finally:
            self._fail_start(first_ready, reason)

    def _fail_start(self, first_ready: asyncio.Future[None], reason: str) -> None:
        if not first_ready.done():
            first_ready.set_exception(EngineCannotStart(f"model {self.name!r}: {reason}"))

    async def _run_once(self, first_ready: asyncio.Future[None]) -> str:
        """Run one incarnation to its end; return how it ended, or why it could not even begin."""
        self._ready_at = None
        try:
            with tempfile.TemporaryDirectory(prefix="dragoman-", ignore_cleanup_errors=True) as folder:
                return await self._run_at(f"ipc://{folder}/engine", first_ready)
        except Exception as error:
            log.exception("engine cannot be run", **self._names)
            return f"{type(error).__name__}: {error}"

    async def _run_at(self, endpoint: str, first_ready: asyncio.Future[None]) -> str:
        """Attach to an endpoint and start the engine that listens there."""
        settings = msgspec.structs.replace(self.settings, endpoint=endpoint)
        client = self._attach(endpoint)
        try:
            host: Host = ThreadHost(settings) if self._is_inline else await ProcessHost.start(settings)
            reason = await self._follow(client, host, first_ready)
        finally:
            await client.close()
        return reason if client.fatal is None else f"the engine cannot start: {client.fatal}"

    async def _follow(self, client: A, host: Host, first_ready: asyncio.Future[None]) -> str:
        """Serve with an engine until it ends or has to be ended; return how."""
        self._client, self._host = client, host
        if self._stopping.is_set():
            host.kill()
        ended = asyncio.create_task(host.wait())
        readying = asyncio.create_task(self._become_ready(client, first_ready))
        try:
            reason = await self._until_end(client, ended)
            if not (client.ready.done() or self._stopping.is_set()):
                await asyncio.wait([client.ready], timeout=LAST_WORDS_SECONDS)  # a process may end before its message is read
            return reason
        finally:
            readying.cancel()
            self._client = self._host = self.ready = None
            client.fail(Unavailable(f"the engine of model {self.name!r} ended", self.policy.initial_backoff_seconds))
            self._on_end()
            self._on_change()
            if not ended.done():
                host.kill()
                await asyncio.wait([ended], timeout=STOP_SECONDS)
            ended.cancel()
            await asyncio.gather(readying, ended, return_exceptions=True)

    async def _become_ready(self, client: A, first_ready: asyncio.Future[None]) -> None:
        self.ready = await client.ready
        self._ready_at = time.monotonic()
        self.device = self.ready.device
        log.info(
            "engine ready",
            **self._names,
            engine_pid=self.process_id,
            device=self.device,
            load_seconds=round(self.ready.load_seconds, 3),
        )
        self._on_change()
        if not first_ready.done():
            first_ready.set_result(None)

    async def _until_end(self, client: A, ended: asyncio.Task[str]) -> str:
        """Wait for the end, or for a silence that is too long.

        Silence is counted in our own waits, not read off the clock: while this process was held up it heard nothing either.
        """
        silence = 0.0
        while True:
            heard = client.last_heard
            done, _ = await asyncio.wait([ended], timeout=WATCH_SECONDS)
            if done:
                return ended.result()
            if client.has_failed and client.fatal is None:
                return "it sent what cannot be handled"
            silence = silence + WATCH_SECONDS if client.ready.done() and client.last_heard == heard else 0.0
            if silence >= self.policy.watchdog_seconds:
                return f"silent for {silence:.0f} s"


class SupervisedEngine(Supervisor[EngineClient], EngineCalls):
    """The engine of a model that has one.

    Requests that run when a process dies end once with `Unavailable`, and so do those that come before its successor is ready.

    Attributes:
        num_replicas: One.
    """

    num_replicas = 1

    def __init__(
        self,
        name: str,
        settings: EngineSettings,
        policy: RestartPolicy,
        *,
        is_inline: bool,
        on_statistics: Callable[[Statistics], None],
        on_change: Callable[[], None],
        on_restart: Callable[[], None],
    ) -> None:
        """Describe an engine; see `Supervisor`.

        Args:
            name: See `Supervisor`, as the next two.
            settings: See `Supervisor`.
            policy: See `Supervisor`.
            is_inline: See `Supervisor`.
            on_statistics: Called with each report's statistics.
            on_change: See `Supervisor`, as the next.
            on_restart: See `Supervisor`.
        """
        Supervisor.__init__(
            self,
            name,
            settings,
            policy,
            lambda endpoint: EngineClient(ZmqLink(endpoint), on_statistics),
            is_inline=is_inline,
            on_end=lambda: on_statistics(Statistics()),  # nothing runs or waits any more
            on_change=on_change,
            on_restart=on_restart,
        )
        EngineCalls.__init__(self)

    def ready_client(self) -> EngineClient:
        """See `EngineCalls`."""
        if not self.is_ready:
            raise NotReady(f"model {self.name!r} is not ready", retry_after_seconds=self.policy.initial_backoff_seconds)
        assert self._client is not None
        return self._client
