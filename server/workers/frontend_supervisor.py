"""Supervisor of one frontend worker: its process, its messages and its last reported state."""

import asyncio
import contextlib
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
import structlog

from dragoman.server.system import start_process
from dragoman.server.telemetry.series import Series
from dragoman.server.workers.messages import (
    AdminRequest,
    AdminResponse,
    AwaitedModels,
    CollectMetrics,
    Drain,
    Failed,
    FromWorker,
    MetricsReport,
    Released,
    Routes,
    RoutesTaken,
    Start,
    State,
    ToWorker,
    UsageReport,
    read_message,
    to_bytes,
)
from dragoman.server.workers.supervisor import ProcessSupervisor, RestartPolicy

# Bound on a worker's metrics report; a scrape uses the last report after that.
COLLECT_SECONDS = 2.0
# Time for a worker to exit beside the drain: for health watchers, ended calls, and the last spans.
END_SECONDS = 3.0


log = structlog.get_logger("dragoman.workers")


class FrontendSupervisor(ProcessSupervisor):
    """Keeps one frontend worker running.

    Attributes:
        counted: Last reported metrics; empty without a process.
        taken: Last answer to `Routes`.
        holding: Endpoints of dispatchers that were sent to the worker and not released.
        held: By endpoint of the dispatcher: requests that hold the version, and `Use.warm_until`, as last reported.
        awaited: Models that its requests wait for.
    """

    def __init__(
        self,
        number: int,
        describe: Callable[[str], Start],
        policy: RestartPolicy,
        pass_fds: Sequence[int],
        *,
        on_change: Callable[[], None],
        on_end: Callable[[str], None],
        on_usage: Callable[[UsageReport], None],
        on_awaited: Callable[[], None],
        carry_out: Callable[[AdminRequest], Awaitable[AdminResponse]] | None = None,
    ) -> None:
        """Describe a worker; `begin` starts it.

        `describe` returns the first message to the process with an identity. `on_change` is called when `state`, `taken` or
        `holding` may have changed, `on_end` with the identity of an exited process, while `counted` is its last report.
        """
        super().__init__("front end", f"front end {number}", policy, {"front_end": number})
        self.number = number
        self.state = State()
        self.counted: Series = {}
        self.taken = RoutesTaken(0)
        self.holding: set[str] = set()
        self.held: dict[str, tuple[int, float]] = {}
        self.awaited: frozenset[str] = frozenset()
        self._describe, self._pass_fds = describe, pass_fds
        self._on_change, self._on_end, self._on_usage, self._on_awaited = on_change, on_end, on_usage, on_awaited
        self._carry_out, self._orders = carry_out, set[asyncio.Task[None]]()
        self._decoder = msgspec.msgpack.Decoder(FromWorker)
        self._reading: asyncio.Task[None] | None = None
        self._collecting: deque[asyncio.Future[None]] = deque()
        self._drain_seconds = 0.0

    @property
    def is_listening(self) -> bool:
        """Whether the worker accepts connections."""
        return self.state.is_listening

    def send(self, message: ToWorker) -> None:
        """Send a message to the process, if it runs."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self.process.stdin.write(to_bytes(message))

    def set_routes(self, routes: Routes) -> None:
        """Send new routes; a process that starts later gets them from `describe`."""
        if self.process is not None:
            self.holding |= routes.endpoints
            self.send(routes)

    def has_taken(self, serial: int) -> bool:
        """Return whether the worker has taken `Routes` of this serial number or a later one, or there is no process."""
        return self.process is None or self.taken.serial >= serial

    async def collect(self) -> None:
        """Request the worker's metrics, and wait up to `COLLECT_SECONDS` until `counted` has them."""
        if not self.is_listening:
            return
        collecting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._collecting.append(collecting)
        self.send(CollectMetrics())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COLLECT_SECONDS):
                await collecting

    async def drain(self, seconds: float) -> None:
        """Drain the worker for at most some seconds, and stop it."""
        self._drain_seconds = seconds
        await self.stop(seconds + END_SECONDS)

    def _request_stop(self) -> None:
        self.send(Drain(self._drain_seconds))

    @contextlib.asynccontextmanager
    async def _run_process(self) -> AsyncIterator[Process]:
        identity = f"front-{self.number}-{self.num_restarts}"
        process = await start_process("dragoman.server.workers.frontend_process", stdout=PIPE, pass_fds=self._pass_fds)
        assert process.stdin is not None
        start = self._describe(identity)
        self.taken, self.holding = RoutesTaken(start.routes.serial), start.routes.endpoints
        process.stdin.write(to_bytes(start))
        self._reading = asyncio.create_task(self._read(process))
        try:
            yield process
        finally:
            await asyncio.gather(self._reading, return_exceptions=True)
            self.state, self.holding, self.held, self.awaited = State(), set(), {}, frozenset()
            for collecting in self._collecting:
                if not collecting.done():
                    collecting.set_result(None)
            self._collecting.clear()
            self._on_end(identity)
            self.counted = {}
            self._on_change()
            self._on_awaited()

    async def _read_last_words(self) -> None:
        if self._reading is not None:
            await asyncio.wait([self._reading])

    async def _read(self, process: Process) -> None:
        assert process.stdout is not None
        while (payload := await read_message(process.stdout)) is not None:
            try:
                self._receive(self._decoder.decode(payload))
            except Exception:
                log.exception("a message from the front end cannot be handled", front_end=self.number)
                self.set_broken()
                return

    def _receive(self, message: FromWorker) -> None:
        self.hear()
        match message:
            case State():
                is_new, self.state = message != self.state, message
                if message.is_listening and not self.is_ready:
                    self.set_ready()
                if is_new:
                    self._on_change()
            case MetricsReport(series, is_requested):
                self.counted = series
                if is_requested and self._collecting and not (collecting := self._collecting.popleft()).done():
                    collecting.set_result(None)
            case RoutesTaken():
                self.taken = message
                self._on_change()
            case Released(endpoint):
                self.holding.discard(endpoint)
                self.held.pop(endpoint, None)
                self._on_change()
            case UsageReport():
                self.held |= message.held
                self._on_usage(message)
            case AwaitedModels(models):
                self.awaited = frozenset(models)
                self._on_awaited()
            case AdminRequest() if self._carry_out is not None:
                order = asyncio.create_task(self._answer(self.process, self._carry_out(message)))
                self._orders.add(order)
                order.add_done_callback(self._orders.discard)
            case Failed(reason):
                self.failure = reason

    async def _answer(self, process: Process | None, carrying_out: Awaitable[AdminResponse]) -> None:
        """Send the response to an admin request, if the requesting process still runs."""
        outcome = await carrying_out
        if process is self.process:
            self.send(outcome)
