"""One pass of the eager model over a whole source and target: what the gate compares both the decode step and the scorer with.

Which rows are compared, and how closely, is not here: see `parity` and `scorer_parity`.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dragoman.model.attention import split_heads
from dragoman.model.backend import FullAttention
from dragoman.model.config import ModelConfig
from dragoman.model.relative import RelativeBias
from dragoman.model.transformer import Transformer

Floats = NDArray[np.float32]
CrossKV = list[Floats]
# Positions whose log-probabilities are worked out together, for each product reads the whole vocabulary; and numbers they may be.
MAX_PRODUCT_POSITIONS, MAX_PRODUCT_SIZE = 256, 2**24


class EagerPass:
    """What the eager model makes of one source and target.

    Attributes:
        source: Its ids, end-of-sequence included.
        target: Its ids, end-of-sequence included.
        hidden: Hidden states `[T, d_model]`.
        attention: The decoder's attention to the source, the heads' mean, `[L, T, S]`.
    """

    @torch.inference_mode()
    def __init__(self, model: Transformer, source: Sequence[int], target: Sequence[int], keeps_keys: bool = False) -> None:
        """Run a model in evaluation mode; end-of-sequence is included in both, and `self_kv` asks for keys that are kept."""
        config = model.config
        self.source, self.target = source, target
        memory, mask = model.encode(torch.tensor([source]), torch.tensor([len(source)]))
        backend = _Observer(config, mask, model.decoder.project_memory(memory))
        inputs = torch.tensor([[config.decoder_start_id, *target[:-1]]])
        self.hidden: Tensor = model.decoder(inputs, torch.arange(len(target)), backend)[0]
        self.attention: Floats = torch.stack(backend.weights).numpy()
        self._self_kv = backend.self_kv if keeps_keys else None
        self._decoder = model.decoder
        self._target = torch.tensor(target)
        self._target_log_probs = torch.full((len(target),), torch.nan, dtype=self.hidden.dtype)

    def self_kv(self, stop: int) -> CrossKV:
        """Return the decoder's keys and values of the positions before `stop`, `[H, stop, Dh]`, layer by layer."""
        assert self._self_kv is not None, "its keys were not kept"
        return [part[0, :, :stop].numpy() for part in self._self_kv]

    @torch.inference_mode()
    def log_probs(self, start: int, stop: int) -> Floats:
        """Return the next token's log-probabilities after some positions, `[stop - start, V]`, padding as the model has it."""
        log_probs = self._decoder.log_probs(self.hidden[start:stop])
        self._target_log_probs[start:stop] = log_probs.gather(1, self._target[start:stop, None])[:, 0]
        table: Floats = log_probs.numpy()
        return table

    def target_log_probs(self) -> Floats:
        """Return the log-probabilities of the target's tokens `[T]`; those that `log_probs` has seen need no further product."""
        missing = self._target_log_probs.isnan().nonzero()[:, 0].tolist()
        step = product_positions(self._decoder.output_weight.shape[0])
        for start in range(missing[0], missing[-1] + 1, step) if missing else ():
            self.log_probs(start, min(start + step, missing[-1] + 1))
        found: Floats = self._target_log_probs.numpy()
        return found


def product_positions(vocab_size: int) -> int:
    """Return how many positions' log-probabilities over a vocabulary are worked out together."""
    return max(1, min(MAX_PRODUCT_POSITIONS, MAX_PRODUCT_SIZE // vocab_size))


class _Observer(FullAttention):
    """The eager backend, which keeps the decoder's keys and values, `[1, H, T, Dh]` each, layer by layer.

    It also works out the weights that PyTorch's fused attention keeps to itself, `[T, S]` a layer.
    """

    def __init__(self, config: ModelConfig, source_mask: Tensor, cross_kv: list[tuple[Tensor, Tensor]]) -> None:
        super().__init__(config, source_mask, cross_kv)
        self.self_kv: list[Tensor] = []
        self.weights: list[Tensor] = []

    def self_attention(self, layer: int, qkv: Tensor, bias: RelativeBias | None) -> Tensor:
        """See `AttentionBackend`."""
        self.self_kv += [split_heads(part, self.num_heads) for part in qkv.chunk(3, -1)[1:]]
        return super().self_attention(layer, qkv, bias)

    def cross_attention(self, layer: int, query: Tensor) -> Tensor:
        """See `AttentionBackend`."""
        assert self.cross_kv is not None
        queries, keys = split_heads(query, self.num_heads), split_heads(self.cross_kv[layer][0], self.num_heads)
        scores = torch.einsum("bhtd,bhsd->bhts", queries, keys)
        scores = scores / queries.shape[-1] ** 0.5 if self.scale is None else scores * self.scale
        self.weights.append(scores.softmax(-1)[0].mean(0))
        return super().cross_attention(layer, query)
