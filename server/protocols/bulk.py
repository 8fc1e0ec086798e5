"""Messages of several requests, and a separate record for each request of a call."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from structlog.contextvars import bind_contextvars

from dragoman.server.errors import ServiceError, Unavailable
from dragoman.server.service.context import Call, RunningCalls
from dragoman.server.service.in_flight import Window

T = TypeVar("T")


class BulkEnvelope:
    """A message of several requests."""

    __slots__ = ()

    def __len__(self) -> int:
        """Return the number of requests."""
        raise NotImplementedError


def num_requests(message: object) -> int:
    """Return the number of requests in a message."""
    return len(message) if isinstance(message, BulkEnvelope) else 1


class ItemRecords:
    """Records of a call's requests; `own_ending` returns the status of a protocol's own exception, None for others."""

    def __init__(self, calls: RunningCalls, whole: Call, own_ending: Callable[[BaseException], str | None]) -> None:
        self.whole = whole
        self._calls = calls
        self._own_ending = own_ending

    @contextmanager
    def item(self, request_id: str = "", log_id: str = "", *, is_part: bool = False) -> Iterator[Call]:
        """Record a request within the `with`, in its own task.

        Args:
            request_id: Id of the request or its message; empty if not yet known.
            log_id: Id in the log, beside the call's.
            is_part: Whether it is a sentence or text of a message; see `RunningCalls.begin_item`.

        Raises:
            ServiceError: Replaces every error but the protocol's own.
        """
        whole = self.whole
        if log_id:
            bind_contextvars(request_id=log_id, batch_id=whole.request_id)
        call = Call.begin(whole.method)
        call.request_id = request_id
        self._calls.begin_item(call, whole, is_part=is_part)
        try:
            yield call
        except BaseException as error:
            if (code := self._own_ending(error)) is not None:
                self._finish(call, Unavailable.code if whole.is_ended_by_server else code)
                raise
            if not isinstance(error, Exception):
                raise
            fault = self._calls.fault(error)
            call.refusal = fault.refusal
            self._finish(call, fault.code)
            raise fault from None
        else:
            self._finish(call, "OK")

    async def each(
        self,
        count: int,
        request_id: str,
        window: Window,
        serve: Callable[[int, Call], Awaitable[T]],
        named: Callable[[int, str], str],
        has_begun: asyncio.Event | None = None,
    ) -> Sequence[T]:
        """Serve the requests of one message, as many at once as the window and the caller's limits allow; return the results.

        The first failure cancels the others and is raised, its message as `named` says for the request's number; arguments as
        `Window.run_each`.
        """

        async def serve_one(number: int) -> T:
            try:
                with self.item(request_id, f"{request_id}#{number}", is_part=number > 0) as call:
                    return await serve(number, call)
            except ServiceError as error:
                raise error.copy(named(number, error.message)) from None

        caller = self.whole.caller
        return await window.run_each(count, serve_one, None if caller is None else caller.most_at_once, has_begun)

    def _finish(self, call: Call, code: str) -> None:
        """Write a request's record, and add its tokens to the call's."""
        self.whole.source_tokens += call.source_tokens
        self.whole.generated_tokens += call.generated_tokens
        self._calls.finish(call, code, event="item")


def both_ends(text: str, num_characters: int) -> str:
    """Return `num_characters` from each end of a text, or a shorter text whole; a text that is too long stays too long."""
    # Sources are truncated at the end, prompts at the beginning.
    return text if len(text) <= 2 * num_characters else text[:num_characters] + text[-num_characters:]
