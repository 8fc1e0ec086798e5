"""The server's own deadlines: how long a request may take whose caller does not say, and how long any may."""

import time
from dataclasses import dataclass

from dragoman.server.core.callers_file import Limits


@dataclass(frozen=True, slots=True)
class Deadlines:
    """How long requests may take.

    Attributes:
        default_seconds: For a request that brings no deadline; 0 for any time.
        max_seconds: For every request; 0 for any time.
    """

    default_seconds: float = 0.0
    max_seconds: float = 0.0

    def of(self, limits: Limits) -> "Deadlines":
        """Return those of a caller: what its limits say, and these where they say nothing."""
        default, longest = limits.default_deadline_seconds, limits.max_deadline_seconds
        return Deadlines(self.default_seconds if default is None else default, self.max_seconds if longest is None else longest)

    def time_left(self, arrival: float, remaining_seconds: float | None) -> tuple[float | None, str]:
        """Return how long a request may still take, None for any time, and by which of these limits; an empty text for none.

        Args:
            arrival: When it came, by `time.monotonic()`.
            remaining_seconds: Until the deadline it brought, None if it brought none.
        """
        limit, seconds = "default_deadline_seconds", self.default_seconds
        if remaining_seconds is not None or not seconds or 0 < self.max_seconds < seconds:
            limit, seconds = "max_deadline_seconds", self.max_seconds
        if not seconds:
            return remaining_seconds, ""
        ours = arrival + seconds - time.monotonic()
        if remaining_seconds is not None and remaining_seconds <= ours:
            return remaining_seconds, ""
        return ours, f"{limit} of {seconds:g}"


NO_DEADLINES = Deadlines()
