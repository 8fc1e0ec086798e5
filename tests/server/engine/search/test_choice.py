"""Each request gets the search its options ask for."""

import pytest

from dragoman.server.engine.messages import GREEDY, Request, Sampling, SearchOptions
from dragoman.server.engine.search.beam import BeamSearch
from dragoman.server.engine.search.choice import search_for
from dragoman.server.engine.search.separate import SeparateSearch
from dragoman.server.engine.search.target import TargetSide

TARGET = TargetSide(vocab_size=50, eos_id=1, decoder_start_id=2, max_tokens=20)


def request(options: SearchOptions) -> Request:
    return Request(0, [5, 1], 10, 0.0, search=options)


@pytest.mark.parametrize(
    "options",
    [
        GREEDY,
        SearchOptions(),
        SearchOptions(forced_prefix=[4]),
        SearchOptions(length_penalty=0.5),
        SearchOptions(forced_prefix=[4, 5], num_forced=1, length_penalty=2.0),
        SearchOptions(is_end_forced=True),
    ],
)
def test_plain_greedy_search_is_left_to_the_engine(options: SearchOptions) -> None:
    assert search_for(request(options), TARGET) is None


@pytest.mark.parametrize(
    "options",
    [
        SearchOptions(sampling=Sampling(1)),
        SearchOptions(has_alternatives=True, num_answers=3),
        SearchOptions(num_top_log_probs=1),
        SearchOptions(forced_prefix=[4], num_top_log_probs=1),
        SearchOptions(repetition_penalty=1.1),
        SearchOptions(min_new_tokens=1),
        SearchOptions(no_repeat_ngram_size=3),
        SearchOptions(suppressed_tokens=[5]),
        SearchOptions(suppressed_tokens=[5], is_end_forced=True),
    ],
)
def test_one_beam_with_any_option_grows_answers_separately(options: SearchOptions) -> None:
    assert isinstance(search_for(request(options), TARGET), SeparateSearch)


def test_an_answer_that_is_forced_to_end_at_once_is_not_plain() -> None:
    at_once = Request(0, [5, 1], 1, 0.0, search=SearchOptions(forced_prefix=[4], is_end_forced=True))
    assert isinstance(search_for(at_once, TARGET), SeparateSearch)


def test_more_beams_are_beam_search() -> None:
    assert isinstance(search_for(request(SearchOptions(num_beams=2)), TARGET), BeamSearch)
