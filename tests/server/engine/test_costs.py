"""Costs of batches: the cheapest batches are made, and costs are measured right."""

import itertools
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.server.engine.costs import MAX_CELLS, MAX_SECONDS, MIN_PAIR, NUM_REPEATS, PACKED, PADDED, Costs, grouped, measured
from dragoman.server.engine.sequence import Sequence
from tests.server.engine.sequences import sequence

COSTS = st.builds(Costs, *(st.sampled_from(values) for values in ([0, 1, 12, 500], [0.5, 1], [0, 1], [0, 0.005, 0.2])))


def sequences(lengths: list[int]) -> list[Sequence]:
    return [sequence(i, num_tokens=length) for i, length in enumerate(lengths)]


def lengths_of(groups: list[list[Sequence]]) -> list[list[int]]:
    return [[sequence.num_source_tokens for sequence in group] for group in groups]


def taken(groups: list[list[int]], costs: Costs) -> float:
    return sum(costs.of(len(group), max(group), sum(group)) for group in groups)


def partitions(items: list[int]) -> Iterator[list[list[int]]]:
    """Yield every way to put items into groups."""
    if not items:
        yield []
        return
    for rest in partitions(items[1:]):
        yield [[items[0]], *rest]
        for i, group in enumerate(rest):
            yield [*rest[:i], [items[0], *group], *rest[i + 1 :]]


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), COSTS)
def test_no_other_batches_take_less(lengths: list[int], costs: Costs) -> None:
    found = lengths_of(grouped(sequences(lengths), costs))
    assert sorted(itertools.chain(*found)) == sorted(lengths)
    least = min(taken(groups, costs) for groups in partitions(lengths))
    assert taken(found, costs) == pytest.approx(least)


NO_PADDING_COST = Costs(1.0, 0.01, 0, 0)
ALIKE = [512] * (2 * MAX_CELLS // 512)


@pytest.mark.parametrize(
    ("lengths", "costs", "groups"),
    [
        ([3, 40, 3, 38, 4], Costs(10, 1, 0, 0.5), [[40], [38], [4, 3, 3]]),  # the longest first
        ([5] * 100, Costs(10, 1, 0, 0.5), [[5] * 100]),
        ([60, 20, 15, 12], PACKED, [[60, 20, 15, 12]]),
        ([400, 20, 15, 12], PADDED, [[400], [20, 15, 12]]),
        # One long source beside a hundred short ones: attention would have read and given a hundred long ones.
        ([4096, *[2] * 100], NO_PADDING_COST, [[4096], [2] * 100]),
        ([1024, *[2] * 31], NO_PADDING_COST, [[1024, *[2] * 31]]),
        (ALIKE, PACKED, [ALIKE]),
    ],
)
def test_batches_are_the_cheapest_that_memory_is_large_enough_for(
    lengths: list[int], costs: Costs, groups: list[list[int]]
) -> None:
    assert lengths_of(grouped(sequences(lengths), costs)) == groups


def test_padding_is_never_taken_to_be_free() -> None:
    """The batch with padding was measured in a quieter moment than those without."""
    encoder = Encoder(Costs(1e-3, 1e-4, 0, 1e-6), lambda run: -7e-3 * (run > 2 * NUM_REPEATS))
    found = measured(encoder, 64, 512, encoder.clock)
    assert found.pair == MIN_PAIR * found.token > 0


def test_a_good_batch_leaves_a_run_a_tenth() -> None:
    for costs in (Costs(12, 1, 0, 0), Costs(3, 0, 0.25, 0)):
        tokens = costs.good_tokens
        assert costs.run / costs.of(1, tokens, tokens) == pytest.approx(0.1, rel=0.02)
    assert Costs(0, 1, 0, 0).good_tokens == 0


class Encoder:
    """Takes the time that costs say, every so often more; tells the time, too."""

    def __init__(self, costs: Costs, noise: Callable[[int], float] = lambda run: 0.0) -> None:
        self.costs, self.noise, self.now, self.runs = costs, noise, 0.0, list[list[int]]()

    def __call__(self, lengths: list[int]) -> None:
        self.runs.append(lengths)
        self.now += self.costs.of(len(lengths), max(lengths), sum(lengths)) + self.noise(len(self.runs))

    def clock(self) -> float:
        return self.now


@pytest.mark.parametrize("max_rows, max_tokens", [(64, 512), (8, 40), (3, 24)])
def test_costs_are_found_whatever_disturbs_single_runs(max_rows: int, max_tokens: int) -> None:
    costs = Costs(1.8e-3, 1.5e-4, 0, 3e-7)
    encoder = Encoder(costs, lambda run: 0.02 * (run % 3 == 1))
    found = measured(encoder, max_rows, max_tokens, encoder.clock)
    assert (found.run, found.token, found.cell, found.pair) == pytest.approx((1.8e-3, 1.5e-4, 0, 3e-7))
    assert all(len(run) <= max_rows and max(run) <= max_tokens for run in encoder.runs)
    assert len(encoder.runs) == 3 * NUM_REPEATS


def test_a_slow_model_is_measured_once() -> None:
    encoder = Encoder(Costs(MAX_SECONDS, 0.01, 0, 0))
    assert measured(encoder, 64, 512, encoder.clock).token == pytest.approx(0.01)
    assert len(encoder.runs) == 3


def test_where_nothing_can_be_measured_costs_are_the_usual_ones() -> None:
    encoder = Encoder(Costs(1, 0.1, 0, 0))
    assert measured(encoder, 1, 512, encoder.clock) == measured(encoder, 64, 1, encoder.clock) == PACKED
    restless = Encoder(Costs(1, 0.1, 0, 0), lambda run: 100.0 * (run == 1))
    assert measured(restless, 64, 512, restless.clock) == PACKED
