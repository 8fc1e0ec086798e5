"""Encoder cost model, measured at warm-up, and the batches of least cost."""

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Ordered
from dataclasses import dataclass

from dragoman.server.engine.sequence import Sequence

# Part of a batch's time that a run's fixed cost may take while waiting sources could be added.
SHARE_OF_RUN = 0.1

NUM_ROWS, SHORT, LONG, NUM_REPEATS = 8, 16, 64, 5
# Most `B · S` of a batch of several lengths: attention's inputs and outputs are padded in memory.
MAX_CELLS = 2**15

# Least cost of a pair, in tokens: measured differences vanish in noise on a busy machine, and any batch would seem better than two.
MIN_PAIR = 0.001

# Time after which no batch is measured again.
MAX_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of an encoder run, in seconds or any other unit."""

    run: float  # fixed cost
    token: float  # for each source token
    cell: float  # for each of `B · S` positions, tokens and padding
    pair: float  # for each token and position of the longest source: attention's padding

    def of(self, num_rows: int, longest: int, num_tokens: int) -> float:
        """Return the cost of a batch."""
        return self.run + self.token * num_tokens + longest * (self.cell * num_rows + self.pair * num_tokens)

    @property
    def good_tokens(self) -> int:
        """Tokens of a batch from which on the fixed cost hardly counts."""
        return int((1 / SHARE_OF_RUN - 1) * self.run / (self.token + self.cell))


# Default, in tokens, for an encoder that pads only in attention.
PACKED = Costs(run=12.0, token=1.0, cell=0.0, pair=0.005)

# Default, in tokens, for an encoder that pads everywhere; not measured, as a device's runs are asynchronous.
PADDED = Costs(run=64.0, token=0.0, cell=1.0, pair=0.0)


def grouped(sequences: Ordered[Sequence], costs: Costs) -> list[list[Sequence]]:
    """Divide sequences into the batches of least total cost, longest first; equal lengths stay together.

    A batch of several lengths has at most `MAX_CELLS`.
    """
    ordered = sorted(sequences, key=lambda sequence: -sequence.num_source_tokens)
    lengths = [(length, list(alike)) for length, alike in itertools.groupby(ordered, lambda sequence: sequence.num_source_tokens)]
    least, firsts = [0.0], [0]  # by number of lengths: least cost, start of the last batch
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
    """Return costs in seconds of an encoder that pads only in attention; `PACKED` if the model is too small or noise prevails.

    Measures one source, several alike, and one long beside short ones. `encode` encodes sources of these lengths as one batch; the
    clock is by default this thread's processor time.
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
