"""Supervisor of one frontend worker: its process, the messages to and from it, and its last reported state."""

import asyncio
import contextlib
from asyncio.subprocess import PIPE, Process
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
import structlog

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
from dragoman.server.workers.supervisor import ProcessSupervisor, RestartPolicy, start_process

# How long a worker may take to report its metrics; a scrape uses the last report after that.
COLLECT_SECONDS = 2.0
# How long a worker may take to end, beside the drain: for health watchers, for calls that are cut off, and for the last spans.
END_SECONDS = 3.0


log = structlog.get_logger("dragoman.workers")


class FrontendSupervisor(ProcessSupervisor):
    """Keeps one frontend worker running.

    Attributes:
        number: Of the worker, from 0.
        state: State that it reported last.
        counted: Metrics that it reported last; empty while there is no process.
        taken: Last answer to `Routes`.
        holding: Endpoints of the dispatchers that it was told of and has not released.
        held: By endpoint of the dispatcher: requests that hold the version, and how warm they keep it, as reported last.
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

        Args:
            number: Of the worker.
            describe: Returns the first message to a process of some identity.
            policy: When to restart it.
            pass_fds: File descriptors that the process inherits.
            on_change: Called when `state` may have changed.
            on_end: Called with the identity of a process that has ended, `counted` being its last report.
            on_usage: Called with the outcomes of its requests.
            on_awaited: Called when `awaited` has changed.
            carry_out: Carries out orders of operators; None where there can be none.
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
        """Whether it answers callers."""
        return self.state.is_listening

    def send(self, message: ToWorker) -> None:
        """Send a message to the process; without effect while there is none."""
        if self.process is not None and self.process.stdin is not None:
            with contextlib.suppress(ConnectionError, RuntimeError):
                self.process.stdin.write(to_bytes(message))

    def set_routes(self, routes: Routes) -> None:
        """Tell the worker which versions to serve from now on; a process that starts later is told by `describe`."""
        if self.process is not None:
            self.holding |= routes.endpoints
            self.send(routes)

    def has_taken(self, serial: int) -> bool:
        """Return whether the worker has answered `Routes` of a serial number or later ones, or there is no process."""
        return self.process is None or self.taken.serial >= serial

    async def collect(self) -> None:
        """Ask for the worker's metrics, and wait a moment until `counted` has them."""
        if not self.is_listening:
            return
        collecting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._collecting.append(collecting)
        self.send(CollectMetrics())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COLLECT_SECONDS):
                await collecting

    async def drain(self, seconds: float) -> None:
        """Have the worker finish its requests, at most for some seconds, and end."""
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
        """Take in messages until the process closes its end."""
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
        """Send the outcome of an order to the process that has sent the order, if that still runs."""
        outcome = await carrying_out
        if process is self.process:
            self.send(outcome)
