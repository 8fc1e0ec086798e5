"""What an ending of the engine's that is no answer means to the caller: the error it stands for."""

from typing import NoReturn

from dragoman.server.engine import messages
from dragoman.server.errors import (
    Cancelled,
    DeadlineExceeded,
    DeadlineUnmet,
    QueueFull,
    ServiceError,
    StepFailed,
    Unavailable,
)
from dragoman.server.service.callers import Caller
from dragoman.server.service.context import Call

RETRY_SECONDS = 1.0


def raise_ending(finished: messages.Finished, call: Call) -> NoReturn:
    """Raise what the ending of a request means."""
    match finished.reason:
        case "deadline":
            raise DeadlineExceeded(f"{_deadline(call)} passed after {finished.num_generated} tokens")
        case "deadline_unmet":
            needed = f"about {finished.needed_seconds:.3g} s are needed"
            raise DeadlineUnmet(f"refused before any work: {needed}, more than {_deadline(call)} leaves")
        case "queue_full" if finished.limit and call.caller is not None:
            raise place_refused(call.caller, finished.limit, finished.retry_after_seconds)
        case "queue_full":
            raise QueueFull("too many requests are waiting", finished.retry_after_seconds, limit=finished.limit)
        case "step_failed":
            raise StepFailed(f"generation failed; quote incident {finished.incident}")
        case "lost":
            raise _lost(finished.retry_after_seconds)
        case reason:
            _raise_common(reason)


def raise_pair_ending(scored: messages.Scored, call: Call) -> NoReturn:
    """Raise what the ending of a pair means."""
    match scored.reason:
        case "deadline" | "deadline_unmet":
            raise DeadlineExceeded(f"{_deadline(call)} passed before the pair was scored")
        case "queue_full" if scored.limit and call.caller is not None:
            raise place_refused(call.caller, scored.limit, scored.retry_after_seconds)
        case "queue_full":
            raise QueueFull("too many pairs are waiting to be scored", scored.retry_after_seconds, limit=scored.limit)
        case "step_failed":
            raise StepFailed(f"scoring failed; quote incident {scored.incident}")
        case "lost":
            raise _lost(scored.retry_after_seconds)
        case "not_loaded":
            raise Unavailable("the model cannot score at the moment", retry_after_seconds=scored.retry_after_seconds)
        case reason:
            _raise_common(reason)


def place_refused(caller: Caller, limit: str, retry_after_seconds: float | None) -> ServiceError:
    """Count for a caller that a limit of its own kept it out of a queue; return the error that tells it.

    Args:
        caller: Whose request it was.
        limit: `max_waiting` or `max_slots`.
        retry_after_seconds: When there is likely to be a place; None where nobody knows.
    """
    reason = "the request needs more slots" if limit == "max_slots" else "too many requests are waiting"
    return caller.limit_reached(limit, reason, RETRY_SECONDS if retry_after_seconds is None else retry_after_seconds)


def _lost(retry_after_seconds: float) -> Unavailable:
    return Unavailable("the engine that had the request ended", retry_after_seconds)


def _deadline(call: Call) -> str:
    """Name the deadline, and whose it was if it was the server's."""
    return f"the server's deadline ({call.deadline_limit} seconds)" if call.deadline_limit else "the deadline"


def _raise_common(reason: messages.FinishReason) -> NoReturn:
    match reason:
        case "cancelled":
            raise Cancelled("the request was cancelled")
        case "draining":
            raise Unavailable("the model's engine is shutting down", retry_after_seconds=RETRY_SECONDS)
        case _:
            raise AssertionError(f"{reason} is an answer")
