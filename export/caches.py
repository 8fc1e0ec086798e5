"""The caches of a decode step as a bundle declares them: name, shape, and which axis is indexed by position.

It imports neither torch nor ONNX: whatever reserves caches asks here.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from dragoman.export.fields import MAX_CACHE_AXES, MAX_CACHES, MAX_WIDTH, CachePrecision, TensorName, Width, shown
from dragoman.export.tensor_names import STEP_INPUTS, STEP_OUTPUTS, cross_kv_names, output_name, self_kv_names

Role = Literal["self", "cross"]
Axis = Width | Literal["T", "S"]

AXES: dict[Role, str] = {"self": "T", "cross": "S"}
"""What the axis of positions is called: of the target in caches that steps write, of the source in those that the encoder gives."""


class Cache(Struct, frozen=True, forbid_unknown_fields=True):
    """One cache of a decode step."""

    name: TensorName  # of the step's input; a cache that steps write is an output, too, which is called `NAME_out`
    role: Role  # whether steps write it ("self") or the encoder gives it and steps only read it ("cross")
    # Of one row: sizes, and at most once "T" (role "self") or "S" (role "cross"), the axis along which each position writes a place
    # of its own. A cache without that axis is a state, which belongs to the last position alone.
    shape: Annotated[list[Axis], Meta(min_length=1, max_length=MAX_CACHE_AXES)]
    # Of its numbers; None for the bundle's own, single precision in one of int8. A cache in 8 bits is an output of the step
    # whatever its role.
    precision: CachePrecision | None = None

    def __post_init__(self) -> None:
        """Refuse a shape that no cache has.

        Raises:
            ValueError: Naming the cache.
        """
        axis, names = AXES[self.role], [size for size in self.shape if isinstance(size, str)]
        if names and names != [axis]:
            raise ValueError(f"shape of {self.name} may have {axis!r} once, not {', '.join(map(repr, names))}")
        if self.elements_per_position > MAX_WIDTH:
            raise ValueError(f"shape of {self.name} has {self.elements_per_position} numbers a position, over {MAX_WIDTH}")

    @property
    def position_axis(self) -> int | None:
        """Which axis of a row is indexed by position; None where there is none."""
        return next((place for place, size in enumerate(self.shape) if isinstance(size, str)), None)

    @property
    def is_output(self) -> bool:
        """Whether it is an output of the decode step, too, bound where its input is."""
        return self.role == "self" or self.precision is not None

    @property
    def elements_per_position(self) -> int:
        """Numbers that a position takes; those of the whole row where no axis is indexed by position."""
        return math.prod(size for size in self.shape if isinstance(size, int))

    def row_shape(self, capacity: int) -> tuple[int, ...]:
        """Return the shape of a row with room for `capacity` positions."""
        return tuple(capacity if isinstance(size, str) else size for size in self.shape)


CacheList = Annotated[list[Cache], Meta(min_length=1, max_length=MAX_CACHES)]


def attention_caches(num_layers: int, num_heads: int, head_dim: int) -> list[Cache]:
    """Return the caches of a Transformer's decoder: `[H, T, Dh]` and `[H, S, Dh]`, keys, then values, layer by layer."""
    return [
        *text_caches(num_layers, num_heads, head_dim),
        *(Cache(name, "cross", [num_heads, "S", head_dim]) for name in cross_kv_names(num_layers)),
    ]


def text_caches(num_layers: int, num_heads: int, head_dim: int) -> list[Cache]:
    """Return the caches of a language model: `[H, T, Dh]`, keys, then values, layer by layer."""
    return [Cache(name, "self", [num_heads, "T", head_dim]) for name in self_kv_names(num_layers)]


def names_of(caches: Sequence[Cache], role: Role) -> list[str]:
    """Return the names of the caches of a role."""
    return [cache.name for cache in caches if cache.role == role]


def state_names(caches: Sequence[Cache]) -> list[str]:
    """Return the names of the caches that the encoder gives once a source, and not for each of its tokens."""
    return [cache.name for cache in caches if cache.role == "cross" and cache.position_axis is None]


def passed_names(caches: Sequence[Cache]) -> list[str]:
    """Return the names of the caches that the encoder gives and that steps have as outputs nevertheless."""
    return [cache.name for cache in caches if cache.role == "cross" and cache.is_output]


def check_caches(caches: Sequence[Cache]) -> None:
    """Refuse caches that cannot be those of one graph.

    Raises:
        ValueError: Naming one.
    """
    if [cache.role for cache in caches] != sorted((cache.role for cache in caches), key=["self", "cross"].index):
        raise ValueError("caches that steps write come before those that the encoder gives")
    taken = {*STEP_INPUTS, *STEP_OUTPUTS}
    for cache in caches:
        names = {cache.name, output_name(cache.name)} if cache.is_output else {cache.name}
        if names & taken:
            raise ValueError(f"caches has {shown(min(names & taken))} twice, or as the name of another tensor")
        taken |= names
