"""A streamed answer as it comes in: what the blocking and the asyncio stream have in common."""

from collections.abc import Callable

from dragoman.client.errors import CallError, FailedCall, InternalError, from_rpc_error
from dragoman.client.results import Piece, Result, piece_from_proto
from dragoman.client.retry import Attempts
from dragoman.v1 import generation_pb2


class Assembly:
    """What has come of a streamed answer, and whether it may still be asked for anew.

    Args:
        attempts: Of this call.
        request_id: Id of the request.
        to_error: Makes our error of a failed call and the id.
    """

    def __init__(
        self, attempts: Attempts, request_id: str, to_error: Callable[[FailedCall, str], CallError] = from_rpc_error
    ) -> None:
        self.attempts = attempts
        self.request_id = request_id
        self.is_ended = False
        self._to_error = to_error
        self._num_pieces = 0
        self._result: Result | None = None

    @property
    def result(self) -> Result:
        """The whole answer.

        Raises:
            RuntimeError: If the last piece has not come.
        """
        if self._result is None:
            raise RuntimeError("the stream has not delivered its last piece")
        return self._result

    @property
    def has_result(self) -> bool:
        """Whether the answer is complete, however the call ends after that."""
        return self._result is not None

    def piece(self, message: generation_pb2.GenerateStreamResponse) -> Piece:
        """Take the next message in."""
        piece = piece_from_proto(message)
        self._num_pieces += 1
        self._result = piece.result
        return piece

    def end(self) -> None:
        """Close the answer at the end of a successful call.

        Raises:
            InternalError: If the server has not sent the last piece.
        """
        if self._result is None:
            raise InternalError("the stream ended without its result", self.request_id)

    def error(self, failure: FailedCall) -> CallError:
        """Return the error of a call that failed."""
        return self._to_error(failure, self.request_id)

    def wait_seconds(self, error: CallError) -> float | None:
        """Return when to ask anew after a failure; None if the stream fails with it, as it does once a piece is delivered."""
        return self.attempts.wait_seconds(error) if self._num_pieces == 0 else None
