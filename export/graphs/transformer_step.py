"""The decode step: `model/networks/transformer.py`'s decoder, with an attention backend that emits ONNX operators.

What goes before is in `transformer_encoder`, the graph that scores in `transformer_scorer`.

Nothing here computes attention: when it is traced (see `tracing`), a layer's attention becomes one node, a
`com.microsoft.GroupQueryAttention` with as many key/value heads as query heads, the one operator of ONNX Runtime with a length per
row and a cache that is updated in place.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dragoman.export.graphs.attention import Biases, Heads, KeyValue, group_query_attention
from dragoman.export.graphs.kinds import Stepping
from dragoman.export.recording import Recorder, axis_size
from dragoman.export.short_head import shortened
from dragoman.export.tensor_names import TensorNames, cross_kv_names, self_kv_names
from dragoman.model.config import ModelConfig
from dragoman.model.networks.positions import RelativeBias
from dragoman.model.networks.transformer import Transformer


class CachedAttention:
    """Backend of the decode step, on rows without a time axis: `[N, H·Dh]` stands for one token of each."""

    def __init__(
        self,
        config: ModelConfig,
        positions: Tensor,
        source_lengths: Tensor,
        self_kv: Sequence[KeyValue],
        cross_kv: Sequence[KeyValue],
    ) -> None:
        """Take each row's position and source length, `[N]`, and per layer the caches `[N, H, T, Dh]` and `[N, H, S, Dh]`."""
        self.heads = Heads.of(config)
        self.self_kv = list(self_kv)
        self.cross_kv = cross_kv
        self.last_positions = positions.to(torch.int32)
        self.last_source_positions = (source_lengths - 1).to(torch.int32)
        self.capacity = axis_size(self_kv[0][0], 2)
        self.source_capacity = axis_size(cross_kv[0][0], 2)
        self.nothing: Tensor | None = None
        self.biases = Biases(positions[:, None], torch.arange(self_kv[0][0].shape[2]))

    def self_attention(self, layer: int, qkv: Tensor, bias: RelativeBias | None) -> Tensor:
        """Write the token's keys and values at its position and attend up to it: `[N, 3·H·Dh]` → `[N, H·Dh]`."""
        lengths, added = (self.last_positions, self.capacity), self.biases.of(bias, qkv.dtype)
        attended, key, value = group_query_attention(
            qkv.unsqueeze(1), (None, None), self.self_kv[layer], *lengths, self.heads, added
        )
        self.self_kv[layer] = key, value
        return attended.squeeze(1)

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """Attend to the source's keys and values, taken as a past to which nothing is added: `[N, H·Dh]` → `[N, H·Dh]`."""
        query = query.unsqueeze(1)
        if self.nothing is None:
            self.nothing = query[:, :0]
        added, past = (self.nothing, self.nothing), self.cross_kv[layer]
        attended = group_query_attention(query, added, past, self.last_source_positions, self.source_capacity, self.heads)[0]
        return attended.squeeze(1)


class StepGraph(Stepping, nn.Module):
    """One token for each of N rows, every row at its own position, to the likeliest next tokens."""

    def __init__(self, model: Transformer, shortlist: Sequence[int] | None = None) -> None:
        """Use a model's own layers; with a shortlist, rising, candidates are its ids alone, see `short_head`."""
        super().__init__()
        self.decoder = model.decoder if shortlist is None else shortened(model.decoder, shortlist)
        self.shortlist = None if shortlist is None else torch.tensor(shortlist)
        self.config: ModelConfig = model.config
        self.tensors = TensorNames.of_layers(model.config.num_decoder_layers)

    def forward(
        self,
        prev_ids: Tensor,
        positions: Tensor,
        src_lens: Tensor,
        num_candidates: Tensor,
        self_kv: list[KeyValue],
        cross_kv: list[KeyValue],
    ) -> tuple[Tensor, ...]:
        """Decode one step.

        Args:
            prev_ids: Each row's last token, `[N]`.
            positions: Where it stands, which is how many tokens the row's cache holds before this step, `[N]`.
            src_lens: Real tokens of each row's source, `[N]`.
            num_candidates: K, `[1]`.
            self_kv: Per layer the caches `[N, H, T, Dh]`.
            cross_kv: Per layer the source's keys and values `[N, H, S, Dh]`.

        Returns:
            The K likeliest ids `[N, K]`, likeliest first and of equals the lower id; their log-probabilities `[N, K]`; and the
            updated caches, keys then values, layer by layer.
        """
        backend = CachedAttention(self.config, positions, src_lens, self_kv, cross_kv)
        hidden = self.decoder(prev_ids, positions, backend)
        log_probs = self.decoder.log_probs(hidden)
        return *self.likeliest(log_probs, num_candidates), *(part for pair in backend.self_kv for part in pair)

    def inputs(self, recorder: Recorder) -> dict[str, Any]:
        """Add the graph's inputs; return them as `forward` takes them."""
        config, dtype = self.config, self.decoder.output_weight.dtype

        def caches(names: Sequence[str], capacity: str) -> list[tuple[Any, ...]]:
            values = [recorder.input(name, ("N", config.num_heads, capacity, config.head_dim), dtype) for name in names]
            return list(zip(values[::2], values[1::2], strict=True))

        return {
            **self.rows(recorder),
            "self_kv": caches(self_kv_names(config.num_decoder_layers), "T"),
            "cross_kv": caches(cross_kv_names(config.num_decoder_layers), "S"),
        }
