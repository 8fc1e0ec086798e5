"""The attention family: scaled dot-product, additive and multi-head, and the masks they share.

Masks are boolean and say where attention is *allowed*; they broadcast over the leading axes of the scores `[..., T, S]`.
What keeps keys and values from one step to the next is not here: see `transformer.AttentionBackend`.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def padding_mask(lengths: Tensor, size: int) -> Tensor:
    """Allow the first `lengths[b]` of `size` positions: `[B]` → `[B, size]`."""
    return torch.arange(size, device=lengths.device) < lengths[:, None]


def causal_mask(size: int, device: torch.device | None = None) -> Tensor:
    """Allow each of `size` positions to see itself and what came before it: `[size, size]`."""
    return torch.ones(size, size, dtype=torch.bool, device=device).tril()


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    dropout: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend by softmax(Q Kᵀ / √D) V (Vaswani et al., 2017, equation 1), through PyTorch's fused kernels.

    Autocast does not reach it on a CPU: there its backward pass takes several times as long in bfloat16 as in float32.

    Args:
        query: `[..., T, D]`.
        key: `[..., S, D]`.
        value: `[..., S, Dv]`.
        mask: True where attention is allowed, or what is added to the scores, -inf where it is not; every row must allow something.
        dropout: Probability of dropping an attention weight.
        is_causal: Position t sees positions 0 … t only; needs T = S and no mask.
        scale: What scores are multiplied by in place of 1/√D.

    Returns:
        `[..., T, Dv]`.
    """
    if query.is_cpu and torch.is_autocast_enabled("cpu"):
        with torch.autocast("cpu", enabled=False):
            return F.scaled_dot_product_attention(query.float(), key.float(), value.float(), mask, dropout, is_causal, scale=scale)
    if mask is not None and mask.is_floating_point():
        mask = mask.to(query.dtype)
    return F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal, scale=scale)


class AdditiveAttention(nn.Module):
    """Score by a small network, vᵀ tanh(W q + U k) (Bahdanau et al., 2015), for queries and keys of different widths."""

    def __init__(self, query_dim: int, key_dim: int, hidden_dim: int) -> None:
        """Create W `[hidden, query]`, U `[hidden, key]` and v `[hidden]`; U carries the bias."""
        super().__init__()
        self.query = nn.Linear(query_dim, hidden_dim, bias=False)
        self.key = nn.Linear(key_dim, hidden_dim)
        self.energy = nn.Linear(hidden_dim, 1, bias=False)

    def keys(self, key: Tensor) -> Tensor:
        """Project keys, independently of queries: U k, `[..., S, Dk]` → `[..., S, hidden]`."""
        projected: Tensor = self.key(key)
        return projected

    def scores(self, query: Tensor, keys: Tensor) -> Tensor:
        """Queries `[..., T, Dq]` and what `keys` gave → scores `[..., T, S]`."""
        hidden = torch.tanh(self.query(query).unsqueeze(-2) + keys.unsqueeze(-3))
        return hidden @ self.energy.weight[0]


def split_heads(x: Tensor, num_heads: int) -> Tensor:
    """`[B, T, H·Dh]` → `[B, H, T, Dh]`."""
    heads: Tensor = x.unflatten(-1, (num_heads, -1))  # type: ignore[no-untyped-call]
    return heads.transpose(-3, -2)


def merge_heads(x: Tensor) -> Tensor:
    """`[B, H, T, Dh]` → `[B, T, H·Dh]`."""
    return x.transpose(-3, -2).flatten(-2)


class MultiHeadAttention(nn.Module):
    """The projections of multi-head attention: Concat(head₁ … head_H) Wᴼ (Vaswani et al., 2017, section 3.2.2).

    The three input projections are one matrix `[3·H·Dh, d_model]`, query rows first, so that self-attention needs one product. A
    layer calls the projections and leaves what lies between them to its backend; `forward` is the whole.
    """

    def __init__(self, d_model: int, num_heads: int, width: int | None = None, has_bias: bool = True) -> None:
        """Create both projections with Xavier-uniform weights and zero biases.

        Args:
            d_model: Of the residual stream.
            num_heads: H.
            width: Of all heads side by side (H · Dh); d_model where none is given.
            has_bias: Whether the projections have biases.
        """
        super().__init__()
        self.width = d_model if width is None else width
        self.num_heads = num_heads
        self.input = nn.Linear(d_model, 3 * self.width, has_bias)
        self.output = nn.Linear(self.width, d_model, has_bias)
        for block in (*self.input.weight.chunk(3), self.output.weight):
            nn.init.xavier_uniform_(block)
        if has_bias:
            nn.init.zeros_(self.input.bias)
            nn.init.zeros_(self.output.bias)

    def project_query(self, x: Tensor) -> Tensor:
        """`[B, T, d_model]` → queries of all heads side by side, `[B, T, H·Dh]`."""
        bias: Tensor | None = self.input.bias
        return F.linear(x, self.input.weight[: self.width], None if bias is None else bias[: self.width])

    def project_key_value(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """`[B, S, d_model]` → keys and values of all heads side by side, `[B, S, H·Dh]` each."""
        bias: Tensor | None = self.input.bias
        both = F.linear(x, self.input.weight[self.width :], None if bias is None else bias[self.width :])
        key, value = both.chunk(2, -1)
        return key, value

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor | None = None) -> Tensor:
        """Let `x` `[B, T, d_model]` attend to `memory` `[B, S, d_model]`; the mask broadcasts to `[B, H, T, S]`."""
        projected = (self.project_query(x), *self.project_key_value(memory))
        query, key, value = (split_heads(part, self.num_heads) for part in projected)
        mixed: Tensor = self.output(merge_heads(scaled_dot_product_attention(query, key, value, mask)))
        return mixed
