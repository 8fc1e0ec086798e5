"""Client faults and server faults.

Each class has a `google.rpc.Code` name, which each protocol maps to its own status in one place. Messages are for the caller: they
name the field or the limit and never contain internal text.
"""

from collections.abc import Sequence
from typing import ClassVar, Self


class ServiceError(Exception):
    """Error reported to the caller; `retry_after_seconds` is None if a retry does not help."""

    code: ClassVar[str] = "UNKNOWN"  # name of the status
    refusal: ClassVar[str] = ""  # metrics reason if refused before any work

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds

    def copy(self, message: str = "") -> Self:
        """Return a copy, with another message if given; each waiting task raises its own error."""
        other = Exception.__new__(type(self), message or self.message)
        vars(other).update(vars(self), message=message or self.message)
        return other


class ClientFault(ServiceError):
    """Fault of the request."""


class InvalidRequest(ClientFault):
    """A field is missing, malformed or over its limit."""

    code = "INVALID_ARGUMENT"
    refusal = "invalid"

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")


class UnknownModel(ClientFault):
    """The model is not loaded."""

    code = "NOT_FOUND"
    refusal = "unknown_model"

    def __init__(self, name: str, loaded: list[str]) -> None:
        names = ", ".join(sorted(loaded))
        if name:
            super().__init__(f"model: {name!r} is not loaded; loaded: {names or 'none'}")
        else:
            super().__init__(f"model: is missing; choose one of {names}" if names else "model: is missing, and none is loaded")


class UnknownPair(ClientFault):
    """No model translates between the two languages."""

    code = "NOT_FOUND"
    refusal = "unknown_model"

    def __init__(self, asked: str, there: str) -> None:
        super().__init__(f"target_language: no model translates {asked}; there: {there or 'none that tells its languages'}")


class UnknownVersion(ClientFault):
    """The model has no such version, or the name is ambiguous."""

    code = "NOT_FOUND"
    refusal = "unknown_version"

    def __init__(self, model: str, asked: str, served: list[str], meant: Sequence[str] = ()) -> None:
        if meant:
            super().__init__(f"model_version: {asked!r} of model {model} may be {' or '.join(meant)}; ask for one by its name")
        else:
            super().__init__(f"model_version: {asked!r} of model {model} is not served; served: {', '.join(served) or 'none'}")


class NotInRepository(ClientFault):
    """An operator's request names a model, version or label that does not exist."""

    code = "NOT_FOUND"

    def __init__(self, field: str, asked: str, there: Sequence[str]) -> None:
        super().__init__(f"{field}: {asked} is not there; there: {', '.join(there) or 'none'}")


class NotPossible(ClientFault):
    """An operator's change is not possible now; nothing has changed."""

    code = "FAILED_PRECONDITION"


class UnknownService(ClientFault):
    """Health check of a service that is not served."""

    code = "NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("service: nothing of that name is served")


class NotOffered(ClientFault):
    """The server does not implement the method."""

    code = "UNIMPLEMENTED"


class Unauthenticated(ClientFault):
    """No valid token."""

    code = "UNAUTHENTICATED"
    refusal = "unauthenticated"


class DeadlineExceeded(ClientFault):
    """The deadline passed before the answer was complete."""

    code = "DEADLINE_EXCEEDED"


class IdleStream(DeadlineExceeded):
    """A stream had no requests for too long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"nothing was asked for {seconds:g} s; open another stream")


class DeadlineUnmet(DeadlineExceeded):
    """The deadline would pass before the answer is complete; refused before any work."""

    refusal = "deadline_unmet"


class Cancelled(ClientFault):
    """The caller cancelled or disconnected."""

    code = "CANCELLED"


class QueueFull(ClientFault):
    """The queue is full; refused before any work. `limit` names the caller's own limit; empty for the queue's."""

    code = "RESOURCE_EXHAUSTED"
    refusal = "queue_full"

    def __init__(self, message: str, retry_after_seconds: float | None = None, *, limit: str = "") -> None:
        super().__init__(f"{limit}: {message}" if limit else message, retry_after_seconds)
        self.limit = limit


class LimitReached(ClientFault):
    """A limit of the caller is reached; refused before any work."""

    code = "RESOURCE_EXHAUSTED"
    refusal = "limit"

    def __init__(self, limit: str, reason: str, retry_after_seconds: float) -> None:
        super().__init__(f"{limit}: {reason}", retry_after_seconds)
        self.limit = limit


class ConnectionLimit(ClientFault):
    """A connection limit is reached; the message begins with its name."""

    code = "RESOURCE_EXHAUSTED"
    refusal = "connection_limit"


class ServerFault(ServiceError):
    """Fault of the server."""


class Unavailable(ServerFault):
    """The server drains, or the model's engine is not running; a retry is safe."""

    code = "UNAVAILABLE"


class NotReady(Unavailable):
    """The model's engine is not ready; refused before any work."""

    refusal = "not_ready"


class Draining(Unavailable):
    """The server drains; refused before any work."""

    refusal = "draining"


class UnexpectedFault(ServerFault):
    """Unexpected exception; the caller gets only an incident id, which is in the log."""

    code = "INTERNAL"

    def __init__(self, incident: str) -> None:
        super().__init__(f"internal error; quote incident {incident}")


class StepFailed(ServerFault):
    """A prefill or decode step raised; the message quotes the incident id of the log."""

    code = "INTERNAL"
