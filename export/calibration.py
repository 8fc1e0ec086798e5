"""Which values a model's products take in and its caches hold: what scales are made from, seen in the eager model."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dragoman.export.graphs.transformer_encoder import MemoryProjection
from dragoman.export.quantize import ActivationRange, weight_key
from dragoman.model.decode import greedy_search
from dragoman.model.errors import InputError
from dragoman.model.networks.transformer import DecoderLayer, Transformer
from dragoman.model.text.tokenizer import Tokenizer

BATCH_ROWS = 32
MAX_NEW_TOKENS = 64


def calibration_sources(tokenizer: Tokenizer, texts: Sequence[str], max_source_positions: int) -> list[list[int]]:
    """Return the ids of texts, without end-of-sequence.

    Raises:
        InputError: If there is no text, or one is longer than the model takes, with its line number.
    """
    if not texts:
        raise InputError("there is nothing to calibrate with")
    sources = tokenizer.encode_batch(texts)
    for number, ids in enumerate(sources, start=1):
        if len(ids) >= max_source_positions:
            raise InputError(
                f"line {number}: {len(ids) + 1} tokens, end-of-sequence included; the model takes {max_source_positions}"
            )
    return sources


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a model's numbers were seen to be.

    Attributes:
        inputs: The range of every product's input, by `quantize.Product.key`.
        caches: The largest magnitude in each channel of every cache, `[H, Dh]`, by the cache's name.
    """

    inputs: Mapping[str, ActivationRange]
    caches: Mapping[str, NDArray[np.float32]]


@torch.inference_mode()
def calibrate(model: Transformer, sources: Sequence[list[int]], max_new_tokens: int = MAX_NEW_TOKENS) -> Calibration:
    """Decode sources greedily, run every source and answer through the model once more, and watch.

    Args:
        model: In evaluation mode, single precision.
        sources: Ids without end-of-sequence.
        max_new_tokens: Of an answer.

    Returns:
        What was seen.
    """
    config = model.config
    watcher = _Watcher(model)
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for start in range(0, len(order), BATCH_ROWS):
        batch = [sources[i] for i in order[start : start + BATCH_ROWS]]
        for source, answer in zip(batch, greedy_search(model, batch, max_new_tokens), strict=True):
            ids = torch.tensor([[*source, config.eos_id]])
            inputs = torch.tensor([[config.decoder_start_id, *answer.ids][: config.max_target_positions]])
            with watcher:
                model(ids, torch.tensor([ids.shape[1]]), inputs)
    ranges = watcher.ranges()
    return Calibration(ranges | _of_memory(model, ranges), watcher.cache_ranges())


def _of_memory(model: Transformer, ranges: dict[str, ActivationRange]) -> dict[str, ActivationRange]:
    """Return the range of the product that the encoder's graph makes of those of all layers, which read the same memory."""
    joint = MemoryProjection(model.decoder).weight.numpy()
    first = joint[: len(joint) // model.config.num_decoder_layers]
    return {weight_key(joint.T): ranges[weight_key(first.T)]}


class _Watcher(TorchFunctionMode):
    """Looks at what goes into every linear map that is called while it is entered, and at keys and values that come out."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.num_heads, self.width = model.config.num_heads, model.config.num_heads * model.config.head_dim
        self.caches: dict[tuple[int, tuple[int, ...]], tuple[str, str]] = {}
        for i, layer in enumerate(model.decoder.layers):
            assert isinstance(layer, DecoderLayer)
            own, cross = layer.self_attention, layer.cross_attention
            self.caches[_identity(own.input.weight)] = f"self_k_{i}", f"self_v_{i}"
            self.caches[_identity(cross.input.weight[cross.width :])] = f"cross_k_{i}", f"cross_v_{i}"
        self.largest: dict[str, Tensor] = {}
        self.keys: dict[tuple[int, tuple[int, ...]], str] = {}
        self.lows: dict[str, float] = {}
        self.highs: dict[str, float] = {}
        self.magnitudes: dict[str, list[NDArray[np.float32]]] = {}

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function, and if it is a linear map, look at its input first and then at keys and values."""
        if func is F.linear:
            self._observe(args[0], args[1])
        result = func(*args, **(kwargs or {}))
        if func is F.linear and (names := self.caches.get(_identity(args[1]))) is not None:
            key_value = result[..., -2 * self.width :]  # queries, where there are some, come first
            for name, part in zip(names, key_value.abs().flatten(0, -2).amax(0).chunk(2), strict=True):
                self.largest[name] = part if name not in self.largest else torch.maximum(part, self.largest[name])
        return result

    def ranges(self) -> dict[str, ActivationRange]:
        """Return what was seen."""
        return {
            key: ActivationRange(self.lows[key], self.highs[key], float(np.median(np.concatenate(rows))))
            for key, rows in self.magnitudes.items()
        }

    def cache_ranges(self) -> dict[str, NDArray[np.float32]]:
        """Return what was seen of keys and values, `[H, Dh]` each."""
        return {name: largest.view(self.num_heads, -1).numpy() for name, largest in self.largest.items()}

    def _observe(self, x: Tensor, weight: Tensor) -> None:
        identity = _identity(weight)
        if identity not in self.keys:
            self.keys[identity] = weight_key(weight.numpy().T)
        key = self.keys[identity]
        self.lows[key] = min(self.lows.get(key, 0.0), float(x.min()))
        self.highs[key] = max(self.highs.get(key, 0.0), float(x.max()))
        self.magnitudes.setdefault(key, []).append(x.abs().amax(-1).flatten().numpy())


def _identity(weight: Tensor) -> tuple[int, tuple[int, ...]]:
    return weight.data_ptr(), tuple(weight.shape)
