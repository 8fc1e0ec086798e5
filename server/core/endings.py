"""What an ending of the engine's that is no answer means to the caller: the error it stands for."""

from typing import NoReturn

from dragoman.server.engine import messages
from dragoman.server.errors import Cancelled, DeadlineExceeded, DeadlineUnmet, QueueFull, StepFailed, Unavailable

RETRY_SECONDS = 1.0


def raise_ending(finished: messages.Finished) -> NoReturn:
    """Raise what the ending of a request means."""
    match finished.reason:
        case "deadline":
            raise DeadlineExceeded(f"the deadline passed after {finished.num_generated} tokens")
        case "deadline_unmet":
            needed = f"about {finished.needed_seconds:.3g} s are needed"
            raise DeadlineUnmet(f"refused before any work: {needed}, more than the deadline leaves")
        case "queue_full":
            raise QueueFull("too many requests are waiting", retry_after_seconds=finished.retry_after_seconds)
        case "step_failed":
            raise StepFailed(f"generation failed; quote incident {finished.incident}")
        case reason:
            _raise_common(reason)


def raise_pair_ending(scored: messages.Scored) -> NoReturn:
    """Raise what the ending of a pair means."""
    match scored.reason:
        case "deadline" | "deadline_unmet":
            raise DeadlineExceeded("the deadline passed before the pair was scored")
        case "queue_full":
            raise QueueFull("too many pairs are waiting to be scored", retry_after_seconds=scored.retry_after_seconds)
        case "step_failed":
            raise StepFailed(f"scoring failed; quote incident {scored.incident}")
        case "not_loaded":
            raise Unavailable("the model cannot score at the moment", retry_after_seconds=scored.retry_after_seconds)
        case reason:
            _raise_common(reason)


def _raise_common(reason: messages.FinishReason) -> NoReturn:
    match reason:
        case "cancelled":
            raise Cancelled("the request was cancelled")
        case "draining":
            raise Unavailable("the model's engine is shutting down", retry_after_seconds=RETRY_SECONDS)
        case _:
            raise AssertionError(f"{reason} is an answer")
