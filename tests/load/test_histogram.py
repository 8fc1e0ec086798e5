"""Histograms against numpy on all samples."""

import numpy as np
import pytest

from dragoman.load.histogram import PERCENTS, Histogram, of


@pytest.mark.parametrize("name", ["lognormal", "uniform", "two peaks"])
def test_percentiles_are_those_of_all_samples(name: str) -> None:
    generator = np.random.default_rng(1)
    samples = {
        "lognormal": generator.lognormal(-4, 1.2, 20_001),
        "uniform": generator.uniform(0.001, 30, 20_001),
        "two peaks": np.concatenate([generator.normal(0.01, 0.001, 15_000), generator.normal(4, 0.1, 5_001)]).clip(1e-5),
    }[name]
    found = of(samples.tolist()).percentiles(PERCENTS)
    expected = np.percentile(samples, PERCENTS, method="inverted_cdf")
    assert found == pytest.approx(expected, rel=0.0026)


def test_few_samples_have_their_own_values() -> None:
    histogram = of([0.5, 0.1])
    assert histogram.percentile(50) == pytest.approx(0.1, rel=0.003)
    assert histogram.percentile(51) == 0.5
    assert histogram.percentile(99.9) == 0.5
    assert histogram.mean == pytest.approx(0.3)
    assert (histogram.smallest, histogram.largest) == (0.1, 0.5)


def test_nothing_has_no_percentile_and_no_mean() -> None:
    assert Histogram().percentiles((50, 99)) == [None, None]
    assert Histogram().mean is None
    assert Histogram().share_within(1.0) is None


def test_merging_is_counting_together() -> None:
    samples = np.random.default_rng(2).exponential(0.1, 1000).tolist()
    merged = of(samples[:300])
    merged.merge(of(samples[300:]))
    merged.merge(Histogram())
    whole = of(samples)
    assert merged.bins == whole.bins
    assert (merged.num, merged.smallest, merged.largest) == (whole.num, whole.smallest, whole.largest)
    assert merged.total == pytest.approx(whole.total)


def test_a_clock_that_went_back_counts_as_no_time() -> None:
    histogram = of([-0.5, 0.0])
    assert (histogram.num, histogram.total, histogram.percentile(99)) == (2, 0.0, 0.0)


def test_size_does_not_grow_with_the_number_of_samples() -> None:
    histogram = of(np.random.default_rng(3).lognormal(-3, 2, 100_000).tolist())
    assert len(histogram.bins) < 4000


def test_share_within_a_limit() -> None:
    assert of([0.1, 0.2, 0.3, 0.4]).share_within(0.25) == 0.5
