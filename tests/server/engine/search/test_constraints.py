"""Rules on candidates: how many they may cost, and when the best of those that are seen are the best of all.

That the rules rule out and push down the right tokens is compared with the reference in `test_exactness`.
"""

import numpy as np
import pytest

from dragoman.server.engine.messages import SearchOptions
from dragoman.server.engine.search.constraints import MAX_LISTED, MAX_SORTED, NUM_SPARE, Constraints
from dragoman.server.engine.search.hypothesis import Hypothesis, TargetSide

EOS, VOCAB_SIZE = 1, 8


def rules_of(vocab_size: int = VOCAB_SIZE, max_new_tokens: int = 99, **options: object) -> Constraints:
    return Constraints(SearchOptions(**options), TargetSide(vocab_size, EOS, 2, 100), max_new_tokens)  # type: ignore[arg-type]


def grown(*tokens: int, num_forced: int = 0) -> Hypothesis:
    return Hypothesis(list(tokens), [-1.0] * (len(tokens) - num_forced), -1.0)


MANY = {"suppressed_tokens": list(range(300, 556)), "repetition_penalty": 0.5, "no_repeat_ngram_size": 1}


@pytest.mark.parametrize(
    ("options", "tokens", "num_wanted", "num_needed"),
    [
        ({}, (3, 4), 3, 3),
        ({"suppressed_tokens": [4, 5]}, (), 3, 5),  # each rule needs as many more as it can spoil
        ({"suppressed_tokens": [4, 5, EOS], "min_new_tokens": 1}, (), 3, 6),
        ({"min_new_tokens": 1}, (), 3, 4),
        ({"min_new_tokens": 1}, (3,), 3, 3),
        ({"no_repeat_ngram_size": 1}, (3, 5, 3), 3, 5),
        ({"repetition_penalty": 1.5}, (3, 5, 3), 3, 5),
        ({"suppressed_tokens": [2, 3, 4]}, (), 6, VOCAB_SIZE),  # never more than there is
        ({}, (), 9, VOCAB_SIZE),
        ({"vocab_size": 5000} | MANY, range(2, 100), 1, 2 + NUM_SPARE),  # what many rules spoil is hardly ever among the likeliest
        ({"vocab_size": 5000} | MANY, range(2, 100), 32, 64 + NUM_SPARE),
        ({"vocab_size": 5000, "repetition_penalty": 2}, range(2, 3 + NUM_SPARE), 1, 2 + NUM_SPARE),
        ({"vocab_size": 5000, "repetition_penalty": 2}, range(2, 4 + NUM_SPARE), 1, 2 + NUM_SPARE),
        ({"vocab_size": 5000, "repetition_penalty": 2}, [7] * (1 + NUM_SPARE), 1, 2),
        ({"vocab_size": 5000, "is_end_forced": True, "max_new_tokens": 3}, (3, 4), 8, 1 + NUM_SPARE),  # the end has to be found
        ({"is_end_forced": True, "max_new_tokens": 3}, (3,), 2, 2),
    ],
)
def test_the_number_of_candidates_needed(options: dict[str, object], tokens: list[int], num_wanted: int, num_needed: int) -> None:
    assert rules_of(**options).num_needed(grown(*tokens), num_wanted) == num_needed  # type: ignore[arg-type]


def test_what_a_penalty_cannot_have_lifted_so_far_need_not_be_seen() -> None:
    """A token of the answer that is not seen would be worth 0.9 times the least that is, at the most."""
    rules, hypothesis = rules_of(5000, repetition_penalty=0.9), grown(77, 78)
    log_probs = np.array([-0.5, -3.0, -8.0], np.float32)
    assert rules.certain(hypothesis, np.array([3, 4, 5]), log_probs, 2) == [(3, -0.5, -0.5), (4, -3.0, -3.0)]
    assert rules.certain(hypothesis, np.array([3, 4, 5]), log_probs, 3) is None
    assert rules.certain(hypothesis, np.array([77, 4, 78]), log_probs, 3) is not None, "they are all seen"


@pytest.mark.parametrize("penalty", [0.3, 0.9, 1.2, 5.0])
@pytest.mark.parametrize("size", [MAX_SORTED, 2 * MAX_LISTED])
def test_many_options_are_put_in_order_as_sorting_would(size: int, penalty: float) -> None:
    random = np.random.default_rng(2)
    log_probs = np.sort(np.round(random.normal(-8, 2, size)).astype(np.float32))[::-1]
    ids = np.concatenate([np.sort(part) for part in np.split(random.permutation(size), np.flatnonzero(np.diff(log_probs)) + 1)])
    hypothesis = grown(*random.choice(size, 200, replace=False).tolist())
    rules = rules_of(size, repetition_penalty=penalty)
    options = rules.apply(hypothesis, ids, log_probs)
    values = np.where(np.isin(ids, hypothesis.token_ids), log_probs.astype(np.float64) * penalty, log_probs)
    order = np.lexsort((ids, -values))
    assert options.ids.tolist() == ids[order].tolist()
    assert options.values.tolist() == values[order].tolist()
    best = rules.best(hypothesis, ids, log_probs, 5)
    assert [(token, value) for token, _, value in best] == list(zip(ids[order].tolist(), values[order].tolist(), strict=True))[:5]


def test_an_end_is_forced_where_the_last_token_is_due_and_costs_nothing() -> None:
    rules = rules_of(5000, 3, is_end_forced=True, suppressed_tokens=[EOS], min_new_tokens=2)
    assert [rules.forces_end(grown(*tokens)) for tokens in ([], [3], [3, 4])] == [False, False, True]
    assert rules.forces_end(grown(7, 7, 3, 4, num_forced=2)) and not rules.forces_end(grown(7, 7, 3, num_forced=2))
    assert not any(rules_of(5000, n).forces_end(grown(3, 4)) for n in (2, 3, 4))
    ids, log_probs = np.array([3, EOS, 5]), np.array([-1.0, -1.5, -2.0], np.float32)
    assert rules.end(ids, log_probs) == (EOS, -1.5, 0.0), "the model's log-probability is told"
    assert rules.end(ids[2:], log_probs[2:]) is None, "it is further down"
