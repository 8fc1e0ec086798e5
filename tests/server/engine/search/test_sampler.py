"""Draws: exactly those from the whole vocabulary, from Transformers' distribution.

That a draw depends on the seed, the answer's index and its place alone is compared with the reference in `test_exactness`.
"""

import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from dragoman.server.engine.messages import Sampling, SearchOptions
from dragoman.server.engine.search.constraints import Constraints, Options
from dragoman.server.engine.search.hypothesis import Hypothesis, TargetSide
from dragoman.server.engine.search.sampler import Sampler

TEMPERATURES = [0.1, 0.7, 1.0, 1.2, 5.0]
Values = NDArray[np.float64]


def log_probs_of(rng: np.random.Generator, vocab_size: int, scale: float) -> Values:
    """Return random log-probabilities as a float32 model gives them, likeliest first."""
    logits = rng.normal(0, scale, vocab_size)
    log_probs = logits - logits.max() - math.log(np.exp(logits - logits.max()).sum())
    return np.sort(log_probs.astype(np.float32))[::-1].astype(np.float64)


def options_of(log_probs: Values) -> Options:
    return Options(np.arange(len(log_probs)), log_probs, log_probs, is_untouched=True)


def penalised(log_probs: Values, count: int, tokens: NDArray[np.int64], factor: float) -> Options:
    """Return the first options after a penalty on some tokens, which are named by their places."""
    rules = Constraints(SearchOptions(repetition_penalty=factor), TargetSide(len(log_probs), 0, 1, 99), 99)
    hypothesis = Hypothesis(tokens.tolist(), [-1.0] * len(tokens))
    return rules.apply(hypothesis, np.arange(count), log_probs[:count].astype(np.float32))


class Fixed(Sampler):
    """A sampler whose random number is given."""

    def __init__(self, sampling: Sampling, number: float) -> None:
        super().__init__(sampling, 0)
        self._number = number


def draw_of_all(sampler: Sampler, options: Options) -> int:
    place = sampler.draw(options, float(options.log_probs.min()), 0.0, 0)
    assert place is not None
    return int(options.ids[place])


def draw_of_first(sampler: Sampler, log_probs: Values, count: int, options: Options | None = None) -> int | None:
    """Return the token that is drawn where only the first are seen; None where they do not decide."""
    seen = log_probs[:count]
    options = options or options_of(seen)
    place = sampler.draw(options, float(seen[-1]), 1 - float(np.exp(seen).sum()), len(log_probs) - count)
    return None if place is None else int(options.ids[place])


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("scale", [0.0, 0.01, 1.0, 3.0, 8.0])
def test_a_draw_decided_from_a_part_is_the_draw_from_everything(temperature: float, scale: float) -> None:
    rng = np.random.default_rng(int(100 * temperature + scale))
    num_decided = 0
    for case in range(120):
        vocab_size = int(rng.integers(5, 600))
        count = int(rng.integers(1, vocab_size))
        sampling = Sampling(case, temperature, int(rng.choice([0, 0, 2, 50])), float(rng.choice([1.0, 0.95, 0.6, 0.1])))
        log_probs = log_probs_of(rng, vocab_size, scale)
        drawn = draw_of_first(Sampler(sampling, case), log_probs, count)
        if drawn is not None:
            num_decided += 1
            assert drawn == draw_of_all(Sampler(sampling, case), options_of(log_probs))
    assert num_decided > 20, "hardly anything was compared"


@pytest.mark.parametrize(("temperature", "scale"), [(0.1, 0.5), (0.3, 3.0), (1.0, 8.0), (2.0, 3.0), (100.0, 8.0)])
@pytest.mark.parametrize("factors", [(1.1, 1.5, 4.0), (0.3, 0.8, 0.95)], ids=["lowered", "lifted"])
def test_a_penalty_on_tokens_that_are_not_seen_does_not_change_a_draw(
    temperature: float, scale: float, factors: tuple[float, ...]
) -> None:
    """With a penalty the order of what is seen need not be its order among everything."""
    rng = np.random.default_rng(int(100 * temperature + scale))
    num_decided = num_lifted = 0
    for case in range(300):
        vocab_size = int(rng.integers(8, 40))
        count = int(rng.integers(3, vocab_size))
        log_probs = log_probs_of(rng, vocab_size, scale)
        tokens = rng.choice(vocab_size if factors[0] < 1 else count, int(rng.integers(1, min(count, 5))), replace=False)
        top_k, top_p, factor = int(rng.choice([0, 0, 2, 6])), float(rng.choice([1.0, 0.95, 0.3])), float(rng.choice(factors))
        sampling = Sampling(case, temperature, top_k, top_p)
        seen, everything = (penalised(log_probs, size, tokens, factor) for size in (count, vocab_size))
        drawn = draw_of_first(Sampler(sampling, 0), log_probs, count, seen)
        if drawn is not None:
            num_decided += 1
            num_lifted += seen.num_lifted
            assert drawn == draw_of_all(Sampler(sampling, 0), everything)
    assert num_decided > 20 and bool(num_lifted) == (factors[0] < 1), "hardly anything was compared"


def test_a_draw_that_is_far_down_is_known_to_be() -> None:
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
    for number in np.linspace(0, 1, 2000, endpoint=False).tolist():
        drawn = draw_of_first(Fixed(Sampling(0), number), log_probs, 9, seen)
        assert drawn in (draw_of_all(Fixed(Sampling(0), number), everything), None)


def test_what_rounding_leaves_of_a_probability_of_1_is_not_the_least_likely_tokens() -> None:
    """Of 250,000 float32 probabilities as much as 1e-5 may be missing, a thousand times what the last of them is."""
    log_probs = np.log(np.array([0.6, 0.4 - 1e-5 - 1e-9, 1e-9]))
    sampler = Fixed(Sampling(1), 1 - 1e-6)
    assert draw_of_first(sampler, log_probs, 2) is None
    assert draw_of_all(sampler, options_of(log_probs)) == 0


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_tokens_that_are_impossible_decide_nothing(temperature: float) -> None:
    log_probs = np.log(np.full(4, 0.25))
    for seed in range(50):
        sampling = Sampling(seed, temperature)
        place = Sampler(sampling, 0).draw(options_of(log_probs), -math.inf, 0.0, 4)
        assert place == draw_of_all(Sampler(sampling, 0), options_of(np.concatenate([log_probs, np.full(6, -np.inf)])))


def kept_by_transformers(log_probs: Values, sampling: Sampling) -> list[float]:
    """Return the probabilities that Transformers draws with, 0 for what it leaves out."""
    scores = TemperatureLogitsWarper(sampling.temperature)(None, torch.tensor(log_probs[None]))
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    return scores.softmax(-1)[0].tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.999, 0.9, 0.5, 1e-6])
@pytest.mark.parametrize("top_k", [0, 1, 3, 40, 1000])
@pytest.mark.parametrize("temperature", [0.1, 1.0, 5.0])
def test_the_distribution_is_transformers(temperature: float, top_k: int, top_p: float) -> None:
    """Every number in [0, 1) draws what the cumulative probabilities of Transformers' warpers say."""
    sampling = Sampling(0, temperature, top_k, top_p)
    for scale in (0.3, 1.0, 4.0):
        log_probs = log_probs_of(np.random.default_rng(int(10 * scale)), 120, scale)
        cumulative = np.cumsum(kept_by_transformers(log_probs, sampling))
        numbers = np.linspace(0, 1, 200, endpoint=False) + 1e-4
        expected = np.searchsorted(cumulative, numbers, side="right")
        is_close = np.abs(cumulative[:, None] - numbers).min(0) < 1e-9  # rounding decides those
        drawn = np.array([draw_of_all(Fixed(sampling, number), options_of(log_probs)) for number in numbers.tolist()])
        assert ((drawn == expected) | is_close).all()
        assert is_close.sum() < 4


@pytest.mark.parametrize(("temperature", "top_p", "least"), [(1.0, 1.0, 60), (0.7, 0.9, 10), (1.0, 0.9, 40), (1.3, 0.9, 3)])
def test_many_draws_are_decided_though_the_end_of_the_nucleus_is_not_seen(temperature: float, top_p: float, least: int) -> None:
    rng = np.random.default_rng(5)
    num_decided = 0
    for seed in range(200):
        log_probs = log_probs_of(rng, 2000, 1.5 if top_p < 1 else 3.5)
        sampling = Sampling(seed, temperature, 0, top_p)
        weights = np.exp(log_probs / temperature)
        assert top_p == 1 or weights[:64].sum() < 0.9 * weights.sum()
        drawn = draw_of_first(Sampler(sampling, 0), log_probs, 64)
        if drawn is not None:
            num_decided += 1
            assert drawn == draw_of_all(Sampler(sampling, 0), options_of(log_probs))
    assert num_decided >= least
