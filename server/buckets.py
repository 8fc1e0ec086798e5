"""Token bucket whose level may become negative."""

from collections.abc import Callable


class Bucket:
    """Token bucket with `rate` in tokens per second, and `burst`, both above 0; not thread-safe."""

    __slots__ = ("_clock", "_filled", "_level", "burst", "rate")

    def __init__(self, rate: float, burst: float, clock: Callable[[], float]) -> None:
        """Start full; the clock is monotonic, in seconds."""
        self.rate, self.burst = rate, burst
        self._clock = clock
        self._level, self._filled = burst, clock()

    @property
    def state(self) -> tuple[float, float]:
        """Level and its time, from which another bucket can continue."""
        return self._level, self._filled

    @state.setter
    def state(self, state: tuple[float, float]) -> None:
        self._level, self._filled = state

    @property
    def level(self) -> float:
        """Tokens now; negative after taking more than there were."""
        now = self._clock()
        self._level = min(self.burst, self._level + (now - self._filled) * self.rate)
        self._filled = now
        return self._level

    def take(self, amount: float) -> None:
        """Take an amount, even if it is not available; a negative amount is given back."""
        self._level = min(self.burst, self.level - amount)

    def seconds_until(self, amount: float) -> float:
        """Return the time until this amount, at most the burst, is available; 0 if it is now."""
        missing = min(amount, self.burst) - self.level
        return max(0.0, missing / self.rate)

    def change(self, rate: float, burst: float) -> None:
        """Change rate and burst; the level, or debt, is kept."""
        level = self.level
        self.rate, self.burst = rate, burst
        self._level = min(burst, level)
