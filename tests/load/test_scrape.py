import itertools

import pytest

from dragoman.load.scrape import MAX_POINTS, Scraper, full_url, parse
from dragoman.model.errors import InputError

TEXT = """\
# HELP dragoman_slots_in_use Rows.
# TYPE dragoman_slots_in_use gauge
dragoman_slots_in_use{model="en-de"} 3.0
dragoman_slots_in_use{model="a } b"} 4.0 1700000000
process_cpu_seconds_total 10.5
dragoman_step_duration_seconds_bucket{le="+Inf",model="en-de"} 5.0
dragoman_step_duration_seconds_sum{model="en-de"} 1.0
dragoman_step_duration_seconds_count{model="en-de"} 100.0
other NaN
"""


def scraper(*texts: str | Exception) -> Scraper:
    answers, now = iter(texts), iter(range(100_000))

    def read(url: str) -> str:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    return Scraper("http://somewhere/metrics", lambda: float(next(now)), read)


def changed(seconds: float, total: float, count: float) -> str:
    text = TEXT.replace("total 10.5", f"total {seconds}").replace("} 1.0\n", f"}} {total}\n")
    return text.replace("} 100.0", f"}} {count}")


def test_metrics_are_summed_over_their_labels() -> None:
    totals = parse(TEXT)
    assert totals["dragoman_slots_in_use"] == 7.0
    assert "dragoman_step_duration_seconds_bucket" not in totals and "other" not in totals


def test_rates_and_means_are_of_the_time_between_readings() -> None:
    reader = scraper(TEXT, changed(11.25, 1.5, 150), changed(11.25, 1.5, 150))
    for _ in range(3):
        reader.scrape()
    first, second, third = (point.values for point in reader.series.points)
    assert first == {"slots_in_use": 7.0}
    assert second == pytest.approx({"slots_in_use": 7.0, "cpu_cores": 0.75, "step_seconds": 0.01})
    assert third == {"slots_in_use": 7.0, "cpu_cores": 0.0}  # no step, no mean


def test_a_server_that_was_restarted_has_no_negative_rates() -> None:
    reader = scraper(TEXT, changed(0.5, 0.2, 10))
    reader.scrape()
    reader.scrape()
    assert reader.series.points[1].values == pytest.approx({"slots_in_use": 7.0, "cpu_cores": 0.5, "step_seconds": 0.02})


@pytest.mark.parametrize("failure", [ConnectionRefusedError(), "<html>not metrics", "name{label"])
def test_a_reading_that_fails_is_counted(failure: str | Exception) -> None:
    reader = scraper(TEXT, failure, TEXT)
    for _ in range(3):
        reader.scrape()
    assert reader.series.num_failures == 1 and len(reader.series.points) == 2


def test_points_stay_bounded_and_cover_the_whole_run() -> None:
    reader = scraper(*([TEXT] * 5000))
    for _ in range(5000):
        reader.scrape()
    points = reader.series.points
    assert MAX_POINTS / 2 <= len(points) <= MAX_POINTS
    assert points[0].at == 0 and points[-1].at >= 4980
    assert all(a.at < b.at for a, b in itertools.pairwise(points))


def test_addresses_may_be_short() -> None:
    assert full_url("host:9000") == "http://host:9000/metrics"
    assert full_url("https://host/own") == "https://host/own"
    for text in ("file:///etc/passwd", "http://"):
        with pytest.raises(InputError, match="--metrics"):
            full_url(text)
