"""The rows' arrays: plain greedy answers grow in them, and move with their rows."""

import numpy as np
import pytest

from dragoman.server.engine.messages import SearchOptions
from dragoman.server.engine.rows import Rows
from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.engine.search.target import TargetSide

EOS, START = 1, 2


@pytest.fixture
def rows() -> Rows:
    rows = Rows(4, TargetSide(50, EOS, START, 8))
    for row in range(3):
        rows.start(row, 5, is_plain=row != 1)
    return rows


def candidates(*tokens: int) -> Candidates:
    """The likeliest of each row, with a log-probability that tells it from all others, before one that must not be looked at."""
    ids = np.array([[token, 49] for token in tokens])
    return Candidates(ids, (-ids / 64).astype(np.float32))


def test_a_row_starts_with_the_start_token_at_position_0(rows: Rows) -> None:
    rows.take_likeliest(candidates(5, 6, 7))
    rows.start(0, 5, is_plain=True)
    assert rows.tokens[:3].tolist() == [START, 6, 7]
    assert rows.positions[:3].tolist() == [0, 1, 1]


def test_a_row_may_start_with_a_token_of_its_own_and_is_fed_it_again(rows: Rows) -> None:
    rows.start(1, 5, 33, is_plain=False)
    rows.start(2, 5, 0, is_plain=False)
    assert rows.tokens[:3].tolist() == [START, 33, 0], "padding is a token like others"
    rows.move(1, 0)
    for row, token in ((0, 33), (1, 33), (2, 0)):
        rows.take_likeliest(candidates(5, 6, 7))
        rows.feed_again(row, [])
        assert (rows.tokens[row], rows.positions[row]) == (token, 0)
    rows.start(0, 5, is_plain=True)
    assert rows.tokens[0] == START


def test_answers_end_with_the_end_of_sequence_or_at_their_limit(rows: Rows) -> None:
    assert rows.take_likeliest(candidates(5, 6, 7)) == []
    assert rows.take_likeliest(candidates(EOS, 6, 8)) == [0]
    answer = rows.answer(0)
    assert rows.is_eos(0) and (answer.token_ids, answer.reason) == ([5], "eos")
    assert answer.log_probs == [-5 / 64, -EOS / 64] and answer.score == -6 / 64 / 2
    for token in (9, 10):
        assert rows.take_likeliest(candidates(4, 6, token)) == []
    rows.start(0, 5, is_plain=True)
    assert rows.take_likeliest(candidates(4, 6, 11)) == [2]
    answer = rows.answer(2)
    assert not rows.is_eos(2) and (answer.token_ids, answer.reason) == ([7, 8, 9, 10, 11], "length")
    assert len(answer.log_probs) == 5


def test_an_end_of_sequence_at_the_limit_is_an_end_of_sequence(rows: Rows) -> None:
    rows.start(0, 1, is_plain=True)
    assert rows.take_likeliest(candidates(EOS, 6, 7)) == [0]
    assert rows.answer(0).reason == "eos" and rows.answer(0).token_ids == []


def test_rows_of_searches_do_not_end(rows: Rows) -> None:
    for _ in range(7):
        rows.feed(0, 5, 0)
        rows.feed(2, 5, 0)
        assert rows.take_likeliest(candidates(5, EOS, 5)) == []


def test_what_a_search_feeds_is_fed(rows: Rows) -> None:
    rows.take_likeliest(candidates(5, 6, 7))
    rows.feed(1, 33, 1)
    assert rows.tokens[:3].tolist() == [5, 33, 7] and rows.positions[:3].tolist() == [1, 1, 1]


def test_rows_beyond_the_batch_are_left_alone(rows: Rows) -> None:
    rows.take_likeliest(candidates(5, 6))
    assert rows.tokens[:3].tolist() == [5, 6, START] and rows.positions[:3].tolist() == [1, 1, 0]


def test_an_answer_goes_on_after_a_move_as_if_nothing_had_happened(rows: Rows) -> None:
    rows.start(1, 2, is_plain=True)
    for tokens in ((5, 6, 7), (8, 9, 10)):
        ended = rows.take_likeliest(candidates(*tokens))
    assert ended == [1]
    rows.move(2, 1)
    assert rows.take_likeliest(candidates(11, 12)) == [], "the limit has moved too"
    assert rows.take_likeliest(candidates(13, EOS)) == [1]
    answer = rows.answer(1)
    assert (answer.token_ids, answer.log_probs) == ([7, 10, 12], [-7 / 64, -10 / 64, -12 / 64, -EOS / 64])


def test_a_reused_row_has_no_memory(rows: Rows) -> None:
    for _ in range(4):
        rows.take_likeliest(candidates(40, 41, 42))
    rows.start(0, 2, is_plain=True)
    for tokens in ((3, 4, 5), (6, 7, EOS)):
        ended = rows.take_likeliest(candidates(*tokens))
    assert 0 in ended and rows.answer(0).token_ids == [3, 6]


def test_a_forced_prefix_is_fed_whatever_the_candidates_say_and_its_end_of_sequence_ends_nothing(rows: Rows) -> None:
    search = SearchOptions(forced_prefix=[30, EOS, 31], num_forced=2, length_penalty=0.5)
    rows.start(0, 2, search=search, is_plain=True)
    for token in search.forced_prefix:
        assert rows.take_likeliest(candidates(EOS, 6, 7)) == []
        assert (rows.tokens[0], rows.tokens[2], rows.num_generated(0), rows.is_eos(0)) == (token, 7, 0, False)
    assert rows.take_likeliest(candidates(8, 6, 7)) == [] and rows.num_generated(0) == 1
    assert rows.take_likeliest(candidates(EOS, 6, 7)) == [0, 2] and rows.num_generated(0) == 2
    answer = rows.answer(0)
    assert (answer.token_ids, answer.log_probs, answer.reason) == ([30, EOS, 31, 8], [-8 / 64, -EOS / 64], "eos")
    assert answer.score == (-8 / 64 - EOS / 64) / (2 + 2) ** 0.5
    assert rows.answer(2).score == -7 / 64, "others count as ever"


def test_a_forced_prefix_moves_before_it_is_fed(rows: Rows) -> None:
    rows.start(2, 1, search=SearchOptions(forced_prefix=[30, 31], num_forced=1), is_plain=True)
    rows.take_likeliest(candidates(5, 6, 7))
    rows.move(2, 1)
    assert rows.take_likeliest(candidates(8, 9)) == [] and rows.tokens[1] == 31
    assert rows.take_likeliest(candidates(8, 10)) == [1]
    assert (rows.answer(1).token_ids, rows.answer(1).score) == ([30, 31, 10], -10 / 64 / 2)


def test_a_reused_row_has_no_prefix_any_more(rows: Rows) -> None:
    search = SearchOptions(forced_prefix=[30, 31], num_forced=2, length_penalty=3.0)
    for is_plain in (True, False):
        rows.start(0, 5, search=search, is_plain=is_plain)
        assert rows.take_likeliest(candidates(5, 6, 7)) == []
        assert rows.tokens[0] == (30 if is_plain else 5), "a search feeds its own"
    rows.start(0, 1, is_plain=True)
    assert rows.take_likeliest(candidates(9, 6, 7)) == [0]
    assert (rows.answer(0).token_ids, rows.answer(0).score) == ([9], -9 / 64)
