"""Beam search on small tables, where what must come out can be worked out by hand or by trying everything."""

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from dragoman.server.engine.messages import Request, SearchOptions
from dragoman.server.engine.search.beam import BeamSearch

EOS, START = 1, 2
A, B, C = 3, 4, 5


def request(max_new_tokens: int, num_beams: int = 2, **options: Any) -> Request:
    search = SearchOptions(num_beams=num_beams, **{"num_answers": num_beams, **options})
    return Request(0, [7, EOS], max_new_tokens, 0.0, search=search)


@pytest.fixture
def chain(table_of: Callable[..., Any]) -> Any:
    """A model in which the likeliest first token leads to worse answers than the second likeliest."""
    probabilities = np.full((6, 6), 1e-9)
    probabilities[START, [A, B]] = 0.6, 0.4
    probabilities[A, [EOS, A, B, C]] = 0.25, 0.25, 0.25, 0.25
    probabilities[B, [EOS, C]] = 0.9, 0.1
    probabilities[C, [EOS, A]] = 0.5, 0.5
    return table_of(np.log(probabilities).astype(np.float32))


def test_a_worse_beginning_can_win(chain: Any) -> None:
    first, second = chain.drive(BeamSearch, request(5)).answers
    assert first.token_ids == [B]
    assert first.score == pytest.approx(math.log(0.4 * 0.9) / 2)
    assert first.log_probs == pytest.approx([math.log(0.4), math.log(0.9)])
    assert second.score <= first.score


def test_with_every_prefix_kept_the_best_answers_of_all_are_found(table_model: Callable[..., Any]) -> None:
    for seed in range(12):
        model = table_model(seed, 5, 1.5, None, 1.0)
        found = model.drive(BeamSearch, request(4, 64, length_penalty=0.0, num_answers=10)).answers
        tokens = range(START, 5)
        every = [(list(ids), True) for length in range(4) for ids in product(tokens, repeat=length)]
        every += [(list(ids), False) for ids in product(tokens, repeat=4)]

        def total(ids: list[int], is_eos: bool, model: Any = model) -> float:
            steps = [*ids, EOS] if is_eos else ids
            return sum(float(model.row(ids[:i])[token]) for i, token in enumerate(steps))

        best = sorted((total(*candidate) for candidate in every), reverse=True)[:10]
        assert [answer.score for answer in found] == pytest.approx(best)
        assert [total(answer.token_ids, answer.reason == "eos") for answer in found] == pytest.approx(best)
        assert len({(*answer.token_ids, answer.reason) for answer in found}) == 10


def test_answers_come_by_falling_score_and_no_two_are_alike(table_model: Callable[..., Any]) -> None:
    for seed in range(10):
        answers = table_model(seed, 12, 2.0, 3, 1.0).drive(BeamSearch, request(6, 5)).answers
        assert len(answers) == 5
        assert [answer.score for answer in answers] == sorted((answer.score for answer in answers), reverse=True)
        assert len({(*answer.token_ids, answer.reason) for answer in answers}) == 5


def test_end_of_sequence_outside_the_best_beams_does_not_finish(table_of: Callable[..., Any]) -> None:
    probabilities = np.full((6, 6), 1e-9)
    probabilities[:, [A, B, EOS]] = 0.5, 0.3, 0.2
    driven = table_of(np.log(probabilities).astype(np.float32)).drive(BeamSearch, request(1))
    assert [(answer.token_ids, answer.reason) for answer in driven.answers] == [([A], "length"), ([B], "length")]


def test_live_prefixes_compete_at_the_limit_even_if_the_last_step_finishes_enough(table_of: Callable[..., Any]) -> None:
    """With early stopping, the step that reaches the limit finishes a second hypothesis below a live one that is better."""
    probabilities = np.full((6, 6), 1e-9)
    probabilities[START, [A, EOS, B]] = 0.6, 0.39, 0.01
    probabilities[A, [B, EOS]] = 0.7, 0.3
    probabilities[B, [EOS, A]] = 0.5, 0.5
    driven = table_of(np.log(probabilities).astype(np.float32)).drive(
        BeamSearch, request(2, length_penalty=2.0, is_stopped_early=True)
    )
    assert [(answer.token_ids, answer.reason) for answer in driven.answers] == [([A, B], "length"), ([A], "eos")]


def test_early_stopping_ends_when_enough_are_finished(table_model: Callable[..., Any]) -> None:
    num_earlier = 0
    for seed in range(20):
        model = table_model(seed, 30, 2.0, None, 2.0)
        steps = [
            len(model.drive(BeamSearch, request(12, 3, length_penalty=2.0, is_stopped_early=early)).widths)
            for early in (True, False)
        ]
        assert steps[0] <= steps[1]
        num_earlier += steps[0] < steps[1]
    assert num_earlier


def test_only_the_answers_asked_for_are_returned(table_model: Callable[..., Any]) -> None:
    model = table_model(3, 30, 1.0)
    all_of_them = model.drive(BeamSearch, request(6, 4)).answers
    assert model.drive(BeamSearch, request(6, 4, num_answers=2)).answers == all_of_them[:2]


def test_the_forced_prefix_is_fed_alone_and_not_scored(table_model: Callable[..., Any]) -> None:
    model = table_model(4, 30, 1.0)
    driven = model.drive(BeamSearch, request(3, 4, forced_prefix=[A, B, C]))
    assert driven.widths[:3] == [1, 1, 1]
    for answer in driven.answers:
        assert answer.token_ids[:3] == [A, B, C]
        assert answer.score == pytest.approx(sum(answer.log_probs) / len(answer.log_probs))
        assert answer.log_probs[0] in model.row([C])


def test_forced_tokens_count_in_the_length_that_ranks(table_model: Callable[..., Any]) -> None:
    """Every way an answer can go is tried; which is best depends on how long it is taken to be."""
    num_others = 0
    for seed in range(12):
        model = table_model(seed, 5, 1.5, None, 1.0)

        def best(num_forced: int, model: Any = model) -> list[list[int]]:
            options = {"forced_prefix": [A, B], "length_penalty": 1.0, "num_answers": 10}
            answers = model.drive(BeamSearch, request(4, 64, num_forced=num_forced, **options)).answers
            ways = [(list(ids), n) for n in range(4) for ids in product(range(START, 5), repeat=n)]
            every = [[*ids, EOS] for ids, _ in ways] + [list(ids) for ids in product(range(START, 5), repeat=4)]
            totals = [
                sum(float(model.row([A, B, *ids[:i]])[token]) for i, token in enumerate(ids)) / (len(ids) + num_forced)
                for ids in every
            ]
            assert [answer.score for answer in answers] == pytest.approx(sorted(totals, reverse=True)[:10])
            return [answer.token_ids for answer in answers]

        num_others += best(0) != best(2)
    assert num_others, "it is seen in the ranks"


def test_a_forced_end_adds_nothing_and_every_live_beam_ends(table_model: Callable[..., Any]) -> None:
    for seed in range(12):
        model = table_model(seed, 6, 1.5, None, -3.0)
        answers = model.drive(BeamSearch, request(3, 40, length_penalty=0.5, is_end_forced=True)).answers
        tokens = [i for i in range(START, 6)]
        every = [sum(map(float, model.row([])[[EOS]]))]  # ended by itself after nothing
        every += [float(model.row([])[a]) + float(model.row([a])[EOS]) for a in tokens]
        scores = [every[0], *(total / 2**0.5 for total in every[1:])]
        scores += [(float(model.row([])[a]) + float(model.row([a])[b])) / 3**0.5 for a in tokens for b in tokens]
        assert [answer.score for answer in answers] == pytest.approx(sorted(scores, reverse=True)[: len(answers)])
        assert {answer.reason for answer in answers} == {"eos"}
        assert all(answer.log_probs[-1] == model.row(answer.token_ids)[EOS] for answer in answers), "the model's is told"


def test_rules_that_leave_nothing_end_the_search_with_what_there_is(table_model: Callable[..., Any]) -> None:
    model = table_model(5, 6, 1.0)
    options = {"suppressed_tokens": [EOS, START], "no_repeat_ngram_size": 1}
    answers = model.drive(BeamSearch, request(10, 2, **options)).answers
    assert answers and all(sorted(answer.token_ids) == [A, B, C] and answer.reason == "length" for answer in answers)


def test_rules_that_leave_nothing_from_the_start_give_an_empty_answer(table_model: Callable[..., Any]) -> None:
    (answer,) = table_model(5, 6, 1.0).drive(BeamSearch, request(10, 2, suppressed_tokens=[EOS, START, A, B, C])).answers
    assert (answer.token_ids, answer.log_probs, answer.score, answer.reason) == ([], [], 0.0, "length")


def test_a_vocabulary_smaller_than_the_beam_is_used_up(table_model: Callable[..., Any]) -> None:
    driven = table_model(6, 5, 1.0).drive(BeamSearch, request(3, 8))
    assert len(driven.answers) == 8
    assert driven.max_live <= 8


def test_alternatives_at_each_position_are_the_models(table_model: Callable[..., Any]) -> None:
    """Rules and other hypotheses do not change what is told of the model."""
    model = table_model(7, 40, 1.0)
    answer = model.drive(BeamSearch, request(5, 3, num_top_log_probs=4, suppressed_tokens=[A, B])).answers[0]
    for i, (ids, log_probs) in enumerate(zip(answer.top_ids, answer.top_log_probs, strict=True)):
        row = model.row(answer.token_ids[:i])
        assert ids == np.argsort(-row, kind="stable")[:4].tolist()
        assert log_probs == row[ids].tolist()
    assert len(answer.top_ids) == len(answer.log_probs)
