"""What calibration cannot see of a model's products by looking at them one by one."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from torch import Tensor

from dragoman.export.graphs.transformer_encoder import MemoryProjection
from dragoman.model.networks.transformer import DecoderLayer, Transformer


@dataclass(frozen=True, slots=True)
class Products:
    """What is known of products beforehand."""

    # Weights that a graph has in one piece, `[n·M, K]`, and their first piece as the model has it, `[M, K]`.
    joint: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    # Weights of products whose last columns are keys and values, and what those two caches are called.
    caches: Mapping[Tensor, tuple[str, str]] = field(default_factory=dict)


def transformer_products(model: Transformer) -> Products:
    """Return a Transformer's: its encoder's graph makes one product of those of all layers, which read the same memory."""
    joint = MemoryProjection(model.decoder).weight
    caches: dict[Tensor, tuple[str, str]] = {}
    for i, layer in enumerate(model.decoder.layers):
        own, cross = cast(DecoderLayer, layer).self_attention, cast(DecoderLayer, layer).cross_attention
        caches[own.input.weight] = f"self_k_{i}", f"self_v_{i}"
        caches[cross.input.weight[cross.width :]] = f"cross_k_{i}", f"cross_v_{i}"
    return Products([(joint, joint[: len(joint) // model.config.num_decoder_layers])], caches)
