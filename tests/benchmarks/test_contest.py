"""Rounds, their order, and what is made of the figures."""

import pytest

from benchmarks.engines.sides import Run
from benchmarks.harness import contest
from benchmarks.harness.contest import in_rounds, median_rate, median_ratio, share_of_same_answers, size_for


def run(num_tokens: int, seconds: float = 1.0) -> Run:
    return Run(seconds, [[7] * num_tokens], {})


def test_everyone_runs_once_a_round_and_another_one_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contest, "PAUSE_SECONDS", 0.0)
    order: list[str] = []

    def contender(name: str) -> Run:
        order.append(name)
        return run(len(order))

    runs = in_rounds({name: lambda name=name: contender(name) for name in "abc"}, 4)
    assert order == ["a", "b", "c", "b", "c", "a", "c", "a", "b", "a", "b", "c"]
    assert [len(one.answers[0]) for one in runs["a"]] == [1, 6, 8, 10]


@pytest.mark.parametrize(
    ("batch_seconds", "wanted", "min_batches", "expected"),
    [(0.5, 2.0, 1, 4), (0.5, 2.0, 6, 6), (30.0, 2.0, 1, 1), (1e-6, 2.0, 1, contest.MAX_REPEATS)],
)
def test_a_run_is_as_long_as_wanted_within_bounds(batch_seconds: float, wanted: float, min_batches: int, expected: int) -> None:
    sizes: list[int] = []

    def contender(count: int) -> Run:
        sizes.append(count)
        return run(1, batch_seconds)

    assert size_for(contender, 8, wanted, min_batches) == 8 * expected
    assert sizes == [8]


def test_ratios_are_of_the_same_round() -> None:
    ours, theirs = [run(10), run(40), run(90)], [run(10), run(20), run(30)]
    assert median_rate(ours) == 40
    assert median_ratio(ours, theirs) == 2


def test_answers_are_compared_token_by_token() -> None:
    ours, theirs = Run(1, [[1, 2], [3], [4], [5]], {}), Run(1, [[1, 2], [3, 3], [4]], {})
    assert share_of_same_answers(ours, theirs) == pytest.approx(2 / 3)
