"""Promises of a Transformer's switches; rotary positions. Its numbers are compared with Transformers by the importers' tests."""

import math

import pytest
import torch
from transformers.models.t5.modeling_t5 import T5Attention

from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import padding_mask
from dragoman.model.networks.relative import bucket_of
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


@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (8, 12), (4, 3), (6, 20)])
def test_buckets_are_those_of_transformers(buckets: int, farthest: int) -> None:
    """Every distance, also beyond the farthest: a boundary off by one would be lost in a random model's noise."""
    relative = {"relative_buckets": buckets, "relative_max_distance": farthest}
    config = ModelConfig(source_vocab_size=5, target_vocab_size=5, positions="relative", **relative)
    for is_causal in (False, True):
        distances = torch.arange(0 if is_causal else -farthest - 40, farthest + 41)
        expected = T5Attention._relative_position_bucket(
            -distances if is_causal else distances, bidirectional=not is_causal, num_buckets=buckets, max_distance=farthest
        ).tolist()
        assert bucket_of(distances, config, is_causal).tolist() == expected
        clamped = bucket_of(distances.clamp(-farthest, farthest), config, is_causal)
        assert clamped.tolist() == expected, "the table may end at the farthest distance"
