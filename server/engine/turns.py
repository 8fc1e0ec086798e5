"""How much of the time scoring may take while something is generated: accounting with times that are passed in."""

REST_PER_SECOND = 1.0
"""Of a turn beside generation. At 1, half of the time is generation's alone, whatever the kernel makes of priorities."""


class Turns:
    """Scoring takes turns. What a turn takes while something is generated is rested afterwards.

    So in any stretch of time generation has half of it to itself, but for the turn at its end. Rest passes with time, also when
    nothing is generated any more: it is no longer than the last turn was.

    Attributes:
        rest_seconds: That are left, as of the last call of `pass_time`.
    """

    def __init__(self) -> None:
        self.rest_seconds = 0.0
        self._now = 0.0

    def pass_time(self, now: float, *, is_turn: bool, is_generating: bool) -> None:
        """Note what went on since the last call.

        Args:
            now: In seconds; the first call only sets the clock.
            is_turn: Whether a turn was under way.
            is_generating: Whether something was generated.
        """
        elapsed, self._now = now - self._now, now
        if not is_turn:
            self.rest_seconds = max(0.0, self.rest_seconds - elapsed)
        elif is_generating:
            self.rest_seconds += REST_PER_SECOND * elapsed
