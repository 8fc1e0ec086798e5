"""Promises of a Transformer's switches; rotary positions; attention and dropout against formulas and PyTorch's modules."""

import math

import pytest
import torch
from torch import nn
from transformers.models.t5.modeling_t5 import T5Attention

from dragoman.model.config import ModelConfig
from dragoman.model.networks.attention import MultiHeadAttention, causal_mask, padding_mask, scaled_dot_product_attention
from dragoman.model.networks.layers import Dropout
from dragoman.model.networks.positions import angles, bucket_of
from dragoman.model.networks.transformer import Transformer, sinusoids

B, T, S, H, D = 3, 5, 7, 4, 8
LENGTHS = torch.tensor([7, 2, 5])


def test_sinusoids_follow_the_paper() -> None:
    table = sinusoids(30, 8)
    for p in range(30):
        for i in range(4):
            angle = p / 10000 ** (2 * i / 8)
            assert table[p, 2 * i : 2 * i + 2].tolist() == pytest.approx([math.sin(angle), math.cos(angle)], abs=1e-6)


def test_every_parameter_learns(any_model: Transformer) -> None:
    source, target = torch.randint(6, 20, (B, S)), torch.randint(6, 20, (B, T))
    any_model(source, LENGTHS, target).square().mean().backward()
    assert [name for name, parameter in any_model.named_parameters() if parameter.grad is None or not parameter.grad.any()] == []


@pytest.mark.parametrize("name", ["dropout", "attention_dropout", "activation_dropout"])
def test_each_dropout_acts_in_training_only(make_model, name) -> None:
    model = make_model(**{name: 0.5})
    source, target = torch.randint(6, 20, (B, S)), torch.randint(6, 20, (B, T))
    assert torch.equal(model(source, LENGTHS, target), model(source, LENGTHS, target))
    model.train()
    assert not torch.equal(model(source, LENGTHS, target), model(source, LENGTHS, target))


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


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def test_causal_flag_equals_causal_mask_and_autocast_leaves_single_precision() -> None:
    query, key, value = torch.randn(3, B, H, T, D)
    by_flag = scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(by_flag, scaled_dot_product_attention(query, key, value, causal_mask(T)), atol=1e-6, rtol=0)
    with torch.autocast("cpu", torch.bfloat16):
        found = scaled_dot_product_attention(query, key, value)
        assert (query @ key.mT).dtype == torch.bfloat16
    assert torch.equal(found, scaled_dot_product_attention(query, key, value))


@pytest.mark.parametrize("kind", ["none", "padding", "causal", "padding and causal", "cross"])
def test_multi_head_attention_equals_pytorch(kind) -> None:
    ours, theirs = MultiHeadAttention(H * D, H), nn.MultiheadAttention(H * D, H, batch_first=True)
    bound = math.sqrt(6 / (2 * H * D))
    for block in (*ours.input.weight.chunk(3), ours.output.weight):
        assert 0.95 * bound < float(block.detach().abs().max()) <= bound
    assert not ours.input.bias.any() and not ours.output.bias.any()
    nn.init.normal_(ours.input.bias)
    nn.init.normal_(ours.output.bias)
    weights = {"in_proj_weight": ours.input.weight, "in_proj_bias": ours.input.bias}
    theirs.load_state_dict(weights | {"out_proj.weight": ours.output.weight, "out_proj.bias": ours.output.bias})
    x = torch.randn(B, T, H * D)
    memory = torch.randn(B, S, H * D) if kind == "cross" else x
    lengths = torch.tensor([2, 5, 3]) if "padding" in kind or kind == "cross" else torch.tensor([memory.shape[1]] * B)
    padding = padding_mask(lengths, memory.shape[1])
    causal = causal_mask(T) if "causal" in kind else torch.ones(T, memory.shape[1], dtype=torch.bool)
    expected, _ = theirs(x, memory, memory, key_padding_mask=~padding, attn_mask=~causal, need_weights=False)
    found = ours(x, memory, None if kind == "none" else padding[:, None, None, :] & causal)
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(ours.input.weight.grad, theirs.in_proj_weight.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.output.bias.grad, theirs.out_proj.bias.grad, atol=1e-4, rtol=1e-4)


def dropout(p: float) -> Dropout:
    torch.manual_seed(0)
    return Dropout(p).train()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.25, 0.9])
def test_elements_are_dropped_with_their_probability_wherever_they_are_and_the_others_scaled(p, dtype) -> None:
    out = dropout(p)(torch.ones(100_000, 8, dtype=dtype))
    dropped = out == 0
    assert dropped.double().mean(0).tolist() == pytest.approx([p] * 8, abs=0.01)
    together = (dropped[:, :, None] & dropped[:, None, :]).double().mean(0)
    assert together[~torch.eye(8, dtype=torch.bool)].tolist() == pytest.approx([p * p] * 56, abs=0.01)
    assert out[~dropped].unique().tolist() == pytest.approx([1 / (1 - p)], rel=4e-3 if dtype == torch.bfloat16 else 1e-4)


def test_dropout_is_repeated_by_a_seed_passes_gradients_and_takes_any_shape() -> None:
    x, layer = torch.randn(3, 5, 7, requires_grad=True), dropout(0.5)
    first, second = layer(x), layer(x)
    assert not torch.equal(first, second) and torch.equal(dropout(0.5)(x), first)
    first.sum().backward()
    torch.testing.assert_close(x.grad * x, first)
    assert 0 < (x.grad == 0).sum() < x.numel()
    for shape in ((0,), (1,), (3,), (2, 3, 5), ()):
        assert dropout(0.5)(torch.ones(shape)).shape == shape
    assert dropout(0.0)(x) is x and dropout(0.5).eval()(x) is x
    assert dropout(0.9999999)(torch.ones(100_000)).isfinite().all() and str(Dropout(0.1)) == "Dropout(p=0.1)"
