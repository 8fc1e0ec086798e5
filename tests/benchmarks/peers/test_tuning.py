"""The search for settings, with servers that are formulas."""

from collections import Counter
from collections.abc import Callable

import pytest

from benchmarks.peers.server import Settings
from benchmarks.peers.tuning import Trial, first_settings, latency_settings, tune
from benchmarks.serving.goodput import Ladder, Point

OBJECTIVE = 0.5


def trial_of(capacity: Callable[[Settings], float], log: list[tuple[Settings, int]]) -> Trial:
    """Servers that keep up with as many rungs as `capacity` says; its fraction shows in the goodput above that."""

    def trial(settings: Settings, start: int, lowest: int, stride: int) -> tuple[Point | None, dict[int, Point]]:
        def measure(rung: int) -> Point:
            log.append((settings, rung))
            seconds = OBJECTIVE if rung <= capacity(settings) else 1.0
            return Point(rung, capacity(settings) % 1, seconds, seconds, 0.0, Counter(), 100, 0.1)

        ladder = Ladder(measure, OBJECTIVE)
        return ladder.find_knee(start, lowest, stride), ladder.points

    return trial


def test_the_best_of_every_stage_is_what_the_next_starts_from() -> None:
    wanted = Settings(num_instances=1, num_parts=2, num_threads=1, max_batch_size=64, delay_ms=0)

    def capacity(settings: Settings) -> int:
        return 20 + sum(getattr(settings, name) == getattr(wanted, name) for name in Settings.__slots__)

    found, rung = tune(trial_of(capacity, []), num_cores=2, start=10, lowest=0, stride=4)
    assert found == wanted
    assert rung == 25


def test_of_two_that_fail_at_a_rate_the_one_with_more_answers_in_time_is_taken() -> None:
    best = tune(trial_of(lambda settings: 20.5 + 0.1 * (settings.delay_ms == 20), []), 2, 10, 0, 4)
    assert best[0].delay_ms == 20
    assert best[1] == 20


def test_equal_settings_change_nothing() -> None:
    assert tune(trial_of(lambda settings: 20.5, []), 2, 10, 0, 4) == (first_settings(2), 20)


def test_a_challenger_that_is_no_better_costs_one_measurement() -> None:
    log: list[tuple[Settings, int]] = []
    tune(trial_of(lambda settings: 20 + 3 * (settings == first_settings(2)), log), 2, 10, 0, 4)
    counts = Counter(settings for settings, _ in log)
    counts.pop(first_settings(2))
    assert len(counts) == 6 and set(counts.values()) == {1}
    assert {rung for settings, rung in log if settings != first_settings(2)} == {24}


def test_one_core_is_not_divided() -> None:
    log: list[tuple[Settings, int]] = []
    tune(trial_of(lambda settings: 20, log), 1, 10, 0, 4)
    assert {(settings.num_instances, settings.num_parts, settings.num_threads) for settings, _ in log} == {(1, 1, 1)}


def test_a_peer_that_keeps_up_with_nothing_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="no rate is slow enough"):
        tune(trial_of(lambda settings: 3, []), 2, 10, 5, 4)


@pytest.mark.parametrize("num_cores", [1, 2, 8])
def test_all_cores_compute(num_cores: int) -> None:
    for settings in (first_settings(num_cores), latency_settings(num_cores)):
        assert settings.num_instances * settings.num_parts * settings.num_threads == num_cores
