"""State of a batch: grouping of requests into messages, unanswered requests and their retries, order of outcomes."""

import math
import random
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from dragoman.client.errors import CallError, DeadlineExceeded, InternalError, InvalidArgument, TooLarge, Unimplemented, from_status
from dragoman.client.request import Request, check_size, generate_request
from dragoman.client.results import Result, blank_result, result_from_proto
from dragoman.client.retry import RetryPolicy
from dragoman.v1 import generation_pb2

# Largest message of several requests; more saves nothing, and a server starts later.
MAX_REQUESTS = 64
MAX_BYTES = 32 * 2**10
# Servers group as many bytes in an answer, and a little more around them; clients that take no such messages get one answer each.
MIN_ANSWER_BYTES = 128 * 2**10
# Bytes that a message of one request adds to it.
_AROUND_BYTES = 16

Answers = generation_pb2.GenerateBatchResponse | generation_pb2.GenerateBulkResponse
# An answer of a stream, the error that the stream failed with, or None for its end.
StreamEvent = generation_pb2.GenerateBatchResponse | Exception | None
# Characters of the longest id the server allows that are kept when a uuid is put behind it.
_KEPT_ID_CHARACTERS = 95
# Bytes by which such an id may be longer than the request's own.
_LONGER_ID_BYTES = 64


@dataclass(frozen=True, slots=True)
class Outcome:
    """Outcome of one request of a batch: a result or an error.

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
    """A message, and the time on the batch's clock before which it is not sent."""

    message: generation_pb2.GenerateRequest
    not_before: float = 0.0


Step = Sending | Outcome


@dataclass(slots=True)
class Grouping:
    """Grouping of requests into messages, shared by all batches of a client.

    Attributes:
        is_bulk: Whether several requests go in a message, by GenerateBulk; otherwise one does, by GenerateBatch.
        max_bytes: Bytes of several; a larger request goes alone.
    """

    is_bulk: bool = True
    max_bytes: float = MAX_BYTES

    def message(self, sending: Sending, waiting: deque[Sending | None], now: float) -> object:
        """Return the message of a request and of those that wait and may go with it now, which are taken from there.

        Args:
            sending: The request that is sent.
            waiting: Requests to send after it; None for their end.
            now: Time on the batch's clock.
        """
        if not self.is_bulk:
            return sending.message
        requests, num_bytes = [sending.message], sending.message.ByteSize()
        while waiting and (following := waiting[0]) is not None:
            num_bytes += following.message.ByteSize()
            if following.not_before > now or len(requests) == MAX_REQUESTS or num_bytes > self.max_bytes:
                break
            requests.append(following.message)
            waiting.popleft()
        return generation_pb2.GenerateBulkRequest(requests=requests)

    def learn(self, error: CallError, largest: int, used: "Grouping") -> bool:
        """Learn from the failure of a stream; return whether sending everything unanswered again can succeed.

        Args:
            error: The failure; a server that is older than GenerateBulk has no such method.
            largest: Bytes of the largest unanswered request.
            used: The grouping when the stream began.
        """
        if not used.is_bulk:
            return False
        if isinstance(error, Unimplemented):
            self.is_bulk = False
            return True
        if not isinstance(error, TooLarge) or error.is_answer:
            return False
        limit = 0.0 if error.max_bytes is None else error.max_bytes
        if largest <= limit < largest + _AROUND_BYTES:
            self.is_bulk = False
            return True
        self.max_bytes = min(self.max_bytes, limit)
        return used.max_bytes > limit and (largest <= limit or error.max_bytes is None)


def check_concurrency(concurrency: int) -> None:
    """Raise `ValueError` if no request may be under way."""
    if concurrency < 1:
        raise ValueError(f"concurrency: {concurrency} is less than 1")


def apart(answers: Answers) -> Iterable[generation_pb2.GenerateBatchResponse]:
    """Return the answers of a message."""
    return answers.answers if isinstance(answers, generation_pb2.GenerateBulkResponse) else (answers,)


@dataclass(slots=True)
class _Entry:
    """An unanswered request, the attempts begun for it, and its place among what is sent on the stream."""

    index: int
    request: Request
    message: generation_pb2.GenerateRequest
    expires: float
    num_attempts: int = 1
    place: int = 0


class Batch:
    """Requests that share one stream at a time.

    A request that fails alone is tried again as `RetryPolicy` says, and so are all unanswered ones when the stream fails.

    Args:
        policy: The retry policy.
        deadline: End of the time for all of it, on the clock.
        clock: Seconds that only ever grow.
        draw: Random numbers from 0 to 1.
        max_request_bytes: Largest request that is sent.
        grouping: Grouping of requests; None for one in a message.
        request_seconds: Time for each request, from when it is added.
        is_of_texts: Whether outcomes are yielded in the order of the input, and a blank text has an empty answer here, instead of
            being refused by the server.
    """

    def __init__(
        self,
        policy: RetryPolicy,
        deadline: float,
        clock: Callable[[], float] = time.monotonic,
        draw: Callable[[], float] = random.random,
        max_request_bytes: float = math.inf,
        grouping: Grouping | None = None,
        request_seconds: float = math.inf,
        is_of_texts: bool = False,
    ) -> None:
        self._policy = policy
        self.deadline = deadline
        self.clock = clock
        self._draw = draw
        self._entries: dict[str, _Entry] = {}  # by the id on the wire
        self._max_request_bytes = max_request_bytes
        self._grouping = grouping or Grouping(is_bulk=False)
        self._used = self._grouping
        self._request_seconds = request_seconds
        self._first_expiry = math.inf  # no request expires before; to look at all of them each time would cost more than sending
        self._is_of_texts = is_of_texts
        self._finished: dict[int, Outcome] = {}  # those that wait for one before them
        self._num_yielded = 0
        self._num_added = 0
        self._num_sent = 0  # on the stream at hand
        self._num_interruptions = 0

    @property
    def num_open(self) -> int:
        """Requests without an outcome."""
        return len(self._entries)

    @property
    def seconds_until_expiry(self) -> float:
        """Time before which no request has had its time; `expire` may find none then, and the next time is later."""
        return self._first_expiry - self.clock() if self._entries else math.inf

    @property
    def num_ahead(self) -> int:
        """Requests whose outcome is not yielded: it is not there yet, or that of one before is not."""
        return len(self._entries) + len(self._finished)

    def begin_stream(self) -> tuple[Grouping, float | None]:
        """Return how requests are put together on the stream that begins now, and the seconds it has; None for no limit."""
        seconds = self.deadline - self.clock()
        if seconds <= 0:
            raise DeadlineExceeded("the batch's time has passed")
        self._used = replace(self._grouping)
        return self._used, None if math.isinf(seconds) else seconds

    def in_order(self, outcome: Outcome) -> Iterator[Outcome]:
        """Yield an outcome at once; of texts those that are next now."""
        if not self._is_of_texts:
            yield outcome
            return
        self._finished[outcome.index] = outcome
        while (found := self._finished.pop(self._num_yielded, None)) is not None:
            self._num_yielded += 1
            yield found

    def expire(self) -> list[Outcome]:
        """Give up the requests whose time is over."""
        now = self.clock()
        if now < self._first_expiry:
            return []
        late = [(wire_id, entry) for wire_id, entry in self._entries.items() if entry.expires <= now]
        for wire_id, _ in late:
            del self._entries[wire_id]
        self._first_expiry = min((entry.expires for entry in self._entries.values()), default=math.inf)
        reason = f"not answered within {self._request_seconds:g} s"
        return [Outcome(x.index, x.request, error=DeadlineExceeded(reason, x.message.request_id)) for _, x in late]

    def add(self, request: Request) -> Step:
        """Add the next request; one that cannot be sent has its outcome at once."""
        index, self._num_added = self._num_added, self._num_added + 1
        if self._is_of_texts and request.is_blank:
            return Outcome(index, request, blank_result(request.model))
        try:
            message = generate_request(request)
            if message.request_id in self._entries:
                raise InvalidArgument("request_id: another request of the batch has it", message.request_id)
            check_size(message, self._max_request_bytes - _LONGER_ID_BYTES, message.request_id)
        except InvalidArgument as error:
            return Outcome(index, request, error=error)
        expires = self.clock() + self._request_seconds
        return self._send(_Entry(index, request, message, expires), message.request_id)

    def handle(self, event: StreamEvent) -> tuple[float, Sequence[Step]]:
        """Process an event of the stream; return the seconds to wait first, and what follows. Raises an error that is final."""
        if isinstance(event, generation_pb2.GenerateBatchResponse):
            return 0.0, [self.take(event)]
        if event is None:
            raise InternalError(f"the stream ended with {self.num_open} requests unanswered")
        if not isinstance(event, CallError):
            raise event
        return self.interrupt(event)

    def take(self, response: generation_pb2.GenerateBatchResponse) -> Step:
        """Process an answer; return the request's outcome, or the request to send again. Raises `InternalError` for a stray one."""
        self._num_interruptions = 0
        entry = self._entries.pop(response.request_id, None) or self._pop_place(response)
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
        if wait is None or self.clock() + wait >= min(self.deadline, entry.expires):
            return Outcome(entry.index, entry.request, error=error)
        # An id is used once on a stream, so another is made, which shows whose it is.
        return self._send_again(entry, f"{request_id[:_KEPT_ID_CHARACTERS]}~{uuid.uuid4().hex}", self.clock() + wait)

    def interrupt(self, error: CallError) -> tuple[float, list[Step]]:
        """Process a failed stream; return the wait before the next, and requests or outcomes. Raises the error if it is final."""
        self._num_sent = 0
        largest = max((entry.message.ByteSize() for entry in self._entries.values()), default=0)
        if self._grouping.learn(error, largest, self._used):
            return 0.0, [self._send(entry, wire_id) for wire_id, entry in list(self._entries.items())]
        if isinstance(error, TooLarge) and self._entries:
            return 0.0, self._part_with(error)
        self._num_interruptions += 1
        wait = self._policy.wait_seconds(self._num_interruptions, error, self._draw())
        if wait is None or self.clock() + wait >= self.deadline:
            raise error
        entries, self._entries = self._entries, {}
        return wait, [self._resume(entry, error) for entry in entries.values()]

    def _pop_place(self, response: generation_pb2.GenerateBatchResponse) -> _Entry | None:
        """Return the request that an answer without an id is for: a server echoes no id that it refuses."""
        places = {} if response.request_id else {entry.place: wire_id for wire_id, entry in self._entries.items()}
        return self._entries.pop(places[response.index]) if response.index in places else None

    def _part_with(self, error: TooLarge) -> list[Step]:
        """Give up the messages that were too large and broke the stream; the others go on the next one.

        Of requests it is known which. Of answers it is not, unless there is one request only: each may be tried as often as any,
        and what has its answer before the large one comes is not tried again.
        """
        entries, self._entries = self._entries, {}
        if error.is_answer and len(entries) > 1:
            return [self._resume(entry, error) for entry in entries.values()]
        sizes = {wire_id: entry.message.ByteSize() for wire_id, entry in entries.items()}
        largest = max(sizes.values())
        limit = largest - 1 if error.max_bytes is None or error.is_answer else min(error.max_bytes, largest - 1)
        if not error.is_answer:
            self._max_request_bytes = min(self._max_request_bytes, limit)
        return [
            Outcome(entry.index, entry.request, error=self._for(entry, error))
            if sizes[wire_id] > limit
            else self._send(entry, wire_id)
            for wire_id, entry in entries.items()
        ]

    def _for(self, entry: _Entry, error: TooLarge) -> CallError:
        """Return an error of the stream as one of a request."""
        request_id = entry.message.request_id
        return TooLarge(error.message, request_id, error.code, is_answer=error.is_answer, max_bytes=error.max_bytes)

    def _resume(self, entry: _Entry, error: CallError) -> Step:
        """Send a request on the next stream, unless it has been sent as often as any may be: it might be what breaks streams."""
        if entry.num_attempts >= self._policy.max_attempts:
            return Outcome(entry.index, entry.request, error=error)
        return self._send_again(entry, entry.message.request_id, 0.0)

    def _send_again(self, entry: _Entry, wire_id: str, not_before: float) -> Sending:
        entry.num_attempts += 1
        return self._send(entry, wire_id, not_before)

    def _send(self, entry: _Entry, wire_id: str, not_before: float = 0.0) -> Sending:
        self._entries[wire_id] = entry
        self._first_expiry = min(self._first_expiry, entry.expires)
        entry.place, self._num_sent = self._num_sent, self._num_sent + 1
        message = entry.message
        if wire_id != message.request_id:
            message = generation_pb2.GenerateRequest()
            message.CopyFrom(entry.message)
            message.request_id = wire_id
        return Sending(message, not_before)


def result_of(outcome: Outcome) -> Result:
    """Return the result of a request; raises its error if it failed."""
    if outcome.error is not None:
        raise outcome.error
    assert outcome.result is not None
    return outcome.result
