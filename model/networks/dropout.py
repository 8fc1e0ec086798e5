"""Dropout whose random numbers are cheap on every CPU."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEVELS = 2**16


class Dropout(nn.Module):
    """Zero elements with probability `p` and scale the others by 1 / (1 - p) (Srivastava et al., 2014).

    PyTorch draws a number of its own for every element, one after the other on CPUs that are not Intel's, which is a good
    part of a training step. This draws 64 bits at a time from the same generator and decides four elements with them; `p` is
    rounded to a multiple of 1 / 65,536. Other devices keep PyTorch's kernel.
    """

    def __init__(self, p: float) -> None:
        """Take the probability, 0 <= p < 1."""
        super().__init__()
        self.p = p

    def extra_repr(self) -> str:
        """Name the probability where the module is printed."""
        return f"p={self.p}"

    def forward(self, x: Tensor) -> Tensor:
        """`[...]` → `[...]`."""
        if not self.training or not self.p:
            return x
        if not x.is_cpu:
            return F.dropout(x, self.p)
        dropped = min(round(self.p * LEVELS), LEVELS - 1)
        words = torch.empty(-(-x.numel() // 4), dtype=torch.int64).random_(-(2**63), None)
        draws = words.view(torch.int16)[: x.numel()].view(x.shape)
        return x * ((draws >= dropped - LEVELS // 2).to(x.dtype) * (LEVELS / (LEVELS - dropped)))
