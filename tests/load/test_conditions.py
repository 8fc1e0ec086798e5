import pytest

from dragoman.load.conditions import parse_conditions, parse_number, parse_shares, parse_slos, parse_time, share_good
from dragoman.model.errors import InputError


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (parse_number, "0.5", 0.5),
        (parse_number, "1%", 0.01),
        (parse_number, ".5", 0.5),
        (parse_number, "1e-3", 0.001),
        (parse_time, "2s", 2.0),
        (parse_time, "500ms", 0.5),
        (parse_time, "20us", 2e-5),
    ],
)
def test_numbers_and_times_are_read(read, text: str, value: float) -> None:
    assert read(text, "--x") == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "x", "-1", "5m", "1.2.3", "nan", "1e999", "5s"])
def test_what_is_no_number_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--x"):
        parse_number(text, "--x")


@pytest.mark.parametrize("text", ["", "x", "-1s", "5m", "1e999s", "5%"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(InputError, match="--x"):
        parse_time(text, "--x")


@pytest.mark.parametrize(
    ("read", "text", "advice"),
    [
        (parse_slos, "e2e=500", "--slo e2e: 500: .* write 500ms or 500s"),
        (parse_slos, "ttft=0.5", "--slo ttft: 0.5: .* write 0.5ms or 0.5s"),
        (parse_conditions, "errors>0,p95>0.5", "--fail-on p95: 0.5: .* write 0.5ms or 0.5s"),
        (parse_conditions, "ttft_mean>5", "--fail-on ttft_mean: 5: .* write 5ms or 5s"),
    ],
)
def test_a_time_without_its_unit_is_not_guessed_at(read, text: str, advice: str) -> None:
    with pytest.raises(InputError, match=advice):
        read(text)


def test_service_levels_are_limits_by_measure() -> None:
    assert parse_slos("e2e=500ms, ttft=0.1s") == {"e2e": 0.5, "ttft": 0.1}
    assert parse_slos("") == {}
    for text in ("p95=1s", "e2e", "e2e=0", "e2e=0s", "e2e=5%", "e2e=1s,e2e=2s"):
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
        ("e2e_max>=0.2s", True),
        ("mean>190ms", True),
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


@pytest.mark.parametrize(
    "text", ["errors", "errors>", ">1", "p33>1", "speed>1", "ttft_p33>1", "errors>x", "errors=1", "errors>5ms", "errors>1%"]
)
def test_conditions_that_mean_nothing_are_refused(text: str) -> None:
    with pytest.raises(InputError, match="--fail-on"):
        parse_conditions(text)


def test_the_share_of_good_answers_needs_requests(make_result) -> None:
    assert share_good(make_result([[], []])) is None
    assert share_good(make_result([[0.1, 0.1, 0.1, 0.9]], slos={"e2e": 0.5})) == 0.75


@pytest.mark.parametrize(
    ("text", "unit"),
    [("p95>1s", "s"), ("ttft_mean>1ms", "s"), ("error_rate>1%", "share"), ("throughput<1", "/s"), ("errors>0", "")],
)
def test_a_check_says_what_its_value_is_measured_in(make_result, text: str, unit: str) -> None:
    (condition,) = parse_conditions(text)
    assert condition.check(make_result([[0.2]])).unit == unit
