"""Sides in turns: who runs when, for how long, and what is made of the figures."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.engines.sides import Run

PAUSE_SECONDS = 0.3
"""Longer than the threads of any side look for more work after its last."""
MAX_REPEATS = 64

Contender = Callable[[int], Run]
"""Runs a workload of so many requests."""


def size_for(contender: Contender, batch: int, seconds: float, min_batches: int) -> int:
    """Run one batch, which also warms up, and return how many requests will take about `seconds`: whole batches of them."""
    took = contender(batch).seconds
    return batch * min(MAX_REPEATS, max(min_batches, round(seconds / took)))


def in_rounds(contenders: Mapping[str, Callable[[], Run]], num_rounds: int) -> dict[str, list[Run]]:
    """Let everyone run once a round, another one first in each; return everyone's runs."""
    names = list(contenders)
    runs: dict[str, list[Run]] = {name: [] for name in names}
    for i in range(num_rounds):
        start = i % len(names)
        for name in names[start:] + names[:start]:
            time.sleep(PAUSE_SECONDS)
            runs[name].append(contenders[name]())
    return runs


def median_rate(runs: Sequence[Run]) -> float:
    """Return the median of the runs' tokens a second."""
    return statistics.median(run.tokens_per_second for run in runs)


def median_ratio(ours: Sequence[Run], theirs: Sequence[Run]) -> float:
    """Return the median, over the rounds, of our tokens a second over theirs."""
    pairs = zip(ours, theirs, strict=True)
    return statistics.median(a.tokens_per_second / b.tokens_per_second for a, b in pairs)


def share_of_same_answers(ours: Run, theirs: Run) -> float:
    """Return how many answers are the same, token by token, of those that both gave to the same sources."""
    pairs = list(zip(ours.answers, theirs.answers, strict=False))
    return sum(a == b for a, b in pairs) / len(pairs)
