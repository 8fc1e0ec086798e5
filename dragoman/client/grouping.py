"""How the requests of batches are put together in messages, and what is learnt of a server that does not take them so."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dragoman.client.errors import CallError, TooLarge, Unimplemented
from dragoman.v1 import generation_pb2

# What goes in one message at the most; more saves nothing, and a server is slower to begin.
MAX_REQUESTS = 64
MAX_BYTES = 32 * 2**10
# Servers put as much together in an answer, and a little more around it; who takes no such messages gets one answer a message.
MIN_ANSWER_BYTES = 128 * 2**10
# What a request may have around it in a message of its own.
_AROUND_BYTES = 16

Answers = generation_pb2.GenerateBatchResponse | generation_pb2.GenerateBulkResponse


@dataclass(slots=True)
class Grouping:
    """What all batches of a client keep to.

    Attributes:
        is_bulk: Whether several requests go in a message, by GenerateBulk; otherwise one does, by GenerateBatch.
        max_bytes: Bytes of several; a larger request goes alone.
    """

    is_bulk: bool = True
    max_bytes: float = MAX_BYTES

    def takes(self, num_requests: int, num_bytes: int) -> bool:
        """Say whether so many requests, of so many bytes together, may go in one message."""
        return num_requests <= 1 or (self.is_bulk and num_requests <= MAX_REQUESTS and num_bytes <= self.max_bytes)

    def learn(self, error: CallError, largest: int, used: "Grouping") -> bool:
        """Take in how a stream failed; return whether that is cured if everything that was not answered goes again.

        Args:
            error: What it failed with. A server that is older than GenerateBulk says that it has no such method.
            largest: Bytes of the largest request that was not answered.
            used: How this was when the stream began.
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


def together(requests: Sequence[generation_pb2.GenerateRequest], is_bulk: bool) -> object:
    """Return the message of requests; of one, unless several may go in one."""
    return generation_pb2.GenerateBulkRequest(requests=requests) if is_bulk else requests[0]


def apart(answers: Answers) -> Iterable[generation_pb2.GenerateBatchResponse]:
    """Return the answers of a message."""
    return answers.answers if isinstance(answers, generation_pb2.GenerateBulkResponse) else (answers,)
