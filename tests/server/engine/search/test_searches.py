"""Searches on small tables, compared with results worked out by hand or by exhaustive search; and the choice of a search."""

import math
from itertools import product
from typing import Any

import numpy as np
import pytest

from dragoman.server.engine.messages import GREEDY, Request, Sampling, SearchOptions
from dragoman.server.engine.search.beam import BeamSearch
from dragoman.server.engine.search.choice import search_for
from dragoman.server.engine.search.hypothesis import BLOCK, Hypothesis, num_common_tokens
from dragoman.server.engine.search.separate import SeparateSearch
from tests.server.engine.bench import EOS, START
from tests.server.engine.search.tables import TableModel, make_table

A, B, C = 3, 4, 5


def beams(max_new_tokens: int, num_beams: int = 2, **options: Any) -> Request:
    return request(max_new_tokens, num_beams=num_beams, **{"num_answers": num_beams, **options})


def request(max_new_tokens: int, **options: Any) -> Request:
    return Request(0, [7, EOS], max_new_tokens, 0.0, search=SearchOptions(**options))


def table(rows: dict[int, dict[int, float]]) -> TableModel:
    """Return a model of six tokens with given probabilities."""
    probabilities = np.full((6, 6), 1e-9)
    for row, columns in rows.items():
        probabilities[row, list(columns)] = list(columns.values())
    return TableModel(np.log(probabilities).astype(np.float32))


def test_a_worse_beginning_can_win() -> None:
    chain = table(
        {START: {A: 0.6, B: 0.4}, A: {EOS: 0.25, A: 0.25, B: 0.25, C: 0.25}, B: {EOS: 0.9, C: 0.1}, C: {EOS: 0.5, A: 0.5}}
    )
    first, second = chain.drive(BeamSearch, beams(5)).answers
    assert first.token_ids == [B] and first.score == pytest.approx(math.log(0.4 * 0.9) / 2)
    assert first.log_probs == pytest.approx([math.log(0.4), math.log(0.9)])
    assert second.score <= first.score


@pytest.mark.parametrize(("num_forced", "length_penalty"), [(0, 0.0), (0, 1.0), (2, 1.0)])
def test_with_every_prefix_kept_the_best_answers_of_all_are_found(num_forced: int, length_penalty: float) -> None:
    """Every way an answer can go is tried; forced tokens count in the length that ranks."""
    for seed in range(12):
        model = make_table(seed, 5, 1.5, None, 1.0)
        options = {"forced_prefix": [A, B], "num_forced": num_forced, "length_penalty": length_penalty, "num_answers": 10}
        answers = model.drive(BeamSearch, beams(4, 64, **options)).answers
        every = [[*ids, EOS] for length in range(4) for ids in product(range(START, 5), repeat=length)]
        every += [list(ids) for ids in product(range(START, 5), repeat=4)]

        def score(ids: list[int], model: TableModel = model) -> float:
            total = sum(float(model.row([A, B, *ids[:i]])[token]) for i, token in enumerate(ids))
            return total / (len(ids) + num_forced) ** length_penalty

        best = pytest.approx(sorted(map(score, every), reverse=True)[:10])
        assert [answer.score for answer in answers] == best
        assert [score(answer.token_ids[2:] + [EOS] * (answer.reason == "eos")) for answer in answers] == best
        assert len({(*answer.token_ids, answer.reason) for answer in answers}) == 10


def test_end_of_sequence_outside_the_best_beams_does_not_finish() -> None:
    model = table({row: {A: 0.5, B: 0.3, EOS: 0.2} for row in range(6)})
    found = model.drive(BeamSearch, beams(1)).answers
    assert [(answer.token_ids, answer.reason) for answer in found] == [([A], "length"), ([B], "length")]


def test_live_prefixes_compete_at_the_limit_even_if_the_last_step_finishes_enough() -> None:
    """With early stopping, the step that reaches the limit finishes a second hypothesis below a live one that is better."""
    model = table({START: {A: 0.6, EOS: 0.39, B: 0.01}, A: {B: 0.7, EOS: 0.3}, B: {EOS: 0.5, A: 0.5}})
    found = model.drive(BeamSearch, beams(2, length_penalty=2.0, is_stopped_early=True)).answers
    assert [(answer.token_ids, answer.reason) for answer in found] == [([A, B], "length"), ([A], "eos")]


def test_early_stopping_ends_when_enough_are_finished() -> None:
    num_earlier = 0
    for seed in range(20):
        model = make_table(seed, 30, 2.0, None, 2.0)
        early, late = (
            len(model.drive(BeamSearch, beams(12, 3, length_penalty=2.0, is_stopped_early=early)).widths) for early in (True, False)
        )
        assert early <= late
        num_earlier += early < late
    assert num_earlier


@pytest.mark.parametrize(
    "options",
    [{"num_beams": 2, "num_answers": 2}, {}, {"sampling": Sampling(1), "num_answers": 3}],
    ids=["beams", "one", "samples"],
)
def test_rules_that_leave_nothing_end_the_search_with_what_there_is(options: dict[str, Any]) -> None:
    model, search = make_table(5, 6, 1.0), BeamSearch if "num_beams" in options else SeparateSearch
    rules = {"suppressed_tokens": [EOS, START], "no_repeat_ngram_size": 1}
    answers = model.drive(search, request(10, **options, **rules)).answers
    assert answers and all(sorted(answer.token_ids) == [A, B, C] and answer.reason == "length" for answer in answers)
    answers = model.drive(search, request(10, **options, suppressed_tokens=[EOS, START, A, B, C])).answers
    assert [(one.token_ids, one.log_probs, one.score, one.reason) for one in answers] == [([], [], 0.0, "length")]


def test_samples_differ_by_seed_and_do_not_depend_on_how_many_are_drawn() -> None:
    model = make_table(7, 40, 1.0)

    def sampled(count: int, seed: int = 1) -> list[Any]:
        return model.drive(SeparateSearch, request(8, sampling=Sampling(seed), num_answers=count)).answers

    eight = sampled(8)
    assert all(sampled(count) == eight[:count] for count in range(1, 8))
    assert len({tuple(answer.token_ids) for seed in range(4) for answer in sampled(4, seed)}) == 16


def test_rows_are_given_back_as_answers_end() -> None:
    model = make_table(11, 8, 0.5, None, 1.0)
    sampled = request(30, sampling=Sampling(1), num_answers=6)
    search = SeparateSearch(sampled, model.target)
    assert (len(search.live), search.max_rows) == (1, 6)
    driven = model.drive(SeparateSearch, sampled)
    assert driven.max_live > 1 and len({len(answer.log_probs) for answer in driven.answers}) > 1


PLAIN = [
    {},
    {"forced_prefix": [4]},
    {"length_penalty": 0.5},
    {"forced_prefix": [4, 5], "num_forced": 1, "length_penalty": 2.0},
    {"is_end_forced": True},
]
SEPARATE = [
    {"sampling": Sampling(1)},
    {"has_alternatives": True, "num_answers": 3},
    {"num_top_log_probs": 1},
    {"forced_prefix": [4], "num_top_log_probs": 1},
    {"repetition_penalty": 1.1},
    {"min_new_tokens": 1},
    {"no_repeat_ngram_size": 3},
    {"suppressed_tokens": [5]},
    {"suppressed_tokens": [5], "is_end_forced": True},
]


def test_each_request_gets_the_search_that_its_options_ask_for() -> None:
    target = make_table(0, 50, 1.0).target
    assert search_for(Request(0, [5], 10, 0.0, search=GREEDY), target) is None
    for plain in PLAIN:
        assert search_for(request(10, **plain), target) is None, "plain greedy search is left to the engine"
    for options in SEPARATE:
        assert isinstance(search_for(request(10, **options), target), SeparateSearch)
    assert isinstance(search_for(request(1, forced_prefix=[4], is_end_forced=True), target), SeparateSearch), "it ends at once"
    assert isinstance(search_for(request(10, num_beams=2), target), BeamSearch)


@pytest.mark.parametrize(
    ("length_penalty", "num_forced", "score"),
    [(0.0, 0, -6.0), (1.0, 0, -1.5), (2.0, 0, -0.375), (0.5, 0, -3.0), (-1.0, 0, -24.0), (1.0, 2, -1.0)],
)
def test_a_score_is_the_total_over_a_power_of_the_length(length_penalty: float, num_forced: int, score: float) -> None:
    """The length counts end-of-sequence but no token of the prefix, unless some are said to count."""
    assert Hypothesis([9, 9, 9, 5, 6, 7], [-0.5] * 4, -6.0, is_eos=True).score(length_penalty, num_forced) == score
    assert Hypothesis([9]).score(length_penalty) == 0.0, "nothing was generated"


LONG = list(range(3 * BLOCK))


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [
        ([], [], 0),
        ([1], [], 0),
        ([1, 2], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([1, 2, 3], [1, 4, 3], 1),
        ([2], [1], 0),
        (LONG, [*LONG, 7], 3 * BLOCK),
        *((LONG, [*LONG[:count], -1, *LONG[count + 1 :]], count) for count in (BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK)),
    ],
)
def test_the_common_beginning_of_two_sequences(a: list[int], b: list[int], count: int) -> None:
    assert num_common_tokens(a, b) == num_common_tokens(b, a) == count
