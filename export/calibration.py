"""Ranges of the inputs of products and of caches, observed in the eager model, from which scales are computed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from dragoman.export.architectures import Products, architecture_of
from dragoman.export.quantize import ActivationRange, weight_key
from dragoman.model.config import ModelConfig
from dragoman.model.decode import greedy_search
from dragoman.model.errors import InputError
from dragoman.model.networks.network import Network
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
    """Observed ranges of a model."""

    inputs: Mapping[str, ActivationRange]  # the range of every product's input, by `quantize.Product.key`
    # The largest magnitude in each channel of every cache, `[H, Dh]`, by the cache's name.
    caches: Mapping[str, NDArray[np.float32]]


@torch.inference_mode()
def calibrate(model: Network, sources: Sequence[list[int]], max_new_tokens: int = MAX_NEW_TOKENS) -> Calibration:
    """Decode sources greedily, run every source and answer through the model once more, and watch.

    Args:
        model: In evaluation mode, single precision.
        sources: Ids without end-of-sequence.
        max_new_tokens: Of an answer.

    Returns:
        What was seen.
    """
    config, architecture = model.config, architecture_of(model.config)
    products = architecture.products(model)
    watcher = _Watcher(config, products)
    order = sorted(range(len(sources)), key=lambda i: len(sources[i]))
    for start in range(0, len(order), BATCH_ROWS):
        batch = [sources[i] for i in order[start : start + BATCH_ROWS]]
        prompts = [model.prompt(source) for source in batch]
        answers = greedy_search(model, batch, max_new_tokens)
        for (source, first), answer in zip(prompts, answers, strict=True):
            inputs = torch.tensor([[first, *answer.ids][: config.room_after(len(source))]])
            with watcher:
                model(torch.tensor([source], dtype=torch.int64), torch.tensor([len(source)]), inputs)
    ranges = watcher.ranges()
    of_joint = {_key(joint): ranges[_key(part)] for joint, part in products.joint}
    return Calibration(ranges | of_joint, watcher.cache_ranges())


class _Watcher(TorchFunctionMode):
    """Looks at what goes into every linear map that is called while it is entered, and at keys and values that come out."""

    def __init__(self, config: ModelConfig, products: Products) -> None:
        super().__init__()
        self.num_heads, self.width = config.num_heads, config.num_heads * config.head_dim
        self.caches = {_identity(weight): names for weight, names in products.caches.items()}
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
            self.keys[identity] = _key(weight)
        key = self.keys[identity]
        self.lows[key] = min(self.lows.get(key, 0.0), float(x.min()))
        self.highs[key] = max(self.highs.get(key, 0.0), float(x.max()))
        self.magnitudes.setdefault(key, []).append(x.abs().amax(-1).flatten().numpy())


def _key(weight: Tensor) -> str:
    """Return the key of the product that multiplies by weights `[M, K]`."""
    return weight_key(weight.detach().numpy().T)


def _identity(weight: Tensor) -> tuple[int, tuple[int, ...]]:
    return weight.data_ptr(), tuple(weight.shape)
