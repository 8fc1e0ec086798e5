"""Sums of the metrics of several processes, worked out by hand."""

from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.telemetry.series import SummedRegistry, add_up, take_series, without_gauges


class Counts:
    """A registry like those of the server: one metric of each kind."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.answers = Counter("dragoman_request_success_total", "Answers.", ["model"], registry=self.registry)
        self.failures = Counter("dragoman_requests_failed_total", "Failures.", ["model", "code"], registry=self.registry)
        self.seconds = Histogram("seconds", "Times.", ["model"], registry=self.registry, buckets=(1, 2))
        self.running = Gauge("dragoman_caller_requests_running", "In flight.", ["caller"], registry=self.registry)
        self.slots = Gauge("slots", "Rows.", registry=self.registry)
        Info("build", "What runs.", registry=self.registry).info({"version": "1"})
        self.slots.set(64)


def values(registry: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return every sample of the exposition, which Prometheus' own parser reads."""
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
        if not sample.name.endswith("_created")
    }


@pytest.fixture
def here() -> Counts:
    return Counts()


@pytest.fixture
def others() -> list[Counts]:
    return [Counts(), Counts()]


def summed(here: Counts, others: list[Counts]) -> SummedRegistry:
    return SummedRegistry(here.registry, lambda: [take_series(other.registry) for other in others])


def test_counters_and_histograms_are_sums(here: Counts, others: list[Counts]) -> None:
    here.answers.labels("a")
    here.seconds.labels("a")
    for number, other in enumerate(others, 1):
        other.answers.labels("a").inc(number)
        for seconds in (0.5, 1.5, 5.0)[:number]:
            other.seconds.labels("a").observe(seconds)
    told = values(summed(here, others))
    assert told["slots", ()] == 64 and told["build_info", (("version", "1"),)] == 1, "those of one process"
    a = ("model", "a")
    assert told["dragoman_request_success_total", (a,)] == 3
    assert told["seconds_count", (a,)] == 3 and told["seconds_sum", (a,)] == 0.5 + 0.5 + 1.5
    assert [told["seconds_bucket", (("le", bound), a)] for bound in ("1.0", "2.0", "+Inf")] == [2, 3, 3]


def test_counts_outlive_their_process_and_gauges_do_not(here: Counts, others: list[Counts]) -> None:
    for other in others:
        other.running.labels("web").set(2)
        other.failures.labels("a", "INTERNAL").inc()
    running = ("dragoman_caller_requests_running", (("caller", "web"),))
    assert values(summed(here, others))[running] == 4
    ended = add_up([{}, without_gauges(take_series(others.pop().registry))])
    left = values(SummedRegistry(here.registry, lambda: [ended, take_series(others[0].registry)]))
    assert left[running] == 2 and left["dragoman_requests_failed_total", (("code", "INTERNAL"), ("model", "a"))] == 2


def test_samples_can_be_selected_by_name(here: Counts, others: list[Counts]) -> None:
    others[0].answers.labels("a").inc()
    restricted = summed(here, others).restricted_registry(["dragoman_request_success_total", "slots"])
    assert values(restricted) == {("dragoman_request_success_total", (("model", "a"),)): 1, ("slots", ()): 64}


def test_the_servers_own_metrics_appear_once_each_where_nothing_is_added() -> None:
    registry = CollectorRegistry()
    Metrics(registry).add_model("a", "1", "fp32", "cpu", 64)
    assert generate_latest(SummedRegistry(registry, lambda: [])) == generate_latest(registry)
