"""The run by time, in a bounded number of slices: when there are too many, they become twice as long."""

from dragoman.load.tally import Slice

MAX_SLICES = 600


class Timeline:
    """Slices of equal length, from the start of the run.

    Attributes:
        width: Length of a slice, seconds.
        slices: By their number; those where nothing happened are missing.
    """

    def __init__(self, max_slices: int = MAX_SLICES) -> None:
        self.width = 1
        self.slices: dict[int, Slice] = {}
        self._max_slices = max_slices
        # What each process had under way, by second: its parts of one second may come in two messages.
        self._in_flight: dict[int, dict[int, int]] = {}

    def add(self, process: int, seconds: dict[int, Slice]) -> None:
        """Add what a process counted, by the second."""
        for second, piece in seconds.items():
            by_process = self._in_flight.setdefault(second, {})
            by_process[process] = max(by_process.get(process, 0), piece.in_flight)
            piece.in_flight = sum(by_process.values())
            self._merge(second // self.width, piece)
            while max(self.slices) >= self._max_slices:
                self._double()
        while len(self._in_flight) > MAX_SLICES:  # seconds so long ago that their calls are over
            del self._in_flight[min(self._in_flight)]

    def list(self) -> list[Slice]:
        """Return the slices in order, empty ones too."""
        return [self.slices.get(number, Slice()) for number in range(max(self.slices, default=-1) + 1)]

    def _merge(self, number: int, piece: Slice) -> None:
        found = self.slices.get(number)
        if found is None:
            found = self.slices[number] = Slice()
        found.merge(piece)

    def _double(self) -> None:
        old, self.slices = self.slices, {}
        self.width *= 2
        for number, piece in sorted(old.items()):
            self._merge(number // 2, piece)
