"""The calls that run, of every face: what happens around each of them, and the drain.

Whatever becomes of a call, it gets an id, its span and its line in the log, is counted once, and ends in an answer or in one
`ServiceError`, which the face only has to say in its own way.
"""

import asyncio
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from structlog.contextvars import bind_contextvars

from dragoman.server.errors import Cancelled, Draining, ServiceError, Unavailable
from dragoman.server.service.callers import Callers
from dragoman.server.service.context import Call, Records
from dragoman.server.service.ids import choose_request_id
from dragoman.server.service.outcomes import RETRY_SECONDS


def _caller_left(error: BaseException) -> str | None:
    """Say of an exception which status it stands for, if it is how a face without others of its own learns of an end."""
    return Cancelled.code if isinstance(error, asyncio.CancelledError | GeneratorExit) else None


class RunningCalls:
    """Accompanies calls from their arrival to their end, and knows which are running.

    Attributes:
        records: What writes the record of each call.
        callers: Who may call; None if anybody may.
        draining: Set once no new call is to be served.
    """

    def __init__(self, records: Records, callers: Callers | None = None) -> None:
        """Start with nothing running."""
        self.records = records
        self.callers = callers
        self.draining = asyncio.Event()
        self._calls: set[Call] = set()
        self._others: set[Call] = set()  # nobody waits for these
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_running(self) -> int:
        """Calls that have come and not ended, of those that a drain waits for."""
        return len(self._calls)

    async def wait_idle(self, seconds: float) -> bool:
        """Wait until no call runs that a drain waits for, at most so long; return whether that was so."""
        try:
            async with asyncio.timeout(seconds):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def wait_ended(self, seconds: float) -> None:
        """Wait until no call runs, also none that a drain does not wait for, at most so long."""
        if tasks := {call.task for call in self._calls | self._others} - {asyncio.current_task()}:
            await asyncio.wait(tasks, timeout=seconds)

    def end_all(self) -> None:
        """End what still runs with `UNAVAILABLE`; what has its answer and is sending it is left alone."""
        for call in self._calls | self._others:
            if not call.code:
                call.is_ended_by_server = True
                call.task.cancel()

    def is_known(
        self, call: Call, metadata: Iterable[tuple[str, str | bytes]] | None, names: Callable[[], Iterable[str]] = tuple
    ) -> bool:
        """Find out whose a call is, before anything of it is read; return whether it is worth reading. `serving` says why not.

        Args:
            call: Its record.
            metadata: As `serving` has it.
            names: As `serving` has it.
        """
        if self.callers is None:
            return True
        if call.caller is None:
            call.caller = self.callers.find(metadata, names())
        return call.caller is not None and call.caller.may_call

    @contextmanager
    def serving(
        self,
        call: Call,
        metadata: Iterable[tuple[str, str | bytes]] | None = None,
        request_id: str = "",
        *,
        names: Callable[[], Iterable[str]] = tuple,
        own_ending: Callable[[BaseException], str | None] = _caller_left,
        is_sent_later: bool = False,
        is_open: bool = False,
    ) -> Iterator[None]:
        """Serve a call within the `with`, in its task.

        Args:
            call: Its record; whose it is may be known already.
            metadata: What came beside the request, for its caller, its id and its trace: pairs of a key in lower case and a value.
            request_id: What the request itself says its id is; empty for nothing.
            names: Asks for the names in the certificate that the connection has verified, if they are needed.
            own_ending: Names the status that an exception of the face's own stands for, such as that the caller is gone; such an
                exception is recorded and goes through as it is. None for every other.
            is_sent_later: Whether the answer is sent after the `with`: the call then runs until its task ends.
            is_open: Whether anybody may call; no limit of a caller's holds then.

        Raises:
            ServiceError: What the caller is to be told, whatever was raised inside; it is recorded already.
        """
        if call.is_awaited:
            self._calls.add(call)
            self._idle.clear()
        else:
            self._others.add(call)
        if is_sent_later:
            call.task.add_done_callback(lambda _: self._forget(call))
        self.records.begin(call, metadata)
        try:
            call.request_id = choose_request_id(request_id, metadata)
            bind_contextvars(request_id=call.request_id)
            if self.draining.is_set():
                raise Draining("the server is shutting down", retry_after_seconds=RETRY_SECONDS)
            if self.callers is not None and not is_open:
                self._enter(call, self.callers, metadata, names)
            yield
        except asyncio.CancelledError as error:
            if call.is_ended_by_server:
                call.task.uncancel()
                raise self._fail(call, Unavailable("the server is shutting down", retry_after_seconds=RETRY_SECONDS)) from None
            self.records.finish(call, own_ending(error) or Cancelled.code)
            raise
        except BaseException as error:
            if (code := own_ending(error)) is not None:
                self.records.finish(call, code)
                raise
            if not isinstance(error, Exception):
                raise
            raise self._fail(call, self.records.fault(error)) from None
        else:
            self.records.finish(call, "OK")
        finally:
            if not is_sent_later:
                self._forget(call)

    def _enter(
        self, call: Call, callers: Callers, metadata: Iterable[tuple[str, str | bytes]] | None, names: Callable[[], Iterable[str]]
    ) -> None:
        """Find out whose a call is; have the caller's limits let it in."""
        if call.caller is None:
            call.caller = callers.identify(metadata, names())
        bind_contextvars(caller=call.caller.name)
        call.enter(call.caller)

    def _fail(self, call: Call, error: ServiceError) -> ServiceError:
        """Log and count; return what the caller is to be told."""
        call.refusal = error.refusal
        self.records.finish(call, error.code)
        return error

    def _forget(self, call: Call) -> None:
        self._calls.discard(call)
        self._others.discard(call)
        if not self._calls:
            self._idle.set()
