"""Several requests in one call: each has a record of its own."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from structlog.contextvars import bind_contextvars

from dragoman.server.errors import Unavailable
from dragoman.server.service.context import AccessLog, Call


class BulkEnvelope:
    """A message of several requests, as it is read; its length is their number."""

    __slots__ = ()

    def __len__(self) -> int:
        """Return how many there are."""
        raise NotImplementedError


def both_ends(text: str, num_characters: int) -> str:
    """Return a text without its middle, if it is longer than twice so many characters.

    A source that is too long is cut at its end, and a prompt at its beginning. What is left is still too long where all of it was.
    """
    return text if len(text) <= 2 * num_characters else text[:num_characters] + text[-num_characters:]


class Items:
    """Accompanies the requests of one call."""

    def __init__(self, records: AccessLog, whole: Call, own_ending: Callable[[BaseException], str | None]) -> None:
        """Begin without any.

        Args:
            records: What writes the record of each.
            whole: Record of the call.
            own_ending: Names the status that an exception of the face's own stands for; None for every other.
        """
        self.whole = whole
        self._records = records
        self._own_ending = own_ending

    @contextmanager
    def one(self, request_id: str, name: str = "", *, is_part: bool = False) -> Iterator[Call]:
        """Accompany a request of a message with an id of its own; the log has that beside the call's. See `recorded`.

        Args:
            request_id: Its id, or that of the message that has it.
            name: What the log calls it; empty for its id.
            is_part: See `AccessLog.begin_item`.
        """
        bind_contextvars(request_id=name or request_id, batch_id=self.whole.request_id)
        with self.recorded(request_id, is_part=is_part) as call:
            yield call

    @contextmanager
    def recorded(self, request_id: str, *, is_part: bool) -> Iterator[Call]:
        """Accompany a request within the `with`, in a task of its own; what it raises is recorded.

        Raises:
            ServiceError: What the caller is to be told, whatever was raised inside.
        """
        whole = self.whole
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
