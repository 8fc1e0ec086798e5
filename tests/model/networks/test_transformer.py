"""Promises of a Transformer's switches; rotary positions. Its numbers are compared with Transformers by the importers' tests."""

import math

import pytest
import torch

from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import padding_mask
from dragoman.model.networks.rotary import angles, rotated
from dragoman.model.networks.transformer import Transformer, sinusoids

B, S, T = 3, 7, 6
LENGTHS = torch.tensor([7, 2, 5])


def test_sinusoids_follow_the_paper() -> None:
    table = sinusoids(30, 8)
    for p in range(30):
        for i in range(4):
            angle = p / 10000 ** (2 * i / 8)
            assert table[p, 2 * i : 2 * i + 2].tolist() == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-6)


def test_padding_is_excluded_masked_or_predicted(any_model: Transformer) -> None:
    decoder, config = any_model.decoder, any_model.config
    hidden = torch.randn(2, 3, 16)
    log_probs, logits = decoder.log_probs(hidden), decoder.logits(hidden)
    others = torch.arange(logits.shape[-1]) != config.pad_id
    is_excluded = config.padding == "excluded"
    expected = logits[..., others].log_softmax(-1) if is_excluded else logits.log_softmax(-1)[..., others]
    torch.testing.assert_close(log_probs[..., others], expected, atol=1e-5, rtol=0)
    if config.padding == "predicted":
        assert torch.equal(log_probs, logits.log_softmax(-1))
    else:
        assert (log_probs[..., config.pad_id] == -math.inf).all()


def test_targets_see_only_the_past_padding_is_never_seen_and_every_parameter_learns(any_model: Transformer) -> None:
    source, target = torch.randint(6, 20, (B, S)), torch.randint(6, 20, (B, T))
    logits = any_model(source, LENGTHS, target)
    changed = target.clone()
    changed[:, 3] += 1
    later = any_model(source, LENGTHS, changed)
    torch.testing.assert_close(later[:, :3], logits[:, :3], atol=1e-6, rtol=0)
    assert (later[:, 3] - logits[:, 3]).abs().max() > 1e-3
    other = torch.where(padding_mask(LENGTHS, S), source, source.flip(1) + 1)
    torch.testing.assert_close(any_model(other, LENGTHS, target), logits, atol=1e-6, rtol=0)
    logits.square().mean().backward()
    assert [name for name, parameter in any_model.named_parameters() if parameter.grad is None or not parameter.grad.any()] == []


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_in_training_only(make_model, name) -> None:
    model = make_model(**{name: 0.5})
    source, target = torch.randint(6, 20, (B, S)), torch.randint(6, 20, (B, T))
    assert torch.equal(model(source, LENGTHS, target), model(source, LENGTHS, target))
    model.train()
    assert not torch.equal(model(source, LENGTHS, target), model(source, LENGTHS, target))


def test_weights_keep_their_names(make_model) -> None:
    """Checkpoints in use have these names; a renamed weight could not be loaded."""
    layers = {"num_encoder_layers": 1, "num_decoder_layers": 1, "norm": "pre", "positions": "learned"}
    model = make_model(**layers, has_embedding_norm=True, has_output_bias=True, is_projection_tied=False)
    expected = {"decoder.projection.weight", "decoder.output_bias"}
    for side, kinds in (("encoder", ["self"]), ("decoder", ["self", "cross"])):
        attentions = [f"{kind}_{part}" for kind in kinds for part in ("attention.input", "attention.output", "residual.norm")]
        parts = [f"layers.0.{part}" for part in (*attentions, "feed_forward.inner", "feed_forward.outer", "feed_residual.norm")]
        names = [f"{part}.{kind}" for part in ("embedding.norm", "norm", *parts) for kind in ("weight", "bias")]
        expected |= {f"{side}.{name}" for name in ("embedding.tokens.weight", "embedding.positions", *names)}
    assert set(model.state_dict()) == expected


SIZES = {"source_vocab_size": 23, "target_vocab_size": 23, "max_target_positions": 64, "max_source_positions": 64}
ROTARY = ModelConfig(architecture="decoder", d_model=64, num_heads=4, positions="rotary", rotary_base=100.0, **SIZES)


def test_pairs_of_numbers_are_turned_like_complex_ones() -> None:
    x, positions = torch.randn(2, 4, 5, 16), torch.tensor([0, 3, 1, 40, 41])
    frequencies = torch.tensor([100.0 ** (-i / 8) for i in range(8)], dtype=torch.float64)
    turned = torch.complex(x[..., :8].double(), x[..., 8:].double())
    turned = turned * torch.polar(torch.ones(5, 8, dtype=torch.float64), positions[:, None] * frequencies)
    found = rotated(x, positions, ROTARY)
    torch.testing.assert_close(found, torch.cat((turned.real, turned.imag), -1).float(), atol=1e-5, rtol=0)
    assert torch.equal(found[:, :, 0], x[:, :, 0]), "position 0 is left as it is"
    assert rotated(torch.randn(1, 4, 0, 16), torch.arange(0), ROTARY).shape == (1, 4, 0, 16)


@pytest.mark.parametrize("position", [1, 1000, 100_000])
def test_angles_of_far_positions_are_precise(position: int) -> None:
    """In single precision the angle of a far position would be off by more than its cosine shows."""
    cos, sin = angles(position + 1, 16, 10000.0)
    assert cos.shape == sin.shape == (position + 1, 8)
    for i in range(8):
        angle = torch.tensor(position * 10000.0 ** (-2 * i / 16), dtype=torch.float64)
        assert float(cos[position, i]) == pytest.approx(float(angle.cos()), abs=1e-7)
        assert float(sin[position, i]) == pytest.approx(float(angle.sin()), abs=1e-7)
