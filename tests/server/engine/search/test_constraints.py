"""Rules: what they rule out and push down, and how many candidates they may cost."""

import numpy as np
import pytest

from dragoman.server.engine.messages import SearchOptions
from dragoman.server.engine.search.constraints import NUM_SPARE, Constraints, Options
from dragoman.server.engine.search.hypothesis import Hypothesis
from dragoman.server.engine.search.target import TargetSide

EOS, VOCAB_SIZE = 1, 8
IDS = np.array([3, 1, 5, 4, 6])
LOG_PROBS = np.array([-1.0, -1.5, -2.0, -2.0, -3.0], np.float32)


def rules_of(options: SearchOptions, vocab_size: int, max_new_tokens: int = 99) -> Constraints:
    return Constraints(options, TargetSide(vocab_size, EOS, 2, 100), max_new_tokens)


def constraints(**options: object) -> Constraints:
    return rules_of(SearchOptions(**options), VOCAB_SIZE)


def grown(*tokens: int, num_forced: int = 0) -> Hypothesis:
    """Return a hypothesis of which the first tokens were forced."""
    return Hypothesis(list(tokens), [-1.0] * (len(tokens) - num_forced), -1.0)


def apply(rules: Constraints, hypothesis: Hypothesis) -> Options:
    return rules.apply(hypothesis, IDS, LOG_PROBS)


def test_no_rule_changes_nothing() -> None:
    options = apply(constraints(), grown(3, 4))
    assert options.ids.tolist() == IDS.tolist()
    assert options.values.tolist() == options.log_probs.tolist() == LOG_PROBS.tolist()


def test_suppressed_tokens_are_gone() -> None:
    assert apply(constraints(suppressed_tokens=[3, 4, 7]), grown()).ids.tolist() == [1, 5, 6]


def test_tokens_without_a_probability_are_gone() -> None:
    options = constraints().apply(grown(), IDS, np.array([-1, -2, -np.inf, -np.inf, -np.inf], np.float32))
    assert options.ids.tolist() == [3, 1]


def test_end_of_sequence_is_ruled_out_until_enough_is_generated() -> None:
    rules = constraints(min_new_tokens=2)
    assert EOS not in apply(rules, grown()).ids
    assert EOS not in apply(rules, grown(3)).ids
    assert EOS in apply(rules, grown(3, 4)).ids


def test_forced_tokens_do_not_count_as_generated() -> None:
    rules = constraints(min_new_tokens=2)
    assert EOS not in apply(rules, grown(3, 4, 5, num_forced=2)).ids
    assert EOS in apply(rules, grown(3, 4, 5, num_forced=1)).ids


@pytest.mark.parametrize(
    ("size", "tokens", "ruled_out"),
    [
        (1, [], set()),
        (1, [3], {3}),
        (1, [3, 5, 3], {3, 5}),
        (2, [3], set()),
        (2, [3, 3], {3}),
        (2, [3, 5, 3], {5}),
        (2, [3, 5, 3, 6, 3], {5, 6}),
        (2, [3, 5, 4], set()),
        (3, [3, 5, 3], set()),
        (3, [3, 5, 4, 3, 5], {4}),
        (3, [3, 3, 3], {3}),
        (4, [3, 5, 4], set()),
    ],
)
def test_a_token_that_would_repeat_an_ngram_is_ruled_out(size: int, tokens: list[int], ruled_out: set[int]) -> None:
    kept = apply(constraints(no_repeat_ngram_size=size), grown(*tokens)).ids.tolist()
    assert kept == [token for token in IDS.tolist() if token not in ruled_out]


def test_ngrams_of_the_forced_prefix_count() -> None:
    assert 5 not in apply(constraints(no_repeat_ngram_size=2), grown(3, 5, 3, num_forced=3)).ids


def test_the_penalty_multiplies_log_probabilities_of_tokens_that_are_there_once_each() -> None:
    options = apply(constraints(repetition_penalty=2.0), grown(3, 3, 6))
    assert options.ids.tolist() == [1, 3, 4, 5, 6]
    assert options.values.tolist() == [-1.5, -2.0, -2.0, -2.0, -6.0]
    assert options.log_probs.tolist() == [-1.5, -1.0, -2.0, -2.0, -3.0]


def test_a_penalty_below_one_lifts_tokens() -> None:
    options = apply(constraints(repetition_penalty=0.25), grown(6))
    assert options.ids.tolist() == [6, 3, 1, 4, 5]
    assert options.values.tolist()[0] == -0.75


def test_the_penalty_spares_end_of_sequence() -> None:
    """It is in no hypothesis that goes on."""
    assert apply(constraints(repetition_penalty=3.0), grown(3, 4, 5, 6)).ids.tolist()[0] == EOS


def test_no_rule_needs_no_more_than_what_is_wanted() -> None:
    assert constraints().num_needed(grown(3, 4), 3) == 3


def test_each_rule_needs_as_many_more_as_it_can_spoil() -> None:
    assert constraints(suppressed_tokens=[4, 5]).num_needed(grown(), 3) == 5
    assert constraints(suppressed_tokens=[4, 5, EOS], min_new_tokens=1).num_needed(grown(), 3) == 6
    assert constraints(min_new_tokens=1).num_needed(grown(), 3) == 4
    assert constraints(min_new_tokens=1).num_needed(grown(3), 3) == 3
    assert constraints(no_repeat_ngram_size=1).num_needed(grown(3, 5, 3), 3) == 5
    assert constraints(repetition_penalty=1.5).num_needed(grown(3, 5, 3), 3) == 5


def test_rules_that_could_spoil_many_ask_for_a_few_more_only() -> None:
    """What they spoil is hardly ever among the likeliest; where it is, the search sees more."""
    rules = SearchOptions(suppressed_tokens=list(range(300, 556)), repetition_penalty=0.5, no_repeat_ngram_size=1)
    assert rules_of(rules, 5000).num_needed(grown(*range(2, 100)), 1) == 2 + NUM_SPARE
    assert rules_of(rules, 5000).num_needed(grown(*range(2, 100)), 32) == 64 + NUM_SPARE


def test_never_more_is_needed_than_there_is() -> None:
    assert constraints(suppressed_tokens=[2, 3, 4]).num_needed(grown(), 6) == VOCAB_SIZE


@pytest.mark.parametrize("penalty", [0.5, 1.0, 1.3, 4.0])
@pytest.mark.parametrize("options", [{}, {"suppressed_tokens": [3, 5, 9]}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}])
def test_the_best_are_the_first_of_all(penalty: float, options: dict[str, object]) -> None:
    """With ties, with tokens that have no probability, and with fewer left than wanted."""
    random = np.random.default_rng(0)
    for case in range(100):
        size = int(random.integers(1, 30))
        logits = np.round(random.normal(0, 2, size) * 2) / 2
        logits[random.random(size) < 0.2 * (case % 3)] = -np.inf
        log_probs = (logits - np.log(np.exp(np.append(logits, 0)).sum())).astype(np.float32)
        ids = np.argsort(-log_probs, kind="stable")
        hypothesis = grown(*random.integers(2, 30, random.integers(0, 12)).tolist())
        rules = rules_of(SearchOptions(repetition_penalty=penalty, **options), 30)  # type: ignore[arg-type]
        everything = rules.apply(hypothesis, ids, log_probs[ids])
        expected = list(zip(everything.ids.tolist(), everything.log_probs.tolist(), everything.values.tolist(), strict=True))
        for num_wanted in (1, 2, 5, 40):
            assert rules.best(hypothesis, ids, log_probs[ids], num_wanted) == expected[:num_wanted]


@pytest.mark.parametrize("penalty", [0.1, 0.5, 0.9, 1.0, 1.1, 1.3, 4.0])
@pytest.mark.parametrize("options", [{}, {"suppressed_tokens": [3, 5, 9]}, {"no_repeat_ngram_size": 2}, {"min_new_tokens": 9}])
def test_the_best_of_a_part_are_certain_or_there_are_none(penalty: float, options: dict[str, object]) -> None:
    """With ties between what is seen and what is not, and tokens that a penalty lifts from where nothing is seen."""
    random, size = np.random.default_rng(1), 30
    num_certain = num_uncertain = 0
    for case in range(150):
        logits = np.round(random.normal(0, 2, size) * 2) / 2
        logits[random.random(size) < 0.2 * (case % 3)] = -np.inf
        log_probs = (logits - np.log(np.exp(logits).sum())).astype(np.float32)
        ids = np.argsort(-log_probs, kind="stable")
        hypothesis = grown(*random.integers(2, size, random.integers(0, 12)).tolist())
        rules = rules_of(SearchOptions(repetition_penalty=penalty, **options), size)  # type: ignore[arg-type]
        for num_seen in (1, 3, 8, 20, size):
            for num_wanted in range(1, min(num_seen, 6) + 1):
                seen = ids[:num_seen]
                found = rules.certain(hypothesis, seen, log_probs[seen], num_wanted)
                expected = rules.best(hypothesis, ids, log_probs[ids], num_wanted)
                assert found in (expected, None)
                assert found is not None or num_seen < size, "everything is enough"
                num_certain += found is not None
                num_uncertain += found is None
    assert num_certain > 500
    assert bool(num_uncertain) == (penalty != 1 or bool(options)), "without rules what was asked for is enough"


def test_what_a_penalty_cannot_have_lifted_so_far_need_not_be_seen() -> None:
    """A token of the answer that is not seen would be worth 0.9 times the least that is, at the most."""
    rules, hypothesis = rules_of(SearchOptions(repetition_penalty=0.9), 5000), grown(77, 78)
    log_probs = np.array([-0.5, -3.0, -8.0], np.float32)
    assert rules.certain(hypothesis, np.array([3, 4, 5]), log_probs, 2) == [(3, -0.5, -0.5), (4, -3.0, -3.0)]
    assert rules.certain(hypothesis, np.array([3, 4, 5]), log_probs, 3) is None
    assert rules.certain(hypothesis, np.array([77, 4, 78]), log_probs, 3) is not None, "they are all seen"


def test_many_options_are_put_in_order_as_sorting_would() -> None:
    random, size = np.random.default_rng(2), 2000
    for penalty in (0.3, 0.9, 1.2, 5.0):
        log_probs = np.sort(np.round(random.normal(-8, 2, size)).astype(np.float32))[::-1]
        ids = np.concatenate([np.sort(part) for part in np.split(random.permutation(size), np.flatnonzero(np.diff(log_probs)) + 1)])
        tokens = random.choice(size, 200, replace=False).tolist()
        options = rules_of(SearchOptions(repetition_penalty=penalty), size).apply(grown(*tokens), ids, log_probs)
        values = np.where(np.isin(ids, tokens), log_probs.astype(np.float64) * penalty, log_probs)
        order = np.lexsort((ids, -values))
        assert options.ids.tolist() == ids[order].tolist()
        assert options.values.tolist() == values[order].tolist()


def test_an_end_is_forced_where_the_last_token_is_due() -> None:
    rules = rules_of(SearchOptions(is_end_forced=True), 5000, max_new_tokens=3)
    assert [rules.forces_end(grown(*tokens)) for tokens in ([], [3], [3, 4])] == [False, False, True]
    assert rules.forces_end(grown(7, 7, 3, 4, num_forced=2)) and not rules.forces_end(grown(7, 7, 3, num_forced=2))
    assert not any(rules_of(SearchOptions(), 5000, max_new_tokens=n).forces_end(grown(3, 4)) for n in (2, 3, 4))


def test_a_forced_end_costs_nothing_and_tells_the_models_log_probability() -> None:
    rules = rules_of(SearchOptions(is_end_forced=True, suppressed_tokens=[EOS], min_new_tokens=2), 5000, max_new_tokens=3)
    assert rules.end(IDS, LOG_PROBS) == (EOS, -1.5, 0.0)
    assert rules.end(IDS[2:], LOG_PROBS[2:]) is None, "it is further down"
    assert rules.num_needed(grown(3, 4), 8) == 1 + NUM_SPARE, "only the end has to be found"
