"""Answers that grow apart from each other: greedy search with rules, samples, and alternatives after a prefix."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dragoman.server.engine.messages import Request, Sampling, SearchOptions
from dragoman.server.engine.search.separate import SeparateSearch

EOS, START, A, B, C = 1, 2, 3, 4, 5


def request(max_new_tokens: int, **options: Any) -> Request:
    return Request(0, [7, EOS], max_new_tokens, 0.0, search=SearchOptions(**options))


def sampled(max_new_tokens: int, num_answers: int, seed: int = 1, **options: Any) -> Request:
    return request(max_new_tokens, sampling=Sampling(seed), num_answers=num_answers, **options)


def greedy(model: Any, beginning: list[int], max_new_tokens: int, banned: tuple[int, ...] = ()) -> list[int]:
    """Continue a beginning with the likeliest tokens, as plainly as can be; its tokens are not counted."""
    tokens = list(beginning)
    for _ in range(max_new_tokens):
        row = model.row(tokens).copy()
        row[list(banned)] = -np.inf
        if (token := int(row.argmax())) == EOS:
            break
        tokens.append(token)
    return tokens


def test_greedy_search_takes_the_likeliest_that_is_allowed(table_model: Callable[..., Any]) -> None:
    model = table_model(1, 30, 1.0)
    banned = tuple(greedy(model, [], 8)[:2])
    (answer,) = model.drive(SeparateSearch, request(8, suppressed_tokens=list(banned))).answers
    assert answer.token_ids == greedy(model, [], 8, banned)
    assert not set(answer.token_ids) & set(banned)


def test_a_penalty_counts_in_the_score_and_not_in_the_log_probs(table_model: Callable[..., Any]) -> None:
    model = table_model(2, 6, 0.3, None, -9.0)
    (answer,) = model.drive(SeparateSearch, request(10, repetition_penalty=1.5, length_penalty=0.0)).answers
    total = 0.0
    for i, (token, log_prob) in enumerate(zip(answer.token_ids, answer.log_probs, strict=True)):
        row = model.row(answer.token_ids[:i]).astype(np.float64)
        assert log_prob == row[token]
        seen = list(set(answer.token_ids[:i]))
        row[seen] *= 1.5
        assert token == row.argmax()
        total += row[token]
    assert answer.score == pytest.approx(total, rel=1e-12)
    assert total < sum(answer.log_probs)


def test_the_forced_prefix_is_in_the_answer_but_not_in_its_length(table_model: Callable[..., Any]) -> None:
    model = table_model(3, 30, 1.0, None, -9.0)
    (answer,) = model.drive(SeparateSearch, request(4, forced_prefix=[A, B, C])).answers
    assert answer.token_ids == greedy(model, [A, B, C], 4)
    assert len(answer.log_probs) == 4


def test_alternatives_differ_in_their_first_token_and_go_on_greedily(table_model: Callable[..., Any]) -> None:
    model = table_model(4, 30, 1.0, None, -9.0)
    driven = model.drive(SeparateSearch, request(5, has_alternatives=True, num_answers=4, forced_prefix=[A]))
    first_tokens = np.argsort(-model.row([A]), kind="stable")[:4].tolist()
    assert [answer.token_ids for answer in driven.answers] == [greedy(model, [A, token], 4) for token in first_tokens]


def test_an_alternative_may_be_the_end(table_model: Callable[..., Any]) -> None:
    model = table_model(5, 6, 0.1)
    driven = model.drive(SeparateSearch, request(4, has_alternatives=True, num_answers=5))
    assert len(driven.answers) == 5
    assert [answer.token_ids for answer in driven.answers].count([]) == 1


def test_there_are_no_more_alternatives_than_tokens_allowed(table_model: Callable[..., Any]) -> None:
    model = table_model(6, 6, 1.0)
    driven = model.drive(SeparateSearch, request(3, has_alternatives=True, num_answers=8, suppressed_tokens=[START, B]))
    assert {answer.token_ids[0] if answer.token_ids else EOS for answer in driven.answers} == {EOS, A, C}
    assert len(driven.answers) == 3


def test_a_sample_does_not_depend_on_how_many_are_drawn(table_model: Callable[..., Any]) -> None:
    model = table_model(7, 40, 1.0)
    eight = model.drive(SeparateSearch, sampled(8, 8)).answers
    for count in range(1, 8):
        assert model.drive(SeparateSearch, sampled(8, count)).answers == eight[:count]


def test_samples_differ_from_each_other_and_with_the_seed(table_model: Callable[..., Any]) -> None:
    model = table_model(8, 40, 1.0)
    texts = [tuple(answer.token_ids) for seed in range(4) for answer in model.drive(SeparateSearch, sampled(8, 4, seed)).answers]
    assert len(set(texts)) == 16


def test_a_sample_tells_the_models_log_probabilities(table_model: Callable[..., Any]) -> None:
    model = table_model(9, 40, 1.0)
    options = {"sampling": Sampling(3, temperature=0.5, top_k=5), "suppressed_tokens": [A], "length_penalty": 0.0}
    (answer,) = model.drive(SeparateSearch, request(8, **options)).answers
    tokens = [*answer.token_ids, EOS] if answer.reason == "eos" else answer.token_ids
    assert answer.log_probs == [float(model.row(tokens[:i])[token]) for i, token in enumerate(tokens)]
    assert answer.score == pytest.approx(sum(answer.log_probs))


def test_drawing_from_the_likeliest_only_is_greedy(table_model: Callable[..., Any]) -> None:
    model = table_model(10, 40, 1.0)
    for sampling in (Sampling(1, top_k=1), Sampling(2, top_p=1e-9)):
        (answer,) = model.drive(SeparateSearch, request(8, sampling=sampling)).answers
        assert answer.token_ids == greedy(model, [], 8)


def test_rows_are_given_back_as_answers_end(table_model: Callable[..., Any]) -> None:
    model = table_model(11, 8, 0.5, None, 1.0)
    search = SeparateSearch(sampled(30, 6), model.target)
    assert (len(search.live), search.max_rows) == (1, 6)
    driven = model.drive(SeparateSearch, sampled(30, 6))
    assert driven.max_live > 1
    assert len({len(answer.log_probs) for answer in driven.answers}) > 1


def test_rules_that_leave_nothing_end_the_answer(table_model: Callable[..., Any]) -> None:
    model = table_model(12, 6, 1.0)
    rules = {"suppressed_tokens": [EOS, START], "no_repeat_ngram_size": 1}
    for options in (rules, {**rules, "sampling": Sampling(1), "num_answers": 3}):
        for answer in model.drive(SeparateSearch, request(10, **options)).answers:
            assert sorted(answer.token_ids) == [A, B, C]
            assert answer.reason == "length"


def test_rules_that_leave_nothing_from_the_start_give_one_empty_answer(table_model: Callable[..., Any]) -> None:
    (answer,) = table_model(13, 6, 1.0).drive(SeparateSearch, request(5, suppressed_tokens=[EOS, START, A, B, C])).answers
    assert (answer.token_ids, answer.log_probs, answer.reason) == ([], [], "length")
