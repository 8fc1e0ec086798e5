"""Several requests in one call: each has a record of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from structlog.contextvars import bind_contextvars

from dragoman.server.errors import Unavailable
from dragoman.server.service.context import AccessLog, Call


class BulkEnvelope:
    """A message of several requests; its length is their number."""

    __slots__ = ()

    def __len__(self) -> int:
        """Return the number of requests."""
        raise NotImplementedError


class ItemRecords:
    """Records of the requests of one call: access log lines, metrics and limits of the caller."""

    def __init__(self, records: AccessLog, whole: Call, own_ending: Callable[[BaseException], str | None]) -> None:
        """Begin without any.

        Args:
            records: Writes the records.
            whole: The call.
            own_ending: Names the status of an exception of the protocol's own; None for every other.
        """
        self.whole = whole
        self._records = records
        self._own_ending = own_ending

    @contextmanager
    def item(self, request_id: str = "", log_id: str = "", *, is_part: bool = False) -> Iterator[Call]:
        """Record a request within the `with`, in a task of its own.

        Args:
            request_id: Its id, or that of the message that has it; empty where it is not known yet.
            log_id: Its id in the log, beside the call's.
            is_part: Whether it is a part (a sentence, a text) of a message; see `AccessLog.begin_item`.

        Raises:
            ServiceError: For the caller, whatever was raised inside.
        """
        whole = self.whole
        if log_id:
            bind_contextvars(request_id=log_id, batch_id=whole.request_id)
        call = Call.begin(whole.method)
        call.request_id = request_id
        self._records.begin_item(call, whole, is_part=is_part)
        try:
            yield call
        except BaseException as error:
            if (code := self._own_ending(error)) is not None:
                self._finish(call, Unavailable.code if whole.is_ended_by_server else code)
                raise
            if not isinstance(error, Exception):
                raise
            fault = self._records.fault(error)
            call.refusal = fault.refusal
            self._finish(call, fault.code)
            raise fault from None
        else:
            self._finish(call, "OK")

    def _finish(self, call: Call, code: str) -> None:
        """Write a request's record; its tokens count for the call's too."""
        self.whole.source_tokens += call.source_tokens
        self.whole.generated_tokens += call.generated_tokens
        self._records.finish(call, code, event="item")


def both_ends(text: str, num_characters: int) -> str:
    """Return a text without its middle, if it is longer than twice so many characters: still too long where all of it was.

    A source that is too long is cut at its end, and a prompt at its beginning.
    """
    return text if len(text) <= 2 * num_characters else text[:num_characters] + text[-num_characters:]
