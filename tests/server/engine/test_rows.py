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
    """Rows 0 and 2 are plain ones, and row 1 is a search's."""
    rows = Rows(4, TargetSide(50, EOS, START, 8))
    for row in range(3):
        rows.start(row, 5, is_plain=row != 1)
    return rows


def take(rows: Rows, *tokens: int) -> list[int]:
    """Let rows go on with tokens of different log-probabilities; each row's second candidate must not be looked at."""
    ids = np.array([[token, 49] for token in tokens])
    return rows.take_likeliest(Candidates(ids, (-ids / 64).astype(np.float32)))


def test_a_row_is_fed_its_start_token_at_position_0_and_then_its_likeliest(rows: Rows) -> None:
    assert take(rows, 5, 6) == []
    assert rows.tokens[:3].tolist() == [5, 6, START] and rows.positions[:3].tolist() == [1, 1, 0], "not beyond the batch"
    rows.start(0, 5, is_plain=True)
    rows.feed(1, 33, 1)
    take(rows, 8)
    assert rows.tokens[:3].tolist() == [8, 33, START] and rows.positions[:3].tolist() == [1, 1, 0]


def test_a_row_may_start_with_a_token_of_its_own_and_is_fed_it_again(rows: Rows) -> None:
    rows.start(1, 5, 33, is_plain=False)
    rows.start(2, 5, 0, is_plain=False)
    assert rows.tokens[:3].tolist() == [START, 33, 0], "padding is a token like others"
    rows.move(1, 0)
    for row, token in ((0, 33), (1, 33), (2, 0)):
        take(rows, 5, 6, 7)
        rows.feed_again(row, [])
        assert (rows.tokens[row], rows.positions[row]) == (token, 0)
    rows.feed_again(0, [8, 9])
    assert (rows.tokens[0], rows.positions[0]) == (9, 2)
    rows.start(0, 5, is_plain=True)
    assert rows.tokens[0] == START


def test_answers_end_with_the_end_of_sequence_or_at_their_limit(rows: Rows) -> None:
    assert take(rows, 5, 6, 7) == []
    assert take(rows, EOS, EOS, 8) == [0], "a search's row does not end"
    answer = rows.answer(0)
    assert rows.is_eos(0) and (answer.token_ids, answer.reason) == ([5], "eos")
    assert answer.log_probs == [-5 / 64, -EOS / 64] and answer.score == -6 / 64 / 2
    for token in (9, 10):
        assert take(rows, 4, 6, token) == []
    rows.start(0, 1, is_plain=True)
    assert take(rows, EOS, 6, 11) == [0, 2], "a search's row has no limit"
    assert (rows.answer(0).token_ids, rows.answer(0).reason) == ([], "eos"), "also at the limit"
    answer = rows.answer(2)
    assert not rows.is_eos(2) and (answer.token_ids, answer.reason) == ([7, 8, 9, 10, 11], "length")
    assert len(answer.log_probs) == 5


def test_an_answer_goes_on_after_a_move(rows: Rows) -> None:
    rows.start(1, 2, is_plain=True)
    assert [take(rows, *tokens) for tokens in ((5, 6, 7), (8, 9, 10))] == [[], [1]]
    rows.move(2, 1)
    assert take(rows, 11, 12) == [], "the limit has moved too"
    assert take(rows, 13, EOS) == [1]
    answer = rows.answer(1)
    assert (answer.token_ids, answer.log_probs) == ([7, 10, 12], [-7 / 64, -10 / 64, -12 / 64, -EOS / 64])


def test_a_forced_prefix_is_fed_and_its_end_of_sequence_ends_nothing(rows: Rows) -> None:
    search = SearchOptions(forced_prefix=[30, EOS, 31], num_forced=2, length_penalty=0.5)
    rows.start(0, 2, search=search, is_plain=True)
    for token in search.forced_prefix:
        assert take(rows, EOS, 6, 7) == []
        assert (rows.tokens[0], rows.tokens[2], rows.num_generated(0), rows.is_eos(0)) == (token, 7, 0, False)
    assert take(rows, 8, 6, 7) == [] and rows.num_generated(0) == 1
    assert take(rows, EOS, 6, 7) == [0, 2] and rows.num_generated(0) == 2
    answer = rows.answer(0)
    assert (answer.token_ids, answer.log_probs, answer.reason) == ([30, EOS, 31, 8], [-8 / 64, -EOS / 64], "eos")
    assert answer.score == (-8 / 64 - EOS / 64) / (2 + 2) ** 0.5
    assert rows.answer(2).score == -7 / 64, "others are scored as before"


def test_a_forced_prefix_moves_before_it_is_fed(rows: Rows) -> None:
    rows.start(2, 1, search=SearchOptions(forced_prefix=[30, 31], num_forced=1), is_plain=True)
    take(rows, 5, 6, 7)
    rows.move(2, 1)
    assert take(rows, 8, 9) == [] and rows.tokens[1] == 31
    assert take(rows, 8, 10) == [1]
    assert (rows.answer(1).token_ids, rows.answer(1).score) == ([30, 31, 10], -10 / 64 / 2)


def test_a_reused_row_keeps_nothing(rows: Rows) -> None:
    search = SearchOptions(forced_prefix=[30, 31], num_forced=2, length_penalty=3.0)
    for is_plain in (True, False):
        rows.start(0, 5, search=search, is_plain=is_plain)
        assert take(rows, 5, 6, 7) == []
        assert rows.tokens[0] == (30 if is_plain else 5), "a search feeds its own"
    rows.start(0, 2, is_plain=True)
    assert [0 in take(rows, *tokens) for tokens in ((9, 6, 7), (8, 6, 7))] == [False, True]
    assert (rows.answer(0).token_ids, rows.answer(0).score) == ([9, 8], -17 / 64 / 2)


def test_a_parked_row_stands_still_and_ends_nothing(rows: Rows) -> None:
    rows.start(0, 1, search=SearchOptions(forced_prefix=[30, 31]), is_plain=True)
    rows.park(0)
    assert (rows.tokens[0], rows.positions[0]) == (START, 0)
    assert take(rows, EOS, 6, 7) == [] and rows.tokens[0] == EOS
