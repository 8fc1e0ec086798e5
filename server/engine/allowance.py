"""How much of the engine's time a kind of work may take from others: a debt that their steps pay off. No clock of its own."""

MAX_DEBT_SECONDS = 1.0
"""Debt beyond this is forgiven, so that one stall of the machine does not hold up the work for long."""


class Allowance:
    """A share of time for work in pieces, each of which is begun while nothing is owed and may take as long as it takes.

    On average the work takes at most its share, however long a piece is; the longest wait is one piece.
    """

    def __init__(self, share: float) -> None:
        """Allow a share of all time, above 0 and below 1."""
        assert 0 < share < 1
        self._ratio = share / (1 - share)
        self._debt_seconds = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a piece of work may begin."""
        return self._debt_seconds <= 0

    def earn(self, seconds: float) -> None:
        """Note time that others had. What is not used up before they have had more is lost."""
        earned = seconds * self._ratio
        self._debt_seconds = max(self._debt_seconds, 0.0) - earned

    def spend(self, seconds: float) -> None:
        """Note time that the work took."""
        self._debt_seconds = min(self._debt_seconds + seconds, MAX_DEBT_SECONDS)

    def clear(self) -> None:
        """Forget the debt: there are no others."""
        self._debt_seconds = 0.0
