"""One frontend worker: started, watched and restarted with back-off."""

import asyncio
import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import structlog

from dragoman.server.telemetry.series import Series
from dragoman.server.workers.messages import (
    Awaited,
    CarriedOut,
    Collect,
    Counted,
    Drain,
    Failed,
    Files,
    FromFrontEnd,
    NotLoaded,
    Ordered,
    Released,
    Serve,
    Serving,
    Start,
    State,
    ToFrontEnd,
    Used,
    read_message,
    to_bytes,
)
from dragoman.server.workers.supervisor import RestartPolicy


class FrontEndHost:
    """See above."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        """Take over a process that has been started; use `start`."""
        self._process = process
        self._decoder = msgspec.msgpack.Decoder(FromFrontEnd)

    @classmethod
    async def start(cls, start: Start) -> "FrontEndHost":
        """Start the process, with this one's import path and never what happens to lie in the working directory.

        Raises:
            OSError: If the system has no room for it.
        """
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "dragoman.server.workers.frontend_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": path},
            pass_fds=[start.table],
            start_new_session=True,
        )
        host = cls(process)
        host.send(start)
        return host

    @property
    def process_id(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, message: ToFrontEnd) -> None:
        """Tell it something; without effect if it is gone."""
        assert self._process.stdin is not None
        with contextlib.suppress(ConnectionError, RuntimeError):
            self._process.stdin.write(to_bytes(message))

    async def messages(self) -> AsyncIterator[FromFrontEnd]:
        """Yield what it says, until it says nothing more because it is gone.

        Raises:
            msgspec.MsgspecError: If it says what nobody can understand.
        """
        assert self._process.stdout is not None
        while (payload := await read_message(self._process.stdout)) is not None:
            yield self._decoder.decode(payload)

    async def wait(self) -> str:
        """Return how it ended, once it has."""
        code = await self._process.wait()
        return f"killed by signal {-code}" if code < 0 else f"exit code {code}"

    def kill(self) -> None:
        """End it at once."""
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()


WATCH_SECONDS = 1.0
# How long it may take to answer what it has counted; who asks gets what it said the last time.
COLLECT_SECONDS = 2.0
# How long it may take to end, beside the drain: for telling watchers, for calls that are ended, and for the last spans.
END_SECONDS = 3.0

log = structlog.get_logger("dragoman.fronts")


class FrontEndCannotStart(Exception):
    """A front end failed before it listened for the first time; the message says why."""


class KeptFrontEnd:
    """See above.

    Attributes:
        number: Which one it is, from 0.
        state: What it said of itself last.
        counted: What it said last that it has counted; nothing while there is none.
        serving: What it said last of a `Serve`.
        holding: Endpoints of the desks that it has been told of and has not said that nobody holds any more.
        held: Requests that hold a version, and how warm they keep it, by the endpoint of its desk, as it said last.
        awaited: Models that requests there wait for.
        num_restarts: Times it was started again.
    """

    def __init__(
        self,
        number: int,
        describe: Callable[[str], Start],
        policy: RestartPolicy,
        *,
        on_change: Callable[[], None],
        on_end: Callable[[str], None],
        on_used: Callable[[Used], None],
        on_awaited: Callable[[], None] = lambda: None,
        carry_out: Callable[[Ordered], Awaitable[CarriedOut]] | None = None,
    ) -> None:
        """Describe it; `begin` starts it.

        Args:
            number: Which one it is.
            describe: Returns what an incarnation of some identity is to be told at its start.
            policy: When to start another.
            on_change: Called when `state` may have changed.
            on_end: Called with the identity of an incarnation that is gone, `counted` being its last word.
            on_used: Called with what became of its requests.
            on_awaited: Called when `awaited` has changed.
            carry_out: Carries out what operators ask for there; None where none can come.
        """
        self.number = number
        self.state = State()
        self.counted: Series = {}
        self.num_restarts = 0
        self._describe, self._policy = describe, policy
        self._on_change, self._on_end, self._on_used, self._on_awaited = on_change, on_end, on_used, on_awaited
        self._carry_out, self._orders = carry_out, set[asyncio.Task[None]]()
        self.serving = Serving(0)
        self.holding: set[str] = set()
        self.held: dict[str, tuple[int, float]] = {}
        self.awaited: frozenset[str] = frozenset()
        self._told = Serve(0, [])
        self._host: FrontEndHost | None = None
        self._asking: deque[asyncio.Future[None]] = deque()
        self._listening: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._stopping = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._last_word = ""
        self._num_heard = 0

    @property
    def process_id(self) -> int | None:
        """Of its process; None while there is none."""
        return None if self._host is None else self._host.process_id

    @property
    def is_listening(self) -> bool:
        """Whether it answers callers."""
        return self.state.is_listening

    async def begin(self) -> None:
        """Start it, wait until it listens, and keep it running from then on.

        Raises:
            FrontEndCannotStart: If it ends, or is stopped, before it listens.
        """
        self._keeping = asyncio.create_task(self._keep_running(), name=f"front end {self.number}")
        await asyncio.shield(self._listening)

    def hand(self, files: Files) -> None:
        """Hand it files that have changed."""
        if self._host is not None:
            self._host.send(files)

    def serve(self, serve: Serve) -> None:
        """Tell it what is to be served from now on; one that is about to start is told as soon as it can be."""
        self._told = serve
        if self._host is not None:
            self._tell(self._host, serve)

    def refuse_waiting(self, refusal: NotLoaded) -> None:
        """Tell it that a model cannot be loaded."""
        if self._host is not None:
            self._host.send(refusal)

    def has_served(self, serial: int) -> bool:
        """Return whether it answers as a `Serve` or a later one has said, or as before with a reason, or is not there."""
        return self._host is None or self.serving.serial >= serial

    async def collect(self) -> None:
        """Ask for what it has counted, and wait a moment until `counted` says so."""
        if self._host is None or not self.state.is_listening:
            return
        asking: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._asking.append(asking)
        self._host.send(Collect())
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(COLLECT_SECONDS):
                await asking

    async def drain(self, seconds: float) -> None:
        """Have it finish what runs there, at most so long, and end; it is not started again."""
        self._stopping.set()
        if self._host is not None:
            self._host.send(Drain(seconds))
        if self._keeping is not None:
            done, _ = await asyncio.wait([self._keeping], timeout=seconds + END_SECONDS)
            if not done:
                log.warning("front end does not end, killing it", front_end=self.number)
                self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    async def _keep_running(self) -> None:
        """Run incarnation after incarnation until stopped; fail `_listening` if the very first does not get there."""
        backoff: float | None = None
        reason = "it was stopped"
        try:
            while not self._stopping.is_set():
                began = time.monotonic()
                reason = await self._run_once(f"front-{self.number}-{self.num_restarts}")
                if self._stopping.is_set() or not self._listening.done():
                    return
                backoff = self._policy.backoff_seconds(backoff, time.monotonic() - began)
                log.error("front end ended, restarting", front_end=self.number, reason=reason, backoff_seconds=backoff)
                self.num_restarts += 1
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(backoff):
                        await self._stopping.wait()
        finally:
            if not self._listening.done():
                self._listening.set_exception(FrontEndCannotStart(f"front end {self.number}: {reason}"))
                self._listening.exception()  # seen, even where nobody waits for it

    async def _run_once(self, identity: str) -> str:
        """Run one incarnation to its end; return how it ended, or why it could not even begin."""
        self._last_word = ""
        try:
            start = self._describe(identity)
            self._told, self.serving, self.holding = start.models, Serving(start.models.serial), endpoints(start.models)
            host = await FrontEndHost.start(start)
        except Exception as error:  # such as that there is no room for a process; the next time may be luckier
            log.exception("front end cannot be run", front_end=self.number)
            return f"{type(error).__name__}: {error}"
        self._host = host
        if self._told is not start.models:  # what is served has changed in between
            self._tell(host, self._told)
        if self._stopping.is_set():
            host.kill()
        listening = asyncio.create_task(self._listen(host))
        try:
            return await self._until_end(host, listening)
        finally:
            host.kill()
            await asyncio.gather(listening, host.wait(), return_exceptions=True)  # its last words are read before it is gone
            self._host, self.state, self.holding = None, State(), set()
            self.held, self.awaited = {}, frozenset()
            for asking in self._asking:
                if not asking.done():
                    asking.set_result(None)
            self._asking.clear()
            self._on_end(identity)
            self.counted = {}
            self._on_change()
            self._on_awaited()

    async def _until_end(self, host: FrontEndHost, listening: asyncio.Task[None]) -> str:
        """Wait for the end, or for a silence that is too long; see the supervisor of engines for how silence is counted."""
        silence = 0.0
        while True:
            heard = self._num_heard
            done, _ = await asyncio.wait([listening], timeout=WATCH_SECONDS)
            if done and listening.exception() is not None:
                return "it said what cannot be understood"
            if done:
                reason = await host.wait()
                return self._last_word or reason
            silence = silence + WATCH_SECONDS if self.state.is_listening and self._num_heard == heard else 0.0
            if silence >= self._policy.watchdog_seconds:
                return f"silent for {silence:.0f} s"

    async def _listen(self, host: FrontEndHost) -> None:
        """Take in what it says, until it says nothing more."""
        async for message in host.messages():
            self._num_heard += 1
            match message:
                case State():
                    is_new, self.state = message != self.state, message
                    if message.is_listening and not self._listening.done():
                        self._listening.set_result(None)
                    if is_new:
                        self._on_change()
                case Counted(series, is_asked):
                    self.counted = series
                    if is_asked and self._asking and not (asking := self._asking.popleft()).done():
                        asking.set_result(None)
                case Serving():
                    self.serving = message
                    self._on_change()
                case Released(endpoint):
                    self.holding.discard(endpoint)
                    self.held.pop(endpoint, None)
                    self._on_change()
                case Used():
                    self.held |= message.held
                    self._on_used(message)
                case Awaited(models):
                    self.awaited = frozenset(models)
                    self._on_awaited()
                case Ordered() if self._carry_out is not None:
                    order = asyncio.create_task(self._answer(host, self._carry_out(message)))
                    self._orders.add(order)
                    order.add_done_callback(self._orders.discard)
                case Failed(reason):
                    self._last_word = reason

    async def _answer(self, host: FrontEndHost, carrying_out: Awaitable[CarriedOut]) -> None:
        """Tell an incarnation what has become of an order, if it is still there."""
        host.send(await carrying_out)

    def _tell(self, host: FrontEndHost, serve: Serve) -> None:
        self.holding |= endpoints(serve)
        host.send(serve)


def endpoints(serve: Serve) -> set[str]:
    """Return those of all desks."""
    return {desk.endpoint for served in serve.models for desk in served.desks}
