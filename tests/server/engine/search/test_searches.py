"""Samples, scores, beginnings that hypotheses share, and the choice of a search."""

from typing import Any

import pytest

from dragoman.server.engine.messages import GREEDY, Request, Sampling, SearchOptions
from dragoman.server.engine.search.beam import BeamSearch
from dragoman.server.engine.search.hypothesis import BLOCK, Hypothesis, num_common_tokens
from dragoman.server.engine.search.searches import SeparateSearch, search_for
from tests.server.engine.bench import EOS
from tests.server.engine.search.tables import make_table


def request(max_new_tokens: int, **options: Any) -> Request:
    return Request(0, [7, EOS], max_new_tokens, 0.0, search=SearchOptions(**options))


def test_samples_differ_by_seed_and_do_not_depend_on_how_many_are_drawn() -> None:
    model = make_table(7, 40, 1.0)

    def sampled(count: int, seed: int = 1) -> list[Any]:
        return model.drive(SeparateSearch, request(8, sampling=Sampling(seed), num_answers=count)).answers

    eight = sampled(8)
    assert all(sampled(count) == eight[:count] for count in range(1, 8))
    assert len({tuple(answer.token_ids) for seed in range(4) for answer in sampled(4, seed)}) == 16


PLAIN = [{}, {"forced_prefix": [4, 5], "num_forced": 1, "length_penalty": 2.0}, {"is_end_forced": True}]
SEPARATE = [
    {"sampling": Sampling(1)},
    {"has_alternatives": True, "num_answers": 3},
    {"forced_prefix": [4], "num_top_log_probs": 1},
    *[{"repetition_penalty": 1.1}, {"min_new_tokens": 1}, {"no_repeat_ngram_size": 3}],
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
