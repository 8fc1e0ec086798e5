"""The two families of errors a caller can see: faults of the request and faults of the server.

Each class carries the name of its status, one of `google.rpc.Code`; every face turns these into its own in one place. The message
is for the caller: it names the field or the limit and never holds internal text.
"""

from collections.abc import Sequence
from typing import ClassVar, Self


class ServiceError(Exception):
    """What a caller may be told.

    Attributes:
        code: Name of the status.
        refusal: For metrics: why a request was turned away before any work; empty where it was not.
        retry_after_seconds: When trying again makes sense; None where it does not.
    """

    code: ClassVar[str] = "UNKNOWN"
    refusal: ClassVar[str] = ""

    def __init__(self, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after_seconds = retry_after_seconds

    def copy(self, message: str = "") -> Self:
        """Return an equal error, with another message if one is given. Each task that waits is given an error of its own."""
        other = Exception.__new__(type(self), message or self.message)
        vars(other).update(vars(self), message=message or self.message)
        return other


class ClientFault(ServiceError):
    """The request cannot be served as it is."""


class InvalidRequest(ClientFault):
    """A field is missing, malformed or over its limit."""

    code = "INVALID_ARGUMENT"
    refusal = "invalid"

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")


class UnknownModel(ClientFault):
    """No such model is loaded."""

    code = "NOT_FOUND"
    refusal = "unknown_model"

    def __init__(self, name: str, loaded: list[str]) -> None:
        names = ", ".join(sorted(loaded))
        if name:
            super().__init__(f"model: {name!r} is not loaded; loaded: {names or 'none'}")
        else:
            super().__init__(f"model: is missing; choose one of {names}" if names else "model: is missing, and none is loaded")


class UnknownPair(ClientFault):
    """No model translates between two languages."""

    code = "NOT_FOUND"
    refusal = "unknown_model"

    def __init__(self, asked: str, there: str) -> None:
        """Say what there is.

        Args:
            asked: By the request, as it may be shown.
            there: What models translate.
        """
        super().__init__(f"target_language: no model translates {asked}; there: {there or 'none that tells its languages'}")


class UnknownVersion(ClientFault):
    """The model has no such version, or several."""

    code = "NOT_FOUND"
    refusal = "unknown_version"

    def __init__(self, model: str, asked: str, served: list[str], meant: Sequence[str] = ()) -> None:
        """Say what there is.

        Args:
            model: Its name.
            asked: By the request.
            served: What may be asked for, a text for each version.
            meant: Those of them that it may be, where it is not clear which.
        """
        if meant:
            super().__init__(f"model_version: {asked!r} of model {model} may be {' or '.join(meant)}; ask for one by its name")
        else:
            super().__init__(f"model_version: {asked!r} of model {model} is not served; served: {', '.join(served) or 'none'}")


class NotInRepository(ClientFault):
    """An operator names a model, a version or a label that there is not."""

    code = "NOT_FOUND"

    def __init__(self, field: str, asked: str, there: Sequence[str]) -> None:
        """Say what there is.

        Args:
            field: Of the request.
            asked: By the request, as it may be shown.
            there: Names that could be asked for.
        """
        super().__init__(f"{field}: {asked} is not there; there: {', '.join(there) or 'none'}")


class NotPossible(ClientFault):
    """An operator asks for what cannot be had as things are; nothing has changed."""

    code = "FAILED_PRECONDITION"


class UnknownService(ClientFault):
    """Health was asked of something that is not served."""

    code = "NOT_FOUND"

    def __init__(self) -> None:
        super().__init__("service: nothing of that name is served")


class NotOffered(ClientFault):
    """The protocol has a method that this server does not offer."""

    code = "UNIMPLEMENTED"


class Unauthenticated(ClientFault):
    """The caller did not show a token we know."""

    code = "UNAUTHENTICATED"
    refusal = "unauthenticated"


class DeadlineExceeded(ClientFault):
    """The deadline passed before the answer was complete."""

    code = "DEADLINE_EXCEEDED"


class IdleStream(DeadlineExceeded):
    """The caller has sent nothing for too long on a stream that waits for nothing else."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"nothing was asked for {seconds:g} s; open another stream")


class DeadlineUnmet(DeadlineExceeded):
    """The deadline is sure to pass before the answer is there; nothing was done for this request."""

    refusal = "deadline_unmet"


class Cancelled(ClientFault):
    """The caller cancelled or went away."""

    code = "CANCELLED"


class QueueFull(ClientFault):
    """Too much is waiting; nothing was done for this request.

    Attributes:
        limit: Name of the caller's own limit that is behind it; empty for the queue's.
    """

    code = "RESOURCE_EXHAUSTED"
    refusal = "queue_full"

    def __init__(self, message: str, retry_after_seconds: float | None = None, *, limit: str = "") -> None:
        super().__init__(f"{limit}: {message}" if limit else message, retry_after_seconds)
        self.limit = limit


class LimitReached(ClientFault):
    """A limit of the caller's own does not allow it now; nothing was done for this request."""

    code = "RESOURCE_EXHAUSTED"
    refusal = "limit"

    def __init__(self, limit: str, reason: str, retry_after_seconds: float) -> None:
        super().__init__(f"{limit}: {reason}", retry_after_seconds)
        self.limit = limit


class ConnectionLimit(ClientFault):
    """There is too much of something on one connection, or on all; the message begins with the limit's name."""

    code = "RESOURCE_EXHAUSTED"
    refusal = "connection_limit"


class ServerFault(ServiceError):
    """The request was fine."""


class Unavailable(ServerFault):
    """The server is draining, or the model's engine is starting, restarting or gone; trying again is safe."""

    code = "UNAVAILABLE"


class NotReady(Unavailable):
    """The model's engine is not there at the moment; nothing was done for this request."""

    refusal = "not_ready"


class Draining(Unavailable):
    """The server takes nothing new; nothing was done for this request."""

    refusal = "draining"


class UnexpectedFault(ServerFault):
    """An exception nobody foresaw; the caller gets an id that the log has too, and nothing else."""

    code = "INTERNAL"

    def __init__(self, incident: str) -> None:
        super().__init__(f"internal error; quote incident {incident}")


class StepFailed(ServerFault):
    """A prefill or decode step raised; the message quotes the incident id that the log has."""

    code = "INTERNAL"
