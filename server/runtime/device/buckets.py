"""The few sizes that steps are rounded up to, so that a captured graph of each can be replayed."""

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

# Beyond 64 rows a step's time grows with its rows, so that gaps of a third are worth a graph.
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
CANDIDATES = (1, 16, 64)
# Attention's kernels split their work by the buffer's length, not by what is valid; below 512 that costs nothing worth a move.
CAPACITIES = (512, 1024, 2048, 4096, 8192)
NO_GRAPH = -1
# A cache of one position would look like the first tokens of a text to attention's kernels.
MIN_CAPACITY = 2


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes a step may have.

    Attributes:
        rows: Of the decode batch, rising, the last the most there can be.
        candidates: K, rising; a step that wants more than the last runs as it is, without a graph.
        targets: Positions that self-attention caches are laid out for, rising.
        sources: The same of cross-attention.
    """

    rows: tuple[int, ...]
    candidates: tuple[int, ...]
    targets: tuple[int, ...]
    sources: tuple[int, ...]

    @classmethod
    def of(
        cls,
        max_rows: int,
        num_choices: int,
        max_targets: int,
        max_sources: int,
        rows: Sequence[int] = ROWS,
        capacities: Sequence[int] = CAPACITIES,
    ) -> "Buckets":
        """Cut the usual sizes to a model and its number of rows; each list ends with the most that is ever needed."""
        return cls(
            _cut(rows or ROWS, max_rows),
            tuple(k for k in CANDIDATES if k <= num_choices),
            _cut([size for size in capacities or CAPACITIES if size >= MIN_CAPACITY], max(max_targets, MIN_CAPACITY)),
            _cut([size for size in capacities or CAPACITIES if size >= MIN_CAPACITY], max(max_sources, MIN_CAPACITY)),
        )

    def padded_rows(self, num_rows: int) -> int:
        """Return the rows that a step of `num_rows` computes."""
        return at_least(self.rows, num_rows)

    def padded_candidates(self, num_candidates: int) -> int:
        """Return the K that a step asks the decoder for; more than the largest bucket stays what it is."""
        return num_candidates if num_candidates > self.candidates[-1] else at_least(self.candidates, num_candidates)

    def graph_id(self, num_rows: int, num_candidates: int, targets: int, sources: int) -> int:
        """Return the number of a shape's graph, from 1; `NO_GRAPH` for one that is not captured.

        All arguments but K must be sizes of this object.
        """
        if num_candidates not in self.candidates:
            return NO_GRAPH
        place = self.rows.index(num_rows)
        for sizes, size in ((self.candidates, num_candidates), (self.targets, targets), (self.sources, sources)):
            place = place * len(sizes) + sizes.index(size)
        return place + 1  # 0 is what a run has that does not say


def padded_sizes(largest: int) -> tuple[int, ...]:
    """Return few sizes up to a largest one, rising: the powers of two and the halves between them, as 1, 2, 3, 4, 6, 8, 12, 16.

    What is rounded up to one of them grows by less than a half.
    """
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return _cut([size for power in powers for size in (power, power + power // 2)], largest)


def at_least(sizes: Sequence[int], size: int) -> int:
    """Return the smallest of rising sizes that is not below one."""
    assert size <= sizes[-1], f"{size} is more than {sizes[-1]}"
    return sizes[bisect.bisect_left(sizes, size)]


def _cut(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    return (*sorted({size for size in sizes if size < largest}), largest)
