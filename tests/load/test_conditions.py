import pytest

from dragoman.load.conditions import parse_conditions, parse_number, parse_shares, parse_slos, share_good
from dragoman.model.errors import InputError


@pytest.mark.parametrize(
    ("text", "value"), [("0.5", 0.5), ("2s", 2.0), ("500ms", 0.5), ("20us", 2e-5), ("1%", 0.01), (".5", 0.5), ("1e-3", 0.001)]
)
def test_numbers_have_units(text: str, value: float) -> None:
    assert parse_number(text, "--x") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "x", "-1", "5m", "1.2.3", "nan"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--x"):
        parse_number(text, "--x")


def test_service_levels_are_limits_by_measure() -> None:
    assert parse_slos("e2e=500ms, ttft=0.1") == {"e2e": 0.5, "ttft": 0.1}
    assert parse_slos("") == {}
    for text in ("p95=1s", "e2e", "e2e=0", "e2e=5%"):
        with pytest.raises(InputError, match="--slo"):
            parse_slos(text)


def test_shares_count_by_their_ratio() -> None:
    assert parse_shares("unary=7,stream=3", "--mix") == pytest.approx({"unary": 0.7, "stream": 0.3})
    assert parse_shares("batch", "--mix") == {"batch": 1.0}
    assert parse_shares("unary=0,stream=1", "--mix") == {"stream": 1.0}
    for text in ("", "unary=0", "unary=x"):
        with pytest.raises(InputError, match="--mix"):
            parse_shares(text, "--mix")


@pytest.mark.parametrize(
    ("text", "is_failed"),
    [
        ("errors>0", False),
        ("requests<40", False),
        ("requests<=40", True),
        ("p50>150ms", True),
        ("p50>250ms", False),
        ("e2e_max>=0.2", True),
        ("mean>0.19", True),
        ("error_rate>1%", False),
        ("goodput_share<99%", False),
        ("throughput<11", True),
        ("UNAVAILABLE>0", False),
        ("UNAVAILABLE==0", True),
        ("ttft_p95>1s", True),  # nothing was measured
        ("knee<1", True),  # there was no sweep
    ],
)
def test_conditions_are_checked(make_result, text: str, is_failed: bool) -> None:
    (condition,) = parse_conditions(text)
    assert condition.check(make_result([[0.2] * 10] * 4)).is_failed == is_failed


@pytest.mark.parametrize("text", ["errors", "errors>", ">1", "p33>1", "speed>1", "ttft_p33>1", "errors>x", "errors=1"])
def test_conditions_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--fail-on"):
        parse_conditions(text)


def test_the_share_of_good_answers_needs_requests(make_result) -> None:
    assert share_good(make_result([[], []])) is None
    assert share_good(make_result([[0.1, 0.1, 0.1, 0.9]], slos={"e2e": 0.5})) == 0.75
