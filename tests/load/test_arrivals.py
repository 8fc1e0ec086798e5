"""Arrivals: their number, their order, and the spread of their gaps."""

import itertools

import numpy as np
import pytest

from dragoman.load.arrivals import Arrivals, due_times
from dragoman.model.errors import InputError


def gaps(arrivals: Arrivals, seconds: float) -> np.ndarray:
    return np.diff(list(due_times(arrivals, seconds, seed=4)))


def test_constant_arrivals_are_even_and_begin_at_once() -> None:
    times = list(due_times(Arrivals(8.0, "constant"), 2.0, 0))
    assert times == [i / 8 for i in range(16)]


def test_poisson_gaps_are_exponential() -> None:
    drawn = gaps(Arrivals(100.0), 200.0)
    assert drawn.mean() == pytest.approx(0.01, rel=0.03)
    assert drawn.std() / drawn.mean() == pytest.approx(1.0, abs=0.03)
    assert np.median(drawn) == pytest.approx(0.01 * np.log(2), rel=0.04)


@pytest.mark.parametrize("burstiness", [0.25, 4.0])
def test_gamma_gaps_have_the_rate_and_the_burstiness(burstiness: float) -> None:
    drawn = gaps(Arrivals(100.0, "gamma", burstiness), 300.0)
    assert drawn.mean() == pytest.approx(0.01, rel=0.04)
    assert drawn.std() / drawn.mean() == pytest.approx(burstiness**-0.5, rel=0.04)


def test_times_rise_and_stay_within_the_run() -> None:
    times = list(due_times(Arrivals(50.0, "gamma", 0.5, 200.0), 10.0, 3))
    assert all(a <= b for a, b in itertools.pairwise(times))
    assert times[0] >= 0 and times[-1] < 10.0


@pytest.mark.parametrize(("first", "last"), [(20.0, 180.0), (180.0, 20.0)])
def test_a_ramp_has_the_rate_of_each_moment(first: float, last: float) -> None:
    times = np.array(list(due_times(Arrivals(first, "constant", ramp_to=last), 10.0, 0)))
    assert len(times) == pytest.approx(1000, abs=2)
    for second in range(10):
        expected = first + (last - first) * (second + 0.5) / 10
        assert ((times >= second) & (times < second + 1)).sum() == pytest.approx(expected, abs=2)


def test_a_seed_gives_the_same_arrivals_and_another_seed_others() -> None:
    one, again, other = (list(due_times(Arrivals(50.0), 2.0, seed)) for seed in (1, 1, 2))
    assert one == again != other


@pytest.mark.parametrize(
    ("arrivals", "flag"),
    [
        (Arrivals(0.0), "--rate"),
        (Arrivals(float("nan")), "--rate"),
        (Arrivals(float("inf")), "--rate"),
        (Arrivals(1.0, "gamma", 0.0), "--burstiness"),
        (Arrivals(1.0, "poisson", 0.5), "--burstiness"),
        (Arrivals(1.0, ramp_to=-1.0), "--ramp-to"),
    ],
)
def test_what_means_nothing_is_named(arrivals: Arrivals, flag: str) -> None:
    with pytest.raises(InputError, match=flag):
        arrivals.check()
