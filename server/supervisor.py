"""Engine processes: start, watch, restart with back-off, stop. One `SupervisedEngine` a model; it is what the API calls."""

import asyncio
import contextlib
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec
import structlog

from server.engine.client import EngineClient
from server.engine.messages import Finished, Ready, Request, Statistics, Tokens
from server.engine.settings import EngineSettings
from server.errors import Unavailable

log = structlog.get_logger("dragoman.supervisor")

STOP_SECONDS = 5.0
STABLE_SECONDS = 60.0


class EngineCannotStart(Exception):
    """An engine failed before it was ready for the first time; the message says why."""


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """When a dead or silent engine is replaced.

    Attributes:
        initial_backoff_seconds: Wait before the first restart; doubles with each one that follows.
        max_backoff_seconds: Longest wait.
        watchdog_seconds: Silence after which a process counts as hung; it sends a sign of life every second.
    """

    initial_backoff_seconds: float = 0.5
    max_backoff_seconds: float = 30.0
    watchdog_seconds: float = 30.0


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
        """Start the process."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "server.engine.process", msgspec.json.encode(settings).decode()),
            stdin=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
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
        threading.Thread(target=self._run, args=(settings,), name="engine", daemon=True).start()

    async def wait(self) -> str:
        """See `Host`."""
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        """A thread cannot be killed; it ends with this process."""

    def _run(self, settings: EngineSettings) -> None:
        from server.engine.process import EngineLoop  # loads ONNX Runtime, which a front end does without

        code = EngineLoop(settings).run()
        with contextlib.suppress(RuntimeError):  # the event loop may be gone already
            self._loop.call_soon_threadsafe(self._ended.set_result, f"exit code {code}")


class SupervisedEngine:
    """One model's engine, whichever process it lives in at the moment.

    Requests that run when a process dies end once with `Unavailable`, and so do those that come before its successor is ready.
    """

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
        """Describe an engine; `start` starts it.

        Args:
            name: Of the model, for messages.
            settings: What the process is told; its endpoint is chosen anew for each start.
            policy: When to restart.
            is_inline: Run the engine on a thread instead.
            on_statistics: Called with each report's statistics.
            on_change: Called when `is_ready` has changed.
            on_restart: Called when a dead engine is about to be replaced.
        """
        self.name, self.settings, self.policy = name, settings, policy
        self.ready: Ready | None = None
        self.device = ""
        self._is_inline = is_inline
        self._on_statistics, self._on_change, self._on_restart = on_statistics, on_change, on_restart
        self._ids = itertools.count(1)
        self._client: EngineClient | None = None
        self._host: Host | None = None
        self._watch: asyncio.Task[None] | None = None
        self._is_stopping = False

    @property
    def is_ready(self) -> bool:
        """Whether requests are taken now."""
        return self._client is not None and self.ready is not None and not self._is_stopping

    @property
    def process_id(self) -> int | None:
        """Of the engine's process; None when there is none."""
        return self._host.process.pid if isinstance(self._host, ProcessHost) else None

    def next_id(self) -> int:
        """Return a request id that this engine has not seen."""
        return next(self._ids)

    async def generate(self, request: Request) -> Finished:
        """See `EngineClient.generate`."""
        return await self._ready_client().generate(request)

    async def stream(self, request: Request) -> AsyncGenerator[Tokens | Finished, None]:
        """See `EngineClient.stream`."""
        async with contextlib.aclosing(self._ready_client().stream(request)) as events:
            async for event in events:
                yield event

    async def start(self) -> None:
        """Start the engine, wait until it is ready, and keep it running from then on.

        Raises:
            EngineCannotStart: If it ends before it is ready.
        """
        ready = asyncio.get_running_loop().create_future()
        self._watch = asyncio.create_task(self._keep_running(ready), name=f"engine {self.name}")
        try:
            await ready
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End the engine; what still runs ends with `Unavailable`."""
        self._is_stopping = True
        if self._client is not None:
            self._client.stop_engine()
        if self._watch is not None:
            done, _ = await asyncio.wait([self._watch], timeout=STOP_SECONDS)
            if not done:
                log.warning("engine does not stop, killing it", model=self.name)
                self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)

    def _ready_client(self) -> EngineClient:
        if not self.is_ready:
            raise Unavailable(f"model {self.name!r} is not ready", retry_after_seconds=self.policy.initial_backoff_seconds)
        assert self._client is not None
        return self._client

    async def _keep_running(self, first_ready: asyncio.Future[None]) -> None:
        """Run incarnation after incarnation until stopped; fail `first_ready` if the very first does not get there."""
        backoff = self.policy.initial_backoff_seconds
        while not self._is_stopping:
            started = time.monotonic()
            reason = await self._run_once(first_ready)
            if self._is_stopping:
                return
            if not first_ready.done():
                first_ready.set_exception(EngineCannotStart(f"model {self.name!r}: {reason}"))
                return
            log.error("engine ended, restarting", model=self.name, reason=reason, backoff_seconds=backoff)
            self._on_restart()
            await asyncio.sleep(backoff)
            is_stable = time.monotonic() - started > STABLE_SECONDS
            backoff = self.policy.initial_backoff_seconds if is_stable else min(2 * backoff, self.policy.max_backoff_seconds)

    async def _run_once(self, first_ready: asyncio.Future[None]) -> str:
        """Run one incarnation to its end; return how it ended."""
        folder = tempfile.mkdtemp(prefix="dragoman-")
        endpoint = f"ipc://{folder}/engine"
        settings = msgspec.structs.replace(self.settings, endpoint=endpoint)
        client = EngineClient(endpoint, self._on_statistics)
        host: Host = ThreadHost(settings) if self._is_inline else await ProcessHost.start(settings)
        self._client, self._host = client, host
        ended = asyncio.create_task(host.wait())
        readying = asyncio.create_task(self._become_ready(client, first_ready))
        try:
            reason = await self._until_end(client, ended)
        finally:
            readying.cancel()
            ended.cancel()
            if not (self._is_stopping and ended.done()):
                host.kill()
            self._client = self.ready = None
            client.fail(Unavailable(f"the engine of model {self.name!r} ended", self.policy.initial_backoff_seconds))
            self._on_change()
            outcomes = await asyncio.gather(readying, ended, return_exceptions=True)
            await client.close()
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(outcomes[0], Unavailable) and "cannot start" in outcomes[0].message:
            return outcomes[0].message
        return reason

    async def _become_ready(self, client: EngineClient, first_ready: asyncio.Future[None]) -> None:
        self.ready = await client.ready
        self.device = self.ready.device
        log.info(
            "engine ready",
            model=self.name,
            engine_pid=self.process_id,
            device=self.device,
            load_seconds=round(self.ready.load_seconds, 3),
        )
        self._on_change()
        if not first_ready.done():
            first_ready.set_result(None)

    async def _until_end(self, client: EngineClient, ended: asyncio.Task[str]) -> str:
        """Wait for the end, or for a silence that is too long."""
        while True:
            done, _ = await asyncio.wait([ended], timeout=1.0)
            if done:
                return ended.result()
            silence = time.monotonic() - client.last_heard
            if client.ready.done() and silence > self.policy.watchdog_seconds:
                return f"silent for {silence:.0f} s"
