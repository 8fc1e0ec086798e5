import pytest

from dragoman.server.durations import parse_duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400), ("250ms", 0.25), ("2d", 172800), ("0s", 0), ("007s", 7)]
)
def test_times_are_read_by_their_unit(text: str, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text", ["", "10", 10, "m", "-1s", "1 s", "1S", "1e3s", "1s ", "1s\n", "٣s", "1.s", ".5s", "inf", "9" * 400 + "s", None]
)
def test_what_is_no_time_is_refused_with_an_example(text: object) -> None:
    with pytest.raises(ValueError, match=r"is not a time such as 90s, 10m or 1\.5h, in quotes") as refusal:
        parse_duration(text)
    assert len(str(refusal.value)) < 200
