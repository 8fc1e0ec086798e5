"""Label-smoothed cross-entropy over the vocabulary, without ever holding all logits.

At small widths the projection onto the vocabulary is the larger part of a training step. Working through it a few rows at a time,
gradient included, keeps the logits in cache and saves the backward pass a second walk over them. Products are computed in the
precision of the hidden states, everything between them in float32.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 256


class _ProjectedCrossEntropy(torch.autograd.Function):
    """Loss and gradients together: the loss is the last thing computed, so its gradient is only ever scaled.

    Takes hidden states `[P, N, d]` of P passes over the same N labels; with two passes their divergence is part of the loss.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float, divergence_weight: float
    ) -> Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        loss = hidden.new_zeros((), dtype=torch.float32)
        num_passes, vocab_size = hidden.shape[0], weight.shape[0]
        factor, offset = weight.to(hidden.dtype), None if bias is None else bias.to(hidden.dtype)
        chunks = (torch.split(tensor, CHUNK_ROWS // num_passes, -2) for tensor in (hidden, labels[:, None], grad_hidden))
        for rows, label, out in zip(*chunks, strict=True):
            log_probs = torch.nn.functional.linear(rows, factor, offset).float().log_softmax(-1)
            probs = log_probs.exp()
            label = label.expand(num_passes, -1, -1)
            chosen = log_probs.gather(-1, label)
            loss -= ((1 - smoothing) * chosen + smoothing * log_probs.mean(-1, keepdim=True)).sum() / num_passes
            grad = (probs - smoothing / vocab_size).scatter_add_(-1, label, torch.full_like(chosen, smoothing - 1)).div_(num_passes)
            if num_passes == 2:
                divergence, divergence_grad = _symmetric_divergence(log_probs, probs)
                loss += divergence_weight * divergence
                grad.add_(divergence_grad, alpha=divergence_weight)
            flat = grad.flatten(0, 1)
            if grad_bias is not None:
                grad_bias += flat.sum(0)
            flat = flat.to(hidden.dtype)
            out.copy_((flat @ factor).view_as(out))
            grad_weight += flat.T @ rows.flatten(0, 1)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        grads = (None if grad is None else grad * scale for grad in ctx.saved_tensors)
        return (*grads, None, None, None)


def _symmetric_divergence(log_probs: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """Return KL(p || q) + KL(q || p) of rows `[2, n, V]`, summed over n, and its gradient by the logits of both: `[2, n, V]`."""
    difference = log_probs[0] - log_probs[1]
    grad, total = torch.empty_like(probs), log_probs.new_zeros(())
    for i, sign in enumerate((1, -1)):
        own, other = probs[i], probs[1 - i]
        divergence = sign * (own * difference).sum(-1, keepdim=True)
        torch.add(1 - divergence, difference, alpha=sign, out=grad[i]).mul_(own).sub_(other)
        total += divergence.sum()
    return total, grad


def projected_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    pad_id: int,
    smoothing: float = 0.0,
    r_drop: float | None = None,
) -> Tensor:
    """Sum of label-smoothed cross-entropies of `hidden @ weight.T + bias`; equal to `F.cross_entropy(..., reduction="sum")`.

    With `r_drop` it is that of two passes with different dropout, drawn towards each other (R-Drop, Liang et al., 2021). It is half
    of the paper's equation 4, which makes it as large as that of one pass where the two agree: the mean of both passes'
    cross-entropies + r_drop / 4 (KL(p || q) + KL(q || p)).

    Args:
        hidden: `[..., d_model]`; with `r_drop` both passes, `[2, ..., d_model]`.
        weight: `[V, d_model]`.
        bias: `[V]` or None.
        labels: `[...]` token ids, of one pass; `pad_id` counts for nothing.
        pad_id: The label to ignore.
        smoothing: Mass spread evenly over all V tokens (Szegedy et al., 2016).
        r_drop: Weight of the divergence (the paper's alpha); None for a single pass.

    Returns:
        A scalar in nats, float32.
    """
    is_real = labels != pad_id
    passes = hidden[None] if r_drop is None else hidden
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            passes[:, is_real], weight, bias, labels[is_real], smoothing, (r_drop or 0.0) / 4
        )
    return loss
