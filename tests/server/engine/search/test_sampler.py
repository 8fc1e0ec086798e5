"""Draws: exactly those from the whole vocabulary, from the right distribution, and decided by seed, index and place alone."""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dragoman.server.engine.messages import Sampling, SearchOptions
from dragoman.server.engine.search.constraints import Constraints, Options
from dragoman.server.engine.search.hypothesis import Hypothesis
from dragoman.server.engine.search.sampler import Sampler
from dragoman.server.engine.search.target import TargetSide

TEMPERATURES = [0.1, 0.3, 0.7, 1.0, 1.2, 2.0, 5.0]
Values = NDArray[np.float64]


def log_probs_of(rng: np.random.Generator, vocab_size: int, scale: float) -> Values:
    """Return random log-probabilities as a float32 model gives them, likeliest first."""
    logits = rng.normal(0, scale, vocab_size)
    log_probs = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
    return np.sort(log_probs.astype(np.float32))[::-1].astype(np.float64)


def options_of(log_probs: Values, values: Values | None = None) -> Options:
    is_untouched = values is None
    return Options(np.arange(len(log_probs)), log_probs, log_probs if values is None else values, is_untouched)


def draw_of_all(sampler: Sampler, options: Options) -> int:
    place = sampler.draw(options, float(options.log_probs.min()), 0.0, 0)
    assert place is not None
    return place


def draw_of_first(sampler: Sampler, log_probs: Values, count: int) -> int | None:
    seen = log_probs[:count]
    options = Options(np.arange(count), seen, seen, is_untouched=True)
    return sampler.draw(options, float(seen[-1]), 1 - float(np.exp(seen).sum()), len(log_probs) - count)


def penalised(log_probs: Values, count: int, lowered: NDArray[np.int64], factor: float) -> Options:
    """Return the first options after a penalty on some tokens, which are named by their places, best first."""
    ids = np.arange(count)
    values = np.where(np.isin(ids, lowered), log_probs[:count] * factor, log_probs[:count])
    order = np.lexsort((ids, -values))
    return Options(ids[order], log_probs[:count][order], values[order])


def kept_by_transformers(log_probs: Values, sampling: Sampling) -> list[float]:
    """Return the probabilities that Transformers draws with, 0 for what it leaves out."""
    scores = torch.tensor(log_probs[None])
    scores = TemperatureLogitsWarper(sampling.temperature)(None, scores)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)[0].tolist()


class Fixed(Sampler):
    """A sampler whose random number is given."""

    def __init__(self, sampling: Sampling, number: float) -> None:
        super().__init__(sampling, 0)
        self._number = number


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0, 8.0])
def test_a_draw_decided_from_a_part_is_the_draw_from_everything(temperature: float, scale: float) -> None:
    rng = np.random.default_rng(int(100 * temperature + scale))
    num_decided = 0
    for case in range(200):
        vocab_size = int(rng.integers(5, 600))
        count = int(rng.integers(1, vocab_size))
        sampling = Sampling(case, temperature, int(rng.choice([0, 0, 2, 50])), float(rng.choice([1.0, 0.95, 0.6, 0.1])))
        log_probs = log_probs_of(rng, vocab_size, scale)
        place = draw_of_first(Sampler(sampling, case), log_probs, count)
        if place is not None:
            num_decided += 1
            assert place == draw_of_all(Sampler(sampling, case), options_of(log_probs))
    assert num_decided > 40, "hardly anything was compared"


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
def test_a_token_pushed_down_among_unseen_ones_does_not_change_a_draw(temperature: float, scale: float) -> None:
    """With a penalty the order of what is seen need not be its order among everything."""
    rng = np.random.default_rng(int(100 * temperature + scale))
    num_decided = 0
    for case in range(400):
        vocab_size = int(rng.integers(8, 40))
        count = int(rng.integers(3, vocab_size))
        log_probs = log_probs_of(rng, vocab_size, scale)
        lowered = rng.choice(count, int(rng.integers(1, count - 1)), replace=False)
        factor = float(rng.choice([1.1, 1.5, 4.0]))
        sampling = Sampling(case, temperature, 0, float(rng.choice([1.0, 0.95, 0.6])))
        seen, everything = (penalised(log_probs, size, lowered, factor) for size in (count, vocab_size))
        unseen = 1 - float(np.exp(log_probs[:count]).sum())
        place = Sampler(sampling, 0).draw(seen, float(log_probs[count - 1]), unseen, vocab_size - count)
        if place is not None:
            num_decided += 1
            assert seen.ids[place] == everything.ids[draw_of_all(Sampler(sampling, 0), everything)]
    assert num_decided > 5, "hardly anything was compared"


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.0, 100.0])
@pytest.mark.parametrize("scale", [0.5, 3.0, 8.0])
def test_a_token_lifted_from_among_unseen_ones_does_not_change_a_draw(temperature: float, scale: float) -> None:
    """With a penalty below 1 what is not seen may come before what is."""
    rng = np.random.default_rng(int(100 * temperature + scale))
    num_decided = num_lifted = 0
    for case in range(400):
        vocab_size = int(rng.integers(8, 40))
        count = int(rng.integers(3, vocab_size))
        log_probs = log_probs_of(rng, vocab_size, scale)
        tokens = rng.choice(vocab_size, int(rng.integers(1, 5)), replace=False)
        top_k, top_p = int(rng.choice([0, 0, 2, 6])), float(rng.choice([1.0, 0.95, 0.3]))
        sampling = Sampling(case, temperature, top_k, top_p)
        rules = Constraints(
            SearchOptions(repetition_penalty=float(rng.choice([0.3, 0.8, 0.95]))), TargetSide(vocab_size, 0, 1, 99), 99
        )
        hypothesis = Hypothesis(tokens.tolist(), [-1.0] * len(tokens))
        seen, everything = (rules.apply(hypothesis, np.arange(n), log_probs[:n].astype(np.float32)) for n in (count, vocab_size))
        unseen = 1 - float(np.exp(log_probs[:count]).sum())
        place = Sampler(sampling, 0).draw(seen, float(log_probs[count - 1]), unseen, vocab_size - count)
        if place is not None:
            num_decided += 1
            num_lifted += seen.num_lifted
            assert seen.ids[place] == everything.ids[draw_of_all(Sampler(sampling, 0), everything)]
    assert num_decided > 30 and num_lifted, "hardly anything was compared"


def test_a_draw_that_is_far_down_says_so() -> None:
    """Then the search asks for everything at once, not for a little more in vain."""
    log_probs = log_probs_of(np.random.default_rng(7), 30_000, 3.0)
    undecided = {100.0: 0, 1.0: 0}
    far = dict(undecided)
    for temperature in undecided:
        for seed in range(300):
            sampler = Sampler(Sampling(seed, temperature), 0)
            if draw_of_first(sampler, log_probs, 64) is None:
                undecided[temperature] += 1
                far[temperature] += sampler.is_far
    assert far[100.0] > 0.9 * undecided[100.0] > 200
    assert far[1.0] == 0 < undecided[1.0]


def test_a_draw_close_to_a_token_that_a_penalty_put_last_waits_for_what_may_come_before_it() -> None:
    log_probs = np.log(np.full(10, 0.1))
    seen, everything = (penalised(log_probs, size, np.array([4]), 1.02) for size in (9, 10))
    sampling = Sampling(0)
    for number in np.linspace(0, 1, 2000, endpoint=False).tolist():
        place = Fixed(sampling, number).draw(seen, float(log_probs[8]), 0.1, 1)
        if place is not None:
            assert seen.ids[place] == everything.ids[draw_of_all(Fixed(sampling, number), everything)]


def test_most_draws_are_decided_by_the_likeliest_tokens() -> None:
    rng = np.random.default_rng(3)
    places = [draw_of_first(Sampler(Sampling(seed), 0), log_probs_of(rng, 5000, 3.5), 64) for seed in range(200)]
    assert sum(place is not None for place in places) > 60


def test_what_rounding_leaves_of_a_probability_of_1_is_not_the_least_likely_tokens() -> None:
    """Of 250,000 float32 probabilities as much as 1e-5 may be missing, a thousand times what the last of them is."""
    log_probs = np.log(np.array([0.6, 0.4 - 1e-5 - 1e-9, 1e-9]))
    sampler = Fixed(Sampling(1), 1 - 1e-6)
    assert draw_of_first(sampler, log_probs, 2) is None
    assert draw_of_all(sampler, options_of(log_probs)) == 0


def test_tokens_that_are_impossible_decide_nothing() -> None:
    log_probs = np.concatenate([np.log(np.full(4, 0.25)), np.full(6, -np.inf)])
    for temperature in (0.5, 1.0, 2.0):
        for seed in range(50):
            sampling = Sampling(seed, temperature)
            seen = options_of(log_probs[:4])
            place = Sampler(sampling, 0).draw(seen, -math.inf, 0.0, 4)
            assert place == draw_of_all(Sampler(sampling, 0), options_of(log_probs[:4]))


@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 0.1, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 3, 40, 1000])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 5.0])
def test_the_distribution_is_transformers(temperature: float, top_k: int, top_p: float) -> None:
    """Every number in [0, 1) draws what the cumulative probabilities of Transformers' warpers say."""
    sampling = Sampling(0, temperature, top_k, top_p)
    for scale in (0.3, 1.0, 4.0):
        log_probs = log_probs_of(np.random.default_rng(int(10 * scale)), 120, scale)
        probabilities = np.array(kept_by_transformers(log_probs, sampling))
        numbers = np.linspace(0, 1, 400, endpoint=False) + 1e-4
        expected = np.searchsorted(np.cumsum(probabilities), numbers, side="right")
        is_close = np.abs(np.cumsum(probabilities)[:, None] - numbers).min(0) < 1e-9  # rounding decides those
        drawn = np.array([draw_of_all(Fixed(sampling, number), options_of(log_probs)) for number in numbers.tolist()])
        assert ((drawn == expected) | is_close).all()
        assert is_close.sum() < 4


@pytest.mark.parametrize(
    "sampling", [Sampling(11), Sampling(12, 0.5), Sampling(13, 2.0), Sampling(14, 1.0, 5), Sampling(15, 1.0, 0, 0.8)]
)
def test_draws_are_as_frequent_as_they_are_likely(sampling: Sampling) -> None:
    num_draws = 10_000
    log_probs = log_probs_of(np.random.default_rng(1), 30, 1.0)
    expected = np.array(kept_by_transformers(log_probs, sampling)) * num_draws
    sampler, counts = Sampler(sampling, 0), np.zeros(30)
    for _ in range(num_draws):
        counts[draw_of_all(sampler, options_of(log_probs))] += 1
        sampler.accept()
    is_possible = expected > 0
    assert not counts[~is_possible].any()
    chi_square = ((counts - expected)[is_possible] ** 2 / expected[is_possible]).sum()
    degrees = is_possible.sum() - 1
    assert chi_square < degrees + 4 * math.sqrt(2 * degrees)


def test_a_draw_depends_on_seed_index_and_number_of_draws_alone() -> None:
    rng = np.random.default_rng(2)
    tables = [options_of(log_probs_of(rng, 50, 1.0)) for _ in range(20)]

    def draws(seed: int, index: int, others: int) -> list[int]:
        sampler, busy = Sampler(Sampling(seed), index), [Sampler(Sampling(seed), index + 1 + i) for i in range(others)]
        places = []
        for table in tables:
            for other in busy:
                draw_of_all(other, table)
                other.accept()
            places.append(draw_of_all(sampler, table))
            sampler.accept()
        return places

    assert draws(5, 1, 0) == draws(5, 1, 3)
    assert len({tuple(draws(seed, index, 0)) for seed in (0, 5, 2**64 - 1) for index in (0, 1, 2)}) == 9


def test_an_undecided_draw_does_not_use_up_a_random_number() -> None:
    log_probs = log_probs_of(np.random.default_rng(4), 300, 0.1)
    for seed in range(50):
        patient, other = Sampler(Sampling(seed), 0), Sampler(Sampling(seed), 0)
        for _ in range(5):
            draw_of_first(patient, log_probs, 1)
            assert draw_of_all(patient, options_of(log_probs)) == draw_of_all(other, options_of(log_probs))
            patient.accept()
            other.accept()


@pytest.mark.parametrize(("temperature", "least"), [(0.7, 10), (1.0, 40), (1.3, 3)])
def test_the_end_of_a_nucleus_need_not_be_seen(temperature: float, least: int) -> None:
    """How much it weighs is known well enough for many of the draws that lie in what is seen."""
    rng = np.random.default_rng(5)
    num_decided = 0
    for seed in range(200):
        log_probs = log_probs_of(rng, 2000, 1.5)
        weights = np.exp(log_probs / temperature)
        assert weights[:64].sum() < 0.9 * weights.sum(), "the nucleus ends beyond what is seen"
        place = draw_of_first(Sampler(Sampling(seed, temperature, 0, 0.9), 0), log_probs, 64)
        if place is not None:
            num_decided += 1
            assert place == draw_of_all(Sampler(Sampling(seed, temperature, 0, 0.9), 0), options_of(log_probs))
    assert num_decided >= least


def test_a_nucleus_of_nearly_everything_is_the_same_from_a_part() -> None:
    """Rounding may leave the sum of all probabilities short of `top_p`."""
    for scale in (0.0, 2.0, 6.0):
        log_probs = (log_probs_of(np.random.default_rng(6), 300, scale) - 3e-6).astype(np.float32).astype(np.float64)
        for top_p in (1 - 1e-6, 1 - 1e-9):
            for number in np.linspace(0, 1, 500, endpoint=False).tolist():
                place = draw_of_first(Fixed(Sampling(0, 1.0, 0, top_p), number), log_probs, 100)
                if place is not None:
                    assert place == draw_of_all(Fixed(Sampling(0, 1.0, 0, top_p), number), options_of(log_probs))
