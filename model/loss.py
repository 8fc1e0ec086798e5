"""Label-smoothed cross-entropy over the vocabulary, without ever holding all logits.

At small widths the projection onto the vocabulary is the larger part of a training step. Working through it a few rows at a time,
gradient included, keeps the logits in cache and saves the backward pass a second walk over them.
"""

from typing import Any

import torch
from torch import Tensor

CHUNK_ROWS = 512


class _ProjectedCrossEntropy(torch.autograd.Function):
    """Loss and gradients together: the loss is the last thing computed, so its gradient is only ever scaled."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, smoothing: float) -> Tensor:
        grad_hidden, grad_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        grad_bias = None if bias is None else torch.zeros_like(bias)
        loss = hidden.new_zeros((), dtype=torch.float32)
        vocab_size = weight.shape[0]
        for rows, label, out in zip(*(torch.split(t, CHUNK_ROWS) for t in (hidden, labels, grad_hidden)), strict=True):
            logits = torch.nn.functional.linear(rows, weight, bias)
            log_normaliser = logits.logsumexp(-1, keepdim=True)
            chosen = logits.gather(1, label[:, None])
            loss += (log_normaliser - (1 - smoothing) * chosen - smoothing * logits.mean(-1, keepdim=True)).sum()
            grad = logits.sub_(log_normaliser).exp_().sub_(smoothing / vocab_size)
            grad.scatter_add_(1, label[:, None], torch.full_like(chosen, smoothing - 1))
            torch.mm(grad, weight, out=out)
            grad_weight.addmm_(grad.T, rows)
            if grad_bias is not None:
                grad_bias += grad.sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = grad_outputs
        grads = (None if grad is None else grad * scale for grad in ctx.saved_tensors)
        return (*grads, None, None)


def projected_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, labels: Tensor, pad_id: int, smoothing: float = 0.0
) -> Tensor:
    """Sum of label-smoothed cross-entropies of `hidden @ weight.T + bias`; equal to `F.cross_entropy(..., reduction="sum")`.

    Args:
        hidden: `[..., d_model]`.
        weight: `[V, d_model]`.
        bias: `[V]` or None.
        labels: `[...]` token ids; `pad_id` counts for nothing.
        pad_id: The label to ignore.
        smoothing: Mass spread evenly over all V tokens (Szegedy et al., 2016).

    Returns:
        A scalar in nats, float32.
    """
    is_real = labels != pad_id
    with torch.autocast(hidden.device.type, enabled=False):
        loss: Tensor = _ProjectedCrossEntropy.apply(  # type: ignore[no-untyped-call]
            hidden[is_real].float(), weight, bias, labels[is_real], smoothing
        )
    return loss
