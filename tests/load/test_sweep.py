import pytest

from dragoman.load.sweep import KneeSearch


def search(first: float, knee: float, **arguments) -> tuple[KneeSearch, list[float]]:
    found, tried = KneeSearch(first, **arguments), []
    while (rate := found.next_rate()) is not None:
        tried.append(rate)
        found.record(rate, rate <= knee)
    return found, tried


@pytest.mark.parametrize("knee", [11.0, 137.0, 900.0])
@pytest.mark.parametrize("first", [10.0, 300.0, 2000.0])
def test_the_knee_is_found_from_below_and_from_above(first: float, knee: float) -> None:
    found, tried = search(first, knee)
    assert found.knee is not None and knee / 1.05 <= found.knee <= knee
    assert len(tried) <= 20


def test_rates_grow_until_one_fails_and_then_halve_the_gap() -> None:
    _, tried = search(100.0, 200.0, max_steps=4)
    assert tried == pytest.approx([100, 160, 256, 208])


def test_a_server_that_never_holds_has_no_knee() -> None:
    found, tried = search(10.0, 0.0)
    assert found.knee is None and tried == [10, 2.5, 0.625, 0.15625, 0.0390625]


def test_a_server_that_always_holds_is_not_bracketed() -> None:
    found, tried = search(10.0, 1e99, max_steps=4)
    assert not found.is_bracketed and found.knee == max(tried)
