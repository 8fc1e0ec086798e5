import prometheus_client
import pytest
from prometheus_client import CollectorRegistry, disable_created_metrics, generate_latest

from dragoman.server.telemetry.histogram import Histogram

BOUNDS = (0.005, 0.25, 1, 2.5, 10)
VALUES = (0.0, 0.005, 0.0051, 0.25, 0.9, 1, 3, 10, 10.5, 1e6, -1.0)


def test_it_is_exposed_as_prometheus_own_is() -> None:
    """The names, bounds and counts are those of the library's histogram, for values on bounds, between and beyond them."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    own = Histogram("x_seconds", "What it says.", BOUNDS, ours)
    other = prometheus_client.Histogram("x_seconds", "What it says.", ["model"], buckets=BOUNDS, registry=theirs)
    for model in ("a", 'with "quotes"'):
        own.labels(model), other.labels(model)
        for value in VALUES:
            own.labels(model).observe(value)
            other.labels(model).observe(value)
    assert generate_latest(ours) == generate_latest(theirs)


def test_a_model_that_is_removed_has_no_series_and_starts_at_zero_again() -> None:
    registry = CollectorRegistry()
    histogram = Histogram("x_seconds", "What it says.", BOUNDS, registry)
    histogram.labels("a").observe(1)
    histogram.remove("a")
    histogram.remove("never there")
    assert registry.get_sample_value("x_seconds_count", {"model": "a"}) is None
    histogram.labels("a")
    assert registry.get_sample_value("x_seconds_count", {"model": "a"}) == 0


def test_a_name_cannot_be_declared_twice() -> None:
    registry = CollectorRegistry()
    Histogram("x_seconds", "What it says.", BOUNDS, registry)
    with pytest.raises(ValueError, match="Duplicated"):
        Histogram("x_seconds", "What it says.", BOUNDS, registry)
