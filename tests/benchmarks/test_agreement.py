"""How two implementations' answers are compared, and what the referee says of them."""

import math

import pytest
import torch

from benchmarks.agreement import Difference, Referee, compare
from dragoman.model.config import ModelConfig
from dragoman.model.decode import beam_search
from dragoman.model.networks.transformer import Transformer

SOURCES = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]
MAX_NEW_TOKENS = 6


@pytest.fixture(scope="module")
def model() -> Transformer:
    torch.manual_seed(0)
    config = ModelConfig(
        source_vocab_size=23,
        target_vocab_size=23,
        d_model=16,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=16,
        max_target_positions=16,
        norm="pre",
        has_output_bias=True,
    )
    model = Transformer(config).eval().double()
    assert model.decoder.output_bias is not None
    model.decoder.output_bias.data[config.eos_id] = 1.5
    return model


@pytest.fixture(scope="module")
def beams(model: Transformer) -> list[list[tuple[list[int], float]]]:
    found = beam_search(model, SOURCES, 3, MAX_NEW_TOKENS, 0.8)
    return [[(hypothesis.ids, hypothesis.score) for hypothesis in beam] for beam in found]


@pytest.fixture(scope="module")
def referee(model: Transformer) -> Referee:
    return Referee(model, SOURCES, MAX_NEW_TOKENS, 0.8)


def test_the_referee_scores_as_the_search_does(referee, beams) -> None:
    """Both those that ended by themselves and those that were cut."""
    answers = [(i, ids, score) for i, beam in enumerate(beams) for ids, score in beam]
    lengths = {len(ids) for _, ids, _ in answers}
    assert MAX_NEW_TOKENS in lengths and len(lengths) > 1
    for i, ids, score in answers:
        assert referee.score(i, ids) == pytest.approx(score, abs=1e-6)


def test_an_implementation_agrees_with_itself(referee, beams) -> None:
    agreement = compare(beams, beams, referee)
    assert (agreement.num_sources, agreement.num_same_beams, agreement.max_score_difference) == (3, 3, 0.0)
    assert agreement.row()["best answers the same"] == "3 of 3 (100.0%)"


def test_a_swap_of_lower_answers_is_no_difference_of_the_best(referee, beams) -> None:
    other = [[beams[0][0], beams[0][2], beams[0][1]], *beams[1:]]
    agreement = compare(beams, other, referee)
    assert (agreement.num_same_beams, agreement.differences) == (2, [])


def test_scores_of_the_same_answer_are_compared(referee, beams) -> None:
    ids, score = beams[1][0]
    other = [beams[0], [(ids, score + 0.25), *beams[1][1:]], beams[2]]
    assert compare(beams, other, referee).max_score_difference == pytest.approx(0.25)


def test_a_worse_best_answer_is_a_difference_and_no_tie(referee, beams) -> None:
    other = [beams[0], beams[1], beams[2][::-1]]
    agreement = compare(beams, other, referee)
    (difference,) = agreement.differences
    assert difference.index == 2 and not difference.is_tie
    assert difference.referee == pytest.approx((beams[2][0][1], beams[2][-1][1]), abs=1e-6)
    row = agreement.row()
    assert (row["differences: ties"], row["others"]) == (0, 1)


@pytest.mark.parametrize(("gap", "is_tie"), [(0.0, True), (5e-5, True), (2e-4, False), (-2e-4, False), (math.inf, False)])
def test_a_tie_is_what_rounding_may_turn_round(gap: float, is_tie: bool) -> None:
    assert Difference(0, ([5], -1.0), ([6], -1.0), (-1.0, -1.0 + gap)).is_tie == is_tie
