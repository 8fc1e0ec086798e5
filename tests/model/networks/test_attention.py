import math

import pytest
import torch
from torch import Tensor, nn

from dragoman.model.networks.attention import (
    AdditiveAttention,
    MultiHeadAttention,
    attend,
    causal_mask,
    dot_product_attention,
    merge_heads,
    padding_mask,
    scaled_dot_product_attention,
    split_heads,
)

B, T, S, H, D = 3, 5, 7, 4, 8


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def attention_by_hand(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """One row, one number at a time, in double precision: `[T, D]`, `[S, D]`, `[S, Dv]`, `[T, S]` → `[T, Dv]`."""
    out = torch.zeros(len(query), value.shape[1], dtype=torch.float64)
    for t, q in enumerate(query.double()):
        weights = [math.exp(float(q @ k) * scale) if mask[t, s] else 0.0 for s, k in enumerate(key.double())]
        for weight, v in zip(weights, value.double(), strict=True):
            out[t] += weight / sum(weights) * v
    return out


def some_mask() -> Tensor:
    """Allow something in every row and forbid something in most."""
    mask = torch.rand(T, S) < 0.5
    mask[torch.arange(T), torch.arange(T)] = True
    return mask


@pytest.mark.parametrize(("attention", "scale"), [(dot_product_attention, 1.0), (scaled_dot_product_attention, D**-0.5)])
@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_follows_its_formula(attention, scale, is_masked) -> None:
    query, key, value = torch.randn(B, T, D), torch.randn(B, S, D), torch.randn(B, S, D + 2)
    mask = some_mask() if is_masked else torch.ones(T, S, dtype=torch.bool)
    expected = torch.stack([attention_by_hand(*row, mask, scale) for row in zip(query, key, value, strict=True)])
    torch.testing.assert_close(attention(query, key, value, mask if is_masked else None).double(), expected, atol=1e-5, rtol=0)


def test_autocast_leaves_attention_in_single_precision_on_a_cpu() -> None:
    query, key, value = torch.randn(3, B, H, T, D)
    with torch.autocast("cpu", torch.bfloat16):
        found = scaled_dot_product_attention(query, key, value)
        assert (query @ key.mT).dtype == torch.bfloat16
    assert torch.equal(found, scaled_dot_product_attention(query, key, value))


def test_causal_flag_equals_causal_mask() -> None:
    query, key, value = torch.randn(3, B, H, T, D)
    by_flag = scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(by_flag, scaled_dot_product_attention(query, key, value, causal_mask(T)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("is_masked", [False, True])
def test_additive_attention_equals_an_explicit_loop(is_masked) -> None:
    attention = AdditiveAttention(query_dim=6, key_dim=9, hidden_dim=5)
    query, key, value = torch.randn(B, T, 6), torch.randn(B, S, 9), torch.randn(B, S, 3)
    mask = some_mask() if is_masked else torch.ones(T, S, dtype=torch.bool)
    w, u, bias, v = attention.query.weight, attention.key.weight, attention.key.bias, attention.energy.weight[0]
    expected = torch.zeros(B, T, 3)
    for b in range(B):
        for t in range(T):
            energies = [torch.exp(v @ torch.tanh(w @ query[b, t] + u @ key[b, s] + bias)) * mask[t, s] for s in range(S)]
            expected[b, t] = sum(energy / sum(energies) * value[b, s] for s, energy in enumerate(energies))
    torch.testing.assert_close(attention(query, key, value, mask if is_masked else None), expected, atol=1e-5, rtol=0)


def test_row_that_may_attend_to_nothing_gives_zeros() -> None:
    scores, value = torch.randn(T, S, requires_grad=True), torch.randn(S, D)
    mask = some_mask()
    mask[2] = False
    out = attend(scores, value, mask)
    assert torch.equal(out[2], torch.zeros(D))
    allowed = torch.arange(T) != 2
    torch.testing.assert_close(out[allowed], attend(scores[allowed], value, mask[allowed]))
    out.sum().backward()
    assert torch.isfinite(scores.grad).all()
    assert not scores.grad[2].any()


def test_not_a_number_in_scores_is_not_hidden() -> None:
    scores = torch.zeros(2, S)
    scores[0, 1] = math.nan
    out = attend(scores, torch.ones(S, 1), torch.ones(2, S, dtype=torch.bool))
    assert out[0].isnan().all()
    torch.testing.assert_close(out[1], torch.ones(1))


def test_masked_positions_cannot_be_seen() -> None:
    query, key, value = torch.randn(B, T, D), torch.randn(B, S, D), torch.randn(B, S, D)
    mask = padding_mask(torch.tensor([4, 4, 4]), S)[:, None, :]
    others = key.clone(), value.clone()
    for changed in others:
        changed[:, 4:] = 1e3
    additive = AdditiveAttention(D, D, 4)
    for attention in (dot_product_attention, scaled_dot_product_attention, additive):
        torch.testing.assert_close(attention(query, *others, mask), attention(query, key, value, mask), atol=1e-6, rtol=0)


def test_padding_mask_allows_the_real_tokens() -> None:
    mask = padding_mask(torch.tensor([1, 3, 4]), 4)
    assert mask.tolist() == [[True, False, False, False], [True, True, True, False], [True] * 4]


def test_causal_mask_allows_self_and_past() -> None:
    assert causal_mask(3).tolist() == [[True, False, False], [True, True, False], [True, True, True]]


def test_merge_heads_undoes_split_heads() -> None:
    x = torch.randn(B, T, H * D)
    heads = split_heads(x, H)
    assert heads.shape == (B, H, T, D)
    assert torch.equal(heads[:, 1], x[..., D : 2 * D])
    assert torch.equal(merge_heads(heads), x)


@pytest.fixture
def both() -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Our multi-head attention and PyTorch's, with the same weights."""
    ours, theirs = MultiHeadAttention(H * D, H), nn.MultiheadAttention(H * D, H, batch_first=True)
    nn.init.normal_(ours.input.bias)
    nn.init.normal_(ours.output.bias)
    names = {
        "in_proj_weight": ours.input.weight,
        "in_proj_bias": ours.input.bias,
        "out_proj.weight": ours.output.weight,
        "out_proj.bias": ours.output.bias,
    }
    theirs.load_state_dict(names)
    return ours, theirs


@pytest.mark.parametrize("kind", ["none", "padding", "causal", "padding and causal"])
def test_multi_head_self_attention_equals_pytorch(both, kind) -> None:
    ours, theirs = both
    x = torch.randn(B, T, H * D)
    padding = padding_mask(torch.tensor([2, 5, 3]), T) if "padding" in kind else torch.ones(B, T, dtype=torch.bool)
    causal = causal_mask(T) if "causal" in kind else torch.ones(T, T, dtype=torch.bool)
    expected, _ = theirs(x, x, x, key_padding_mask=~padding, attn_mask=~causal, need_weights=False)
    mask = None if kind == "none" else padding[:, None, None, :] & causal
    torch.testing.assert_close(ours(x, x, mask), expected, atol=1e-5, rtol=0)


def test_multi_head_cross_attention_equals_pytorch(both) -> None:
    ours, theirs = both
    x, memory = torch.randn(B, T, H * D), torch.randn(B, S, H * D)
    padding = padding_mask(torch.tensor([7, 1, 4]), S)
    expected, _ = theirs(x, memory, memory, key_padding_mask=~padding, need_weights=False)
    torch.testing.assert_close(ours(x, memory, padding[:, None, None, :]), expected, atol=1e-5, rtol=0)


def test_multi_head_gradients_equal_pytorch(both) -> None:
    ours, theirs = both
    x = torch.randn(B, T, H * D)
    ours(x, x, causal_mask(T)).square().sum().backward()
    theirs(x, x, x, attn_mask=~causal_mask(T), need_weights=False)[0].square().sum().backward()
    torch.testing.assert_close(ours.input.weight.grad, theirs.in_proj_weight.grad, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(ours.output.bias.grad, theirs.out_proj.bias.grad, atol=1e-4, rtol=1e-4)


def test_projections_start_xavier_uniform_each_by_itself() -> None:
    attention = MultiHeadAttention(64, 4)
    bound = math.sqrt(6 / 128)
    for block in (*attention.input.weight.chunk(3), attention.output.weight):
        assert 0.95 * bound < float(block.detach().abs().max()) <= bound
    assert not attention.input.bias.any()
    assert not attention.output.bias.any()
