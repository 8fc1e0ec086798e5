"""A widened model computes what the narrow one does."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.widened import SHIPPED, base_shape, widen, widened_checkpoint
from dragoman.export.verify import SENTENCES
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.decode import Hypothesis, beam_search, greedy_search
from dragoman.model.networks.transformer import Transformer

NARROW = ModelConfig(
    source_vocab_size=40,
    target_vocab_size=40,
    d_model=16,
    num_heads=2,
    num_encoder_layers=1,
    num_decoder_layers=2,
    encoder_ffn_dim=12,
    decoder_ffn_dim=20,
    max_source_positions=24,
    max_target_positions=20,
    norm="pre",
)
WIDER: dict[str, Any] = {
    "source_vocab_size": 64,
    "target_vocab_size": 64,
    "d_model": 96,
    "num_heads": 4,
    "num_encoder_layers": 3,
    "num_decoder_layers": 3,
    "encoder_ffn_dim": 36,
    "decoder_ffn_dim": 20,
    "positions": "learned",
    "has_output_bias": True,
}
SOURCES = [[3, 4, 5, 6, 39, 12], [7, 8], [9]]


def random_model(**switches: Any) -> Transformer:
    torch.manual_seed(5)
    model = Transformer(replace(NARROW, **switches)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
    return model.double()


def widened(narrow: Transformer, **switches: Any) -> Transformer:
    return widen(narrow, replace(narrow.config, **(WIDER | switches))).double()


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"has_output_bias": True},
        {"is_embedding_scaled": False, "activation": "gelu"},
        {"positions": "learned", "position_offset": 2},
    ],
)
@torch.inference_mode()
def test_logits_of_the_narrow_models_tokens_are_the_same(switches: dict[str, Any]) -> None:
    narrow = random_model(**switches)
    wide = widened(narrow)
    source, lengths = torch.tensor([[3, 4, 5, 1], [7, 1, 0, 0]]), torch.tensor([4, 2])
    target = torch.tensor([[2, 7, 9, 11, 5], [2, 3, 3, 0, 0]])
    logits = wide(source, lengths, target)
    assert logits.shape[-1] == 64
    torch.testing.assert_close(logits[..., :40], narrow(source, lengths, target), atol=1e-5, rtol=0)  # the weights are single
    assert float(logits[..., 40:].max()) < float(logits[..., :40].min()) - 20


def test_answers_are_the_same_and_end() -> None:
    narrow = random_model()
    narrow.decoder.embedding.tokens.weight.data[1] *= 3  # end-of-sequence is likely enough to come
    wide = widened(narrow)

    def answers(model: Transformer) -> list[Hypothesis]:
        beams = beam_search(model, SOURCES, 3, 20, 1.0)
        return [*greedy_search(model, SOURCES, 20), *(hypothesis for beam in beams for hypothesis in beam)]

    ours, theirs = answers(wide), answers(narrow)
    assert [answer.ids for answer in ours] == [answer.ids for answer in theirs]
    assert [answer.score for answer in ours] == pytest.approx([answer.score for answer in theirs], abs=1e-5)
    assert any(len(answer.log_probs) > len(answer.ids) for answer in ours)


@torch.inference_mode()
def test_every_weight_that_was_there_before_is_used() -> None:
    """Layers that are added are the only ones with rows of zeros."""
    wide = widened(random_model())
    silent = {name for name, weight in wide.named_parameters() if weight.dim() == 2 and not weight.any()}
    assert silent == {
        "encoder.layers.1.self_attention.output.weight",
        "encoder.layers.1.feed_forward.outer.weight",
        "encoder.layers.2.self_attention.output.weight",
        "encoder.layers.2.feed_forward.outer.weight",
        "decoder.layers.2.self_attention.output.weight",
        "decoder.layers.2.cross_attention.output.weight",
        "decoder.layers.2.feed_forward.outer.weight",
    }


@pytest.mark.parametrize(
    ("narrow", "wider", "complaint"),
    [
        ({"norm": "post"}, {}, "only a pre-norm model"),
        ({"is_projection_tied": False}, {}, "only a pre-norm model"),
        ({"is_embedding_shared": False}, {}, "only a pre-norm model"),
        ({"has_embedding_norm": True}, {}, "only a pre-norm model"),
        ({}, {"positions": "sinusoidal"}, "learned positions"),
        ({}, {"has_output_bias": False}, "output bias"),
        ({}, {"d_model": 72}, "d_model: 72 is not a multiple of 16"),
        ({}, {"num_heads": 3}, "num_heads: 3 is not a multiple of 2"),
        ({}, {"num_heads": 16}, "head_dim: 6 is not a multiple of 8"),
        ({}, {"decoder_ffn_dim": 30}, "decoder_ffn_dim: 30 is not a multiple of 20"),
        ({}, {"num_decoder_layers": 1}, "num_decoder_layers: 1 is less than 2"),
        ({}, {"source_vocab_size": 30, "target_vocab_size": 30}, "source_vocab_size: 30 is less than 40"),
        ({}, {"activation": "silu"}, "must be the same but for"),
        ({}, {"max_target_positions": 64}, "must be the same but for"),
    ],
)
def test_what_cannot_be_widened_is_refused(narrow: dict[str, Any], wider: dict[str, Any], complaint: str) -> None:
    model = Transformer(replace(NARROW, **narrow))
    with pytest.raises(ValueError, match=complaint):
        widen(model, replace(model.config, **(WIDER | wider)))


def test_the_shipped_model_translates_the_same_at_the_size_of_transformer_base() -> None:
    shipped, wide = Checkpoint.load(SHIPPED), widened_checkpoint()
    config = wide.model.config
    assert config == base_shape(shipped.model.config)
    assert (config.num_encoder_layers, config.num_decoder_layers, config.d_model, config.num_heads) == (6, 6, 512, 8)
    assert (config.encoder_ffn_dim, config.decoder_ffn_dim, config.target_vocab_size) == (2048, 2048, 32_000)
    sources = shipped.tokenizers.source.encode_batch([*SENTENCES[:4], " ".join(SENTENCES[:10])])
    assert len(sources[-1]) > 128
    ours, theirs = (greedy_search(checkpoint.model, sources, 32) for checkpoint in (wide, shipped))
    assert [answer.ids for answer in ours] == [answer.ids for answer in theirs]
    assert sum(len(answer.log_probs) > len(answer.ids) for answer in ours) >= 3  # they end by themselves
    assert [answer.score for answer in ours] == pytest.approx([answer.score for answer in theirs], abs=1e-4)
