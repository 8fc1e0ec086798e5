"""What a hypothesis is worth, and what two have in common."""

import pytest

from dragoman.server.engine.search.hypothesis import Hypothesis, num_common_tokens


@pytest.mark.parametrize(("length_penalty", "score"), [(0.0, -6.0), (1.0, -1.5), (2.0, -0.375), (0.5, -3.0), (-1.0, -24.0)])
def test_score_is_the_total_over_a_power_of_the_length(length_penalty: float, score: float) -> None:
    assert Hypothesis([5, 6, 7], [-0.5] * 4, -6.0, is_eos=True).score(length_penalty) == score


def test_length_counts_end_of_sequence_but_not_the_forced_prefix() -> None:
    assert Hypothesis([9, 9, 9, 5], [-1.0, -2.0], -3.0, is_eos=True).score(1.0) == -1.5


def test_what_was_not_generated_has_no_score() -> None:
    assert Hypothesis([9]).score(1.0) == 0.0


def test_an_answer_says_what_the_hypothesis_knows() -> None:
    answer = Hypothesis([5, 6], [-0.5, -1.0], -3.0, 2, False, [[5], [7]], [[-0.5], [-0.25]]).answer(1.0)
    assert (answer.token_ids, answer.log_probs, answer.score, answer.reason) == ([5, 6], [-0.5, -1.0], -1.5, "length")
    assert (answer.top_ids, answer.top_log_probs) == ([[5], [7]], [[-0.5], [-0.25]])
    assert Hypothesis([], [-0.5], -0.5, is_eos=True).answer(1.0).reason == "eos"


@pytest.mark.parametrize(
    ("a", "b", "count"),
    [([], [], 0), ([1], [], 0), ([1, 2], [1, 2], 2), ([1, 2], [1, 2, 3], 2), ([1, 2, 3], [1, 4, 3], 1), ([2], [1], 0)],
)
def test_common_beginning(a: list[int], b: list[int], count: int) -> None:
    assert num_common_tokens(a, b) == num_common_tokens(b, a) == count
