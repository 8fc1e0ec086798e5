"""The requests of a batch on their way: which are unanswered, and which are sent again. It sends nothing itself."""

import random
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from dragoman.client.errors import CallError, InternalError, InvalidArgument, from_status
from dragoman.client.request import Request, check_request, generate_request
from dragoman.client.results import Result, result_from_proto
from dragoman.client.retry import RetryPolicy
from dragoman.v1 import generation_pb2

# Of an id of the greatest length the server allows, what is left when a uuid is put behind it.
_KEPT_ID_CHARACTERS = 95


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request of a batch: a result or an error.

    Attributes:
        index: Place of the request in the input, from 0.
        request: The request.
        result: The answer; None if the request failed.
        error: Why it failed; None if it was answered.
    """

    index: int
    request: Request
    result: Result | None = None
    error: CallError | None = None


@dataclass(frozen=True, slots=True)
class Sending:
    """A message to send.

    Attributes:
        message: The request on the wire.
        not_before: When it may be sent, on the batch's clock.
    """

    message: generation_pb2.GenerateRequest
    not_before: float = 0.0


@dataclass(slots=True)
class _Entry:
    """An unanswered request, and the attempts begun for it."""

    index: int
    request: Request
    message: generation_pb2.GenerateRequest
    num_attempts: int = 1


class Batch:
    """Requests that share one stream at a time.

    A request that fails alone is tried again as `RetryPolicy` says, and so are all unanswered ones when the stream fails.

    Args:
        policy: When to try again.
        deadline: When the time for all of it is over, on the clock.
        clock: Seconds that only ever grow.
        draw: Random numbers from 0 to 1.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._deadline = deadline
        self._clock = clock
        self._draw = draw
        self._entries: dict[str, _Entry] = {}  # by the id on the wire
        self._num_added = 0
        self._num_interruptions = 0

    @property
    def num_open(self) -> int:
        """Requests without an outcome."""
        return len(self._entries)

    def add(self, request: Request) -> Sending | Outcome:
        """Take the next request in; one that cannot be sent at all has its outcome at once.

        Raises:
            TypeError: If it is no `Request`.
        """
        check_request(request)
        index, self._num_added = self._num_added, self._num_added + 1
        try:
            message = generate_request(request)
            if message.request_id in self._entries:
                raise InvalidArgument("request_id: another request of the batch has it", message.request_id)
        except InvalidArgument as error:
            return Outcome(index, request, error=error)
        return self._send(_Entry(index, request, message), message.request_id)

    def take(self, response: generation_pb2.GenerateBatchResponse) -> Sending | Outcome:
        """Take an answer in; return the request's outcome, or the request, to be sent again.

        Raises:
            InternalError: If it answers nothing that was asked.
        """
        self._num_interruptions = 0
        entry = self._entries.pop(response.request_id, None)
        if entry is None:
            raise InternalError(f"the server answered request {response.request_id!r}, which was not asked", response.request_id)
        request_id = entry.message.request_id
        if response.HasField("response"):
            response.response.request_id = request_id
            try:
                return Outcome(entry.index, entry.request, result_from_proto(response.response))
            except InternalError as unreadable:
                return Outcome(entry.index, entry.request, error=unreadable)
        error = from_status(response.error, request_id)
        wait = self._policy.wait_seconds(entry.num_attempts, error, self._draw())
        if wait is None or self._clock() + wait >= self._deadline:
            return Outcome(entry.index, entry.request, error=error)
        # An id is used once on a stream, so another is made, which shows whose it is.
        return self._send_again(entry, f"{request_id[:_KEPT_ID_CHARACTERS]}~{uuid.uuid4().hex}", self._clock() + wait)

    def interrupt(self, error: CallError) -> tuple[float, list[Sending | Outcome]]:
        """Take in that the stream failed; return how long to wait before the next one, and what goes on it or is given up.

        Raises:
            CallError: The same error, if the batch fails with it.
        """
        self._num_interruptions += 1
        wait = self._policy.wait_seconds(self._num_interruptions, error, self._draw())
        if wait is None or self._clock() + wait >= self._deadline:
            raise error
        entries, self._entries = self._entries, {}
        return wait, [self._resume(entry, error) for entry in entries.values()]

    def _resume(self, entry: _Entry, error: CallError) -> Sending | Outcome:
        """Send a request on the next stream, unless it has been sent as often as any may be: it might be what breaks streams."""
        if entry.num_attempts >= self._policy.max_attempts:
            return Outcome(entry.index, entry.request, error=error)
        return self._send_again(entry, entry.message.request_id, 0.0)

    def _send_again(self, entry: _Entry, wire_id: str, not_before: float) -> Sending:
        entry.num_attempts += 1
        return self._send(entry, wire_id, not_before)

    def _send(self, entry: _Entry, wire_id: str, not_before: float = 0.0) -> Sending:
        self._entries[wire_id] = entry
        message = entry.message
        if wire_id != message.request_id:
            message = generation_pb2.GenerateRequest()
            message.CopyFrom(entry.message)
            message.request_id = wire_id
        return Sending(message, not_before)
