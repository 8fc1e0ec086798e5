"""A foreign network laid out as ours: its configuration, and for each of our parameters the tensors it is made of."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dragoman.model.checkpoint import with_weights
from dragoman.model.config import ModelConfig
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.weights import Weights, listed
from dragoman.model.networks.transformer import Transformer, transformer_of


@dataclass(frozen=True, slots=True)
class Source:
    """Where one of our parameters comes from.

    Attributes:
        names: Foreign tensors, one below the other.
        rows: How many of the first rows are taken; None for all.
        make: Makes the parameter where no file has it; then there are no names.
    """

    names: tuple[str, ...] = ()
    rows: int | None = None
    make: Callable[[], Tensor] | None = None


@dataclass(frozen=True, slots=True)
class Layout:
    """A network before its weights are read.

    Attributes:
        config: Ours.
        sources: Each of our parameters by its name in `Transformer.state_dict`.
    """

    config: ModelConfig
    sources: Mapping[str, Source]


def load(layout: Layout, weights: Weights) -> Transformer:
    """Read the weights a layout names; all of them are there and as large as the configuration says, and none is left.

    Raises:
        ForeignError: Naming the file and the tensors that are missing, of another shape, or not used.
    """
    names = [name for source in layout.sources.values() for name in source.names]
    if missing := [name for name in dict.fromkeys(names) if name not in weights]:
        raise ForeignError(f"{weights.path}: {listed(missing)} missing")
    with torch.device("meta"):
        ours = Transformer(layout.config).state_dict()
    assert ours.keys() == layout.sources.keys(), ours.keys() ^ layout.sources.keys()
    for name, parameter in ours.items():
        _check_shapes(layout.sources[name], tuple(parameter.shape), weights)
    if left := [name for name in weights.unread if name not in set(names)]:
        raise ForeignError(f"{weights.path}: {listed(left)}: nothing in this architecture has a use for it")
    made: dict[Source, Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, source in layout.sources.items():
        if source not in made:
            made[source] = _made(source, tuple(ours[name].shape), weights)
        tensors[name] = made[source]
    return transformer_of(with_weights(layout.config, tensors))


def _check_shapes(source: Source, shape: tuple[int, ...], weights: Weights) -> None:
    """Refuse tensors that do not make up a parameter of that shape."""
    for name in source.names:
        found = weights.describe(name)
        expected = (shape[0] // len(source.names), *shape[1:])
        size = found.size[1:] if len(found.size) == len(shape) + 1 and found.size[0] == 1 else found.size  # [1, V] of a bias
        if source.rows is not None and len(size) == len(shape) and size[0] >= source.rows:
            size = (source.rows, *size[1:])
        if size != expected:
            raise ForeignError(f"{found.path}: {name} is {list(found.size)}, where config.json asks for {list(expected)}")


def _made(source: Source, shape: tuple[int, ...], weights: Weights) -> Tensor:
    if source.make is not None:
        return source.make()
    parts = [weights.read(name) for name in source.names]
    if len(parts) > 1:
        return torch.cat(parts)
    whole = parts[0] if source.rows is None else parts[0][: source.rows].clone()
    return whole.reshape(shape)
