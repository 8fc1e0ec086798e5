"""Our weights in Transformers' models: the same logits, and refusals of what they cannot hold."""

from typing import Any

import pytest
import torch

from dragoman.model.config import ModelConfig
from dragoman.model.decode import beam_search, greedy_search
from dragoman.model.networks.transformer import Transformer
from tests.oracles.transformers_model import generate, to_transformers

SMALL: dict[str, Any] = {
    "source_vocab_size": 23,
    "target_vocab_size": 23,
    "d_model": 16,
    "num_heads": 4,
    "num_encoder_layers": 2,
    "num_decoder_layers": 3,
    "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 20,
    "max_source_positions": 16,
    "max_target_positions": 16,
}
SOURCES = [[3, 4, 5, 6], [7, 8], [9]]


def random_model(**switches: Any) -> Transformer:
    torch.manual_seed(3)
    model = Transformer(ModelConfig(**SMALL | switches)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
    return model.double()


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"norm": "pre"},
        {"norm": "pre", "has_output_bias": True, "activation": "gelu"},
        {"positions": "learned"},
        {"norm": "pre", "positions": "learned", "position_offset": 2},
    ],
)
@torch.inference_mode()
def test_logits_are_the_same(switches: dict[str, Any]) -> None:
    ours = random_model(**switches)
    source, target = torch.tensor([SOURCES[0]]), torch.tensor([[2, 7, 9, 11]])
    theirs = to_transformers(ours)(input_ids=source, decoder_input_ids=target).logits
    logits = ours(source, torch.tensor([source.shape[1]]), target)
    torch.testing.assert_close(logits[..., 1:], theirs[..., 1:], atol=1e-9, rtol=0)


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_answers_and_scores_are_the_same(norm: str) -> None:
    ours = random_model(norm=norm)
    theirs = to_transformers(ours)
    for beam, found in zip(beam_search(ours, SOURCES, 3, 8, 0.7), generate(theirs, SOURCES, 3, 0.7, 8), strict=True):
        assert [hypothesis.ids for hypothesis in beam] == [ids for ids, _ in found]
        assert [hypothesis.score for hypothesis in beam] == pytest.approx([score for _, score in found], abs=1e-5)
    for hypothesis, ((ids, score),) in zip(greedy_search(ours, SOURCES, 8), generate(theirs, SOURCES, 1, 1.0, 8), strict=True):
        assert (hypothesis.ids, hypothesis.score) == (ids, pytest.approx(score, abs=1e-5))


@pytest.mark.parametrize(
    "switches",
    [
        {"is_projection_tied": False},
        {"is_embedding_shared": False},
        {"has_embedding_norm": True},
        {"max_target_positions": 32},
        {"norm_epsilon": 1e-6},
    ],
)
def test_what_they_cannot_hold_is_refused(switches: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Marian and Pegasus"):
        to_transformers(random_model(**switches))
