"""Costs of the encoder for a batch, measured when a model is warmed up, and the batches that follow from them."""

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from dragoman.server.engine.sequence import Sequence

SHARE_OF_RUN = 0.1
"""Part of a batch's time that the fixed cost of a run may take where sources wait that could be added to it."""

NUM_ROWS, SHORT, LONG, NUM_REPEATS = 8, 16, 64, 5
MAX_CELLS = 2**15
"""`B · S` of a batch of several lengths: what attention reads and gives lies in memory with its padding."""

MIN_PAIR = 0.001
"""Of a token's cost, that a pair costs at the least: on a busy machine the measured difference is lost in noise, and any batch
would seem better than two."""

MAX_SECONDS = 0.5
"""Time after which no batch is measured again."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of a run of the encoder, in seconds or any other unit.

    Attributes:
        run: Fixed cost.
        token: For each token of its sources.
        cell: For each of `B · S` positions, tokens and padding.
        pair: For each token and position of the longest source: attention's padding.
    """

    run: float
    token: float
    cell: float
    pair: float

    def of(self, num_rows: int, longest: int, num_tokens: int) -> float:
        """Return the cost of a batch."""
        return self.run + self.token * num_tokens + longest * (self.cell * num_rows + self.pair * num_tokens)

    @property
    def good_tokens(self) -> int:
        """Tokens of a batch in which the fixed cost hardly counts."""
        return int((1 / SHARE_OF_RUN - 1) * self.run / (self.token + self.cell))


PACKED = Costs(run=12.0, token=1.0, cell=0.0, pair=0.005)
"""In tokens, for an encoder that computes no padding but attention's, where nothing has been measured."""

PADDED = Costs(run=64.0, token=0.0, cell=1.0, pair=0.0)
"""The same for one that computes padding; a device is not told to wait for the end of a run, so nothing is measured there."""


def grouped(sequences: Ordered[Sequence], costs: Costs) -> list[list[Sequence]]:
    """Divide sequences into the batches that cost the least together, longest first; those of equal length stay together.

    Of several lengths a batch has no more than `MAX_CELLS`.
    """
    ordered = sorted(sequences, key=lambda sequence: -sequence.num_source_tokens)
    lengths = [(length, list(alike)) for length, alike in itertools.groupby(ordered, lambda sequence: sequence.num_source_tokens)]
    least, firsts = [0.0], [0]  # for so many of the lengths: their cost, and where their last batch begins
    for stop in range(1, len(lengths) + 1):
        num_rows = num_tokens = 0
        ways: list[tuple[float, int]] = []
        for first in range(stop - 1, -1, -1):
            length, alike = lengths[first]
            num_rows += len(alike)
            num_tokens += len(alike) * length
            if ways and num_rows * length > MAX_CELLS:
                break
            ways.append((least[first] + costs.of(num_rows, length, num_tokens), first))
        taken, first = min(ways)
        least.append(taken)
        firsts.append(first)
    groups: list[list[Sequence]] = []
    stop = len(lengths)
    while stop:
        groups.append([sequence for _, alike in lengths[firsts[stop] : stop] for sequence in alike])
        stop = firsts[stop]
    return groups[::-1]


def measured(
    encode: Callable[[list[int]], None], max_rows: int, max_tokens: int, clock: Callable[[], float] = time.thread_time
) -> Costs:
    """Measure an encoder that computes no padding but attention's: one source, several alike, and one long beside short ones.

    Args:
        encode: Encodes sources of these lengths as one batch.
        max_rows: Sources of a batch, at the most.
        max_tokens: Of a source.
        clock: In seconds; by default this thread's processor time.

    Returns:
        The costs in seconds; `PACKED` where the model is too small, or the machine too busy to measure.
    """
    num_rows, short = min(NUM_ROWS, max_rows), min(SHORT, max_tokens)
    long = min(LONG, max_tokens, (num_rows - 1) * short)
    if long <= short:
        return PACKED
    rest, remainder = divmod(num_rows * short - long, num_rows - 1)
    batches = [short], [short] * num_rows, [long, *([rest + 1] * remainder), *([rest] * (num_rows - 1 - remainder))]
    deadline, seconds = clock() + MAX_SECONDS, []
    for batch in batches:
        times: list[float] = []
        while not times or (len(times) < NUM_REPEATS and clock() < deadline):
            started = clock()
            encode(batch)
            times.append(clock() - started)
        seconds.append(min(times))
    alone, alike, mixed = seconds
    pairs = [batch[0] * sum(batch) for batch in batches]
    pair = max((mixed - alike) / (pairs[2] - pairs[1]), 0.0)
    token = (alike - alone - pair * (pairs[1] - pairs[0])) / ((num_rows - 1) * short)
    run = alone - token * short - pair * pairs[0]
    return Costs(max(run, 0.0), token, 0.0, max(pair, token * MIN_PAIR)) if token > 0 else PACKED
