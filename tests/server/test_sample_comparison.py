"""Comparison of answers with samples: bit for bit, or within a tolerance, in which two tokens may be as likely."""

import math
from typing import Any

import pytest

from dragoman.export.samples import Sample, ScoredSample
from dragoman.server.engine.messages import Answer
from dragoman.server.models.self_test import ProofFailed, SampleComparison

EOS = 1
# The second token leads by 0.02 over one, by 0.1 over another.
FIRST = [(7, -0.5), (8, -1.5), (9, -2.5), (10, -3.5)]
SECOND = [(20, -1.0), (21, -1.02), (22, -1.1), (23, -4.0)]
END = [(EOS, -0.25), (5, -2.0), (6, -3.0), (4, -5.0)]
SAMPLE = Sample([4, EOS], [7, 20, EOS], [-0.5, -1.0, -0.25], [FIRST, SECOND, END], target_prefix=[3])


def comparison(tolerance: float = 0.05, *, is_exact: bool = False, are_scores_exact: bool = False) -> SampleComparison:
    return SampleComparison(EOS, tolerance, is_exact, are_scores_exact)


def answer(ids: list[int], log_probs: list[float], told: list[Any] | None = None, **fields: Any) -> Answer:
    """Return an answer that ended by itself; its last token is end-of-sequence."""
    told = [] if told is None else told
    ids_told = [[token for token, _ in row] for row in told]
    values_told = [[value for _, value in row] for row in told]
    values = {"token_ids": [3, *ids[:-1]], "log_probs": log_probs, "score": 0.0, "reason": "eos"} | fields
    return Answer(**values, top_ids=ids_told, top_log_probs=values_told)


def refusal(found: Answer, **options: Any) -> str:
    with pytest.raises(ProofFailed) as caught:
        comparison(**options).compare_answer("sample 2", SAMPLE, found)
    assert "\n" not in str(caught.value)
    return str(caught.value)


SAME = answer(SAMPLE.ids, SAMPLE.log_probs)


def off(*log_probs: float) -> Answer:
    return answer(SAMPLE.ids, [*log_probs])


@pytest.mark.parametrize(
    ("found", "is_exact", "max_difference"),
    [
        (SAME, True, 0.0),
        (answer(SAMPLE.ids, SAMPLE.log_probs, SAMPLE.candidates), True, 0.0),
        (off(-0.5, -0.99999994, -0.25), False, 6e-8),
        (off(-0.53, -1.04, -0.25), False, 0.04),
    ],
)
def test_same_answer_is_accepted(found: Answer, is_exact: bool, max_difference: float) -> None:
    compared = comparison(is_exact=is_exact)
    compared.compare_answer("sample 2", SAMPLE, found)
    assert (compared.found.num_answers, compared.found.num_tokens, compared.found.num_parted) == (1, 3, 0)
    assert compared.found.max_difference == pytest.approx(max_difference, rel=0.01)


LENGTH: dict[str, Any] = {"reason": "length"}
OTHERS = [FIRST, [SECOND[0], (21, -1.0200001), *SECOND[2:]], END]


@pytest.mark.parametrize(
    ("found", "is_exact", "reason"),
    [
        (off(-0.5, -0.99999994, -0.25), True, "sample 2, token 2: 20 has -0.99999994 instead of -1, bit for bit"),
        (answer(SAMPLE.ids, SAMPLE.log_probs, OTHERS), True, "sample 2, token 2: 20 (-1) 21 (-1.0200001)"),
        (answer([7, 21, 9, EOS], [-0.5, -1.0, -3.0, -4.0]), True, "sample 2, token 2: 21 (-1) instead of 20 (-1), bit for bit"),
        (off(-0.53, -1.04, -0.31), False, "sample 2, token 3: 1 has -0.31 instead of -0.25; the tolerance is 0.05"),
        (
            answer([7, EOS], [-0.5, -0.25], **LENGTH, token_ids=[3, 7, 20]),
            *(False, "sample 2, token 2: 20 has -0.25 instead of -1; the tolerance is 0.05"),
        ),
        (answer(SAMPLE.ids, SAMPLE.log_probs, **LENGTH, token_ids=[3, 7]), False, "sample 2 has 1 tokens with 3 log-probabilities"),
        (answer([7, 20], [-0.5, -1.0], **LENGTH, token_ids=[3, 7, 20]), False, "sample 2 has 2 tokens instead of 3"),
        (answer(SAMPLE.ids, SAMPLE.log_probs, token_ids=[7, 20]), False, "sample 2 does not begin with the forced prefix"),
    ],
)
def test_other_answer_is_refused(found: Answer, is_exact: bool, reason: str) -> None:
    assert refusal(found, is_exact=is_exact).startswith(reason)


def parted(log_prob: float, told: list[tuple[int, float]], token: int = 21) -> Answer:
    """Return an answer whose second token is another, with what the engine tells at its position."""
    return answer([7, token, 9, EOS], [-0.5, log_prob, -3.0, -4.0], [FIRST, told, FIRST, FIRST])


def test_answers_may_part_where_both_tokens_are_within_the_tolerance() -> None:
    for log_prob, told in (
        (-1.0, [(21, -1.0), (20, -1.03), (22, -1.1), (23, -4.0)]),
        (-0.98, [(21, -0.98), (22, -0.99), (24, -1.0), (25, -1.01)]),  # the sample's token may be just below
    ):
        compared = comparison()
        compared.compare_answer("sample 2", SAMPLE, parted(log_prob, told))
        assert (compared.found.num_parted, compared.found.num_tokens) == (1, 1), "the rest is another answer"


@pytest.mark.parametrize(
    ("found", "why"),
    [
        (parted(-1.0, [(21, -1.0), (20, -1.06), (22, -1.1), (23, -4.0)]), "the sample's token has fallen too far"),
        (parted(-0.93, [(21, -0.93), (20, -0.94), (22, -1.1), (23, -4.0)]), "the other has risen too far"),
        (parted(-1.08, [(21, -1.08), (20, -1.08), (22, -1.1), (23, -4.0)]), "both have fallen too far"),
        (parted(-1.0, [(21, -1.0), (22, -1.1), (24, -1.2), (25, -1.3)]), "the sample's token is not even told"),
        (parted(-1.0, [(23, -1.0), (20, -1.01), (21, -1.02), (22, -1.1)], token=23), "one from far behind leads"),
        (parted(-1.0, [(99, -1.0), (20, -1.01), (21, -1.02), (22, -1.1)], token=99), "one that the sample does not tell leads"),
        (parted(-1.0, [(21, -1.0)]), "no other token than the one told can be"),
    ],
)
def test_token_that_only_another_model_takes_is_refused(found: Answer, why: str) -> None:
    reason = refusal(found)
    assert reason.startswith("sample 2, token 2: ") and reason.endswith("instead of 20 (-1); the tolerance is 0.05"), why


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("is_exact", [False, True])
def test_number_that_is_not_finite_is_refused(value: float, is_exact: bool) -> None:
    found = refusal(answer(SAMPLE.ids, [-0.5, -1.0, value]), is_exact=is_exact, tolerance=math.inf)
    assert found == f"sample 2, token 3: the log-probability is {value}"
    pair = ScoredSample([4, EOS], [7, EOS], [-0.5, -1.0])
    with pytest.raises(ProofFailed, match=f"pair 1, token 2: the log-probability is {value}"):
        comparison(math.inf, is_exact=is_exact).compare_score("pair 1", pair, [-0.5, value])


def test_scores_are_compared_token_by_token() -> None:
    pair = ScoredSample([4, EOS], [7, EOS], [-0.5, -1.0])
    compared = comparison(is_exact=True)
    compared.compare_score("pair 1", pair, [-0.54, -1.0])
    assert compared.found.num_pairs == 1 and compared.found.max_difference == pytest.approx(0.04), "scores need not be exact"
    with pytest.raises(ProofFailed, match=r"token 1: 7 has -0\.56 instead of -0\.5; the tolerance is 0\.05"):
        compared.compare_score("pair 1", pair, [-0.56, -1.0])
    with pytest.raises(ProofFailed, match=r"pair 1, token 1: 7 has -0\.5.* bit for bit"):
        comparison(are_scores_exact=True).compare_score("pair 1", pair, [math.nextafter(-0.5, 0), -1.0])
    with pytest.raises(ProofFailed, match="pair 1 has 2 tokens with 1 log-probabilities"):
        compared.compare_score("pair 1", pair, [-0.5])
