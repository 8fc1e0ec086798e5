"""A token bucket: what limits a rate and lets bursts through. It may owe: what is used is taken, whether it is there or not."""

from collections.abc import Callable


class Bucket:
    """Fills at a rate, up to its burst; full at first. Not for several threads.

    Attributes:
        rate: What it gets a second; above 0.
        burst: What it holds at the most; above 0.
    """

    __slots__ = ("_clock", "_filled", "_level", "burst", "rate")

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        """Start full.

        Args:
            rate: What it gets a second.
            burst: What it holds at the most.
            clock: Seconds that only rise.
        """
        self.rate, self.burst = rate, burst
        self._clock = clock
        self._level, self._filled = burst, clock()

    @property
    def state(self) -> tuple[float, float]:
        """What was in it, and when that was so: all there is to know beside rate and burst. Another may go on from it."""
        return self._level, self._filled

    @state.setter
    def state(self, state: tuple[float, float]) -> None:
        self._level, self._filled = state

    @property
    def level(self) -> float:
        """What is in it now; negative while more has been taken than it got."""
        now = self._clock()
        self._level = min(self.burst, self._level + (now - self._filled) * self.rate)
        self._filled = now
        return self._level

    def take(self, amount: float) -> None:
        """Take an amount, whether it is there or not; a negative one is given back."""
        self._level = min(self.burst, self.level - amount)

    def seconds_until(self, amount: float) -> float:
        """Return when this amount, at most the burst, is there if nothing is taken meanwhile; 0 if it is there now."""
        missing = min(amount, self.burst) - self.level
        return max(0.0, missing / self.rate)

    def change(self, rate: float, burst: float) -> None:
        """Go on with another rate and burst from what is in it; a debt stays one."""
        level = self.level
        self.rate, self.burst = rate, burst
        self._level = min(burst, level)
