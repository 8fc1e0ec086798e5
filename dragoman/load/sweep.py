"""The search for the knee: the highest rate at which the service levels hold. Which rate comes next; it measures nothing itself."""

GROWTH = 1.6
DROP = 4.0
# Below this part of the first rate the search is given up.
LEAST_PART = 1e-3
TOLERANCE = 0.05
MAX_STEPS = 20


class KneeSearch:
    """Raises the rate geometrically until it fails, then halves the gap between the best that held and the least that did not.

    A first rate that fails is lowered in large steps. It ends when the gap is within the tolerance, or after so many steps.

    Args:
        first: Rate to begin with.
        tolerance: Gap at the end, as a part of the rate that held.
        max_steps: Rates to try at the most.
    """

    def __init__(self, first: float, tolerance: float = TOLERANCE, max_steps: int = MAX_STEPS) -> None:
        self._first = first
        self._tolerance = tolerance
        self._steps_left = max_steps
        self._held: float | None = None
        self._failed: float | None = None

    @property
    def knee(self) -> float | None:
        """Highest rate that held so far; None where none did."""
        return self._held

    @property
    def is_bracketed(self) -> bool:
        """Whether a rate failed: what held may otherwise be far from the knee."""
        return self._failed is not None

    def next_rate(self) -> float | None:
        """Return the rate to try; None when the search is over."""
        if not self._steps_left:
            return None
        if self._held is None:
            lower = self._first if self._failed is None else self._failed / DROP
            return lower if lower >= self._first * LEAST_PART else None
        if self._failed is None:
            return self._held * GROWTH
        if self._failed - self._held <= self._tolerance * self._held:
            return None
        return (self._held + self._failed) / 2

    def record(self, rate: float, is_passed: bool) -> None:
        """Say how the rate did; noise may have a rate hold above one that failed, and then the failure stands."""
        self._steps_left -= 1
        if not is_passed:
            self._failed = rate if self._failed is None else min(self._failed, rate)
        elif self._held is None or rate > self._held:
            self._held = rate
