"""A decoder that chooses from some tokens only: it has the rows of the output projection that are theirs, and no others."""

import copy
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import nn

from dragoman.model.networks.layers import Predictor

_Decoder = TypeVar("_Decoder", bound=Predictor)


def shortened(decoder: _Decoder, ids: Sequence[int]) -> _Decoder:
    """Return a decoder with the same layers whose logits are those of some tokens.

    Their values are the bits of the whole projection's; log-probabilities are normalised over these tokens alone.

    Args:
        decoder: Of a model in evaluation mode; it stays as it is.
        ids: Rising; padding is among them.
    """
    rows = torch.tensor(ids)
    short = copy.copy(decoder)
    for registry in ("_parameters", "_buffers", "_modules"):  # a copied module shares these
        short.__dict__[registry] = dict(decoder.__dict__[registry])
    weight = decoder.output_weight.detach()[rows]
    short.projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    short.projection.weight = nn.Parameter(weight, requires_grad=False)
    if decoder.output_bias is not None:
        short.output_bias = nn.Parameter(decoder.output_bias.detach()[rows], requires_grad=False)
    short.padding_logits = decoder.padding_logits[rows]
    short.pad_ids = torch.searchsorted(rows, decoder.pad_ids)
    return short
