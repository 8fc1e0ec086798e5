"""The engine processes of one model behind its dispatcher, each with its own supervisor."""

import asyncio
import contextlib
import tempfile
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

import msgspec
import structlog
from msgspec.structs import replace

from dragoman.server.dispatch.dispatcher import Dispatcher
from dragoman.server.dispatch.link import Link
from dragoman.server.engine.messages import Event, Fatal, Hello, Ready, Report, Snapshot, Statistics, Stop
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.system import start_process
from dragoman.server.workers.supervisor import (
    LAST_WORDS_SECONDS,
    RESTART_RETRY_SECONDS,
    EngineCannotStart,
    ProcessSupervisor,
    RestartPolicy,
)

log = structlog.get_logger("dragoman.supervisor")


class EngineSupervisor(ProcessSupervisor):
    """Keeps one engine process running, connected to the dispatcher while `ready`, the engine's message after its load, is set."""

    def __init__(
        self,
        name: str,
        index: int,
        settings: EngineSettings,
        policy: RestartPolicy,
        dispatcher: Dispatcher,
        *,
        is_only: bool,
        on_statistics: Callable[[int, Statistics], None],
        on_change: Callable[[int], None],
        on_restart: Callable[[int], None],
    ) -> None:
        """Describe an engine; callbacks get its `index` first.

        `on_statistics` is called with each report's statistics, and with empty ones when the process has exited, `on_change` when
        `ready` has changed and after each exit, `on_restart` when a dead engine is about to be replaced.
        """
        fields: dict[str, object] = {"model": name} if is_only else {"model": name, "replica": index}
        super().__init__("engine", f"model {name!r}", policy, fields, partial(on_restart, index))
        self.ready: Ready | None = None
        self._index, self._settings, self._dispatcher = index, settings, dispatcher
        self._on_statistics = partial(on_statistics, index)
        self._on_change = partial(on_change, index)
        self._link: Link | None = None
        self._has_said = asyncio.Event()

    @contextlib.asynccontextmanager
    async def _run_process(self) -> AsyncIterator[Process]:
        with tempfile.TemporaryDirectory(prefix="dragoman-", ignore_cleanup_errors=True) as folder:
            settings = replace(self._settings, endpoint=f"ipc://{folder}/engine")
            self._has_said.clear()
            self._link = link = Link(settings.endpoint, self._receive, self.set_broken)
            try:
                link.send(Hello())
                yield await start_process("dragoman.server.engine.process", msgspec.json.encode(settings).decode())
            finally:
                link.close()
                self._link = self.ready = None
                self._dispatcher.close_engine(self._index, RESTART_RETRY_SECONDS)
                self._on_statistics(Statistics())
                self._on_change()

    def _request_stop(self) -> None:
        if self._link is not None:
            self._link.send(Stop())

    async def _read_last_words(self) -> None:
        """Wait up to `LAST_WORDS_SECONDS` for `Fatal`, which may arrive after the exit of the process."""
        if not self._stopping.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LAST_WORDS_SECONDS):
                    await self._has_said.wait()

    def _receive(self, event: Event) -> None:
        self.hear()
        match event:
            case Report():
                self._on_statistics(event.statistics)
                self._dispatcher.hear(self._index, event)
            case Snapshot():
                self._dispatcher.hear_snapshot(self._index, event)
            case Ready() if self.ready is None and self._link is not None:
                self.ready = event
                self._has_said.set()
                fields = {"engine_pid": self.process_id, "device": event.device, "load_seconds": round(event.load_seconds, 3)}
                log.info("engine ready", **self._fields, **fields)
                self.set_ready()
                self._dispatcher.open_engine(self._index, event, self._link.send)
                self._on_change()
            case Fatal(reason):
                self.failure = f"the engine cannot start: {reason}"
                self._has_said.set()


class ReplicaPool(Dispatcher):
    """The dispatcher of one model, with its engines' supervisors.

    The model is ready while an engine is. When an engine dies, its running requests fail with `Unavailable`; waiting requests go to
    the other engines, and fail if there are none. `settings` are those of the first engine; the others differ in their cores.
    """

    def __init__(
        self,
        name: str,
        settings: Sequence[EngineSettings],
        policy: RestartPolicy,
        *,
        on_statistics: Callable[[Statistics], None],
        on_engine_statistics: Callable[[int, Statistics], None],
        on_change: Callable[[], None],
        on_engine_change: Callable[[int], None],
        on_restart: Callable[[int], None],
    ) -> None:
        """Describe engines; `start` starts them.

        The queue limits, the same in all settings, apply to the whole model. `on_statistics` is called with the model's
        statistics after each report of an engine; the `on_engine` callbacks and `on_restart` get the engine's index first.
        """
        self.settings, self.num_replicas = settings[0], len(settings)
        super().__init__(
            name,
            self.settings.queue_limits,
            self.settings.limits.prefill_tokens_per_step,
            retry_seconds=RESTART_RETRY_SECONDS,
            on_statistics=on_statistics,
            on_change=on_change,
        )
        self.replicas = [
            EngineSupervisor(
                name,
                index,
                one,
                policy,
                self,
                is_only=len(settings) == 1,
                on_statistics=on_engine_statistics,
                on_change=on_engine_change,
                on_restart=on_restart,
            )
            for index, one in enumerate(settings)
        ]

    @property
    def process_ids(self) -> list[int]:
        """Ids of the running engine processes."""
        return [replica.process_id for replica in self.replicas if replica.process_id is not None]

    async def start(self, *, is_persistent: bool = False) -> None:
        """Start engines and keep them running; return once one is ready.

        The first engine starts alone, so that the server is ready soonest and shared weights are prepared once.
        With `is_persistent`, engines are retried even if none starts at first.

        Raises:
            EngineCannotStart: If no engine can start, with the reason of the first.
        """
        try:
            await self._start_engines(is_persistent)
        except BaseException as error:
            if not (is_persistent and isinstance(error, EngineCannotStart)):
                await self.stop()
            raise

    async def stop(self) -> None:
        """Stop all engines; running and waiting requests fail with `Unavailable`."""
        await asyncio.gather(*(replica.stop() for replica in self.replicas))

    async def _start_engines(self, is_persistent: bool) -> None:
        if len(self.replicas) == 1:
            await self.replicas[0].begin(is_persistent=is_persistent)
            return
        failure: EngineCannotStart | None = None
        try:
            await self._begin(0)
        except EngineCannotStart as error:
            failure = error
        waiting = {self._begin(index) for index in range(1, len(self.replicas))}
        if failure is None:
            return
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(future.exception() is None for future in done):
                return
        raise failure

    def _begin(self, index: int) -> asyncio.Future[None]:
        """Start an engine and keep it running; log a failure of the first start, unless it was stopped."""

        def log_failure(future: asyncio.Future[None]) -> None:
            if not (future.cancelled() or self.replicas[index].is_stopping) and (error := future.exception()) is not None:
                log.error("replica cannot start", model=self.name, replica=index, reason=str(error))

        future = self.replicas[index].begin(is_persistent=True)
        future.add_done_callback(log_failure)
        return future
