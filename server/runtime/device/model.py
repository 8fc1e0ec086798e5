"""Dimensions of a model on a device: graphs, caches, and the sizes that steps are padded to."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from dragoman.export.graph_file import BFLOAT16, GraphFile
from dragoman.export.tensors import Cache, Role
from dragoman.server.runtime.device.device import DeviceError

# Beyond 64 rows a step's time grows with its rows, so that gaps of a third are worth a graph.
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
CANDIDATES = (1, 16, 64)
# Attention kernels split work by the buffer's length, not the valid part; below 512 that costs less than a move.
CAPACITIES = (512, 1024, 2048, 4096, 8192)
NO_GRAPH = -1
# Attention kernels would take a cache of one position for the first tokens of a text.
MIN_CAPACITY = 2


@dataclass(frozen=True, slots=True)
class Buckets:
    """Ascending sizes that steps are padded to, so that a graph for each can be captured and replayed.

    The last of `rows` is the number of slots; a step with more than the last of `candidates` (K) runs without a graph. `targets`
    and `sources` are capacities of the self- and cross-attention caches.
    """

    rows: tuple[int, ...]
    candidates: tuple[int, ...]
    targets: tuple[int, ...]
    sources: tuple[int, ...]

    @classmethod
    def of(
        cls,
        max_rows: int,
        num_choices: int,
        max_targets: int,
        max_sources: int,
        rows: Sequence[int] = ROWS,
        capacities: Sequence[int] = CAPACITIES,
    ) -> "Buckets":
        """Return the sizes for a model and a number of rows; each list ends with the largest that is needed."""
        return cls(
            _cut(rows, max_rows),
            tuple(k for k in CANDIDATES if k <= num_choices),
            _cut([size for size in capacities if size >= MIN_CAPACITY], max(max_targets, MIN_CAPACITY)),
            _cut([size for size in capacities if size >= MIN_CAPACITY], max(max_sources, MIN_CAPACITY)),
        )

    def padded_rows(self, num_rows: int) -> int:
        return at_least(self.rows, num_rows)

    def padded_candidates(self, num_candidates: int) -> int:
        """Return the padded K of a step; a K above the largest bucket is not padded."""
        return num_candidates if num_candidates > self.candidates[-1] else at_least(self.candidates, num_candidates)

    def graph_id(self, num_rows: int, num_candidates: int, targets: int, sources: int) -> int:
        """Return the number of a shape's graph, from 1, or `NO_GRAPH`; all arguments but K are sizes of these buckets."""
        if num_candidates not in self.candidates:
            return NO_GRAPH
        place = self.rows.index(num_rows)
        for sizes, size in ((self.candidates, num_candidates), (self.targets, targets), (self.sources, sources)):
            place = place * len(sizes) + sizes.index(size)
        return place + 1  # 0 is ONNX Runtime's default


def padded_sizes(largest: int) -> tuple[int, ...]:
    """Return 1, 2, 3, 4, 6, 8, 12, 16, … up to `largest`; rounding up to one of them adds less than a half."""
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return _cut([size for power in powers for size in (power, power + power // 2)], largest)


def at_least(sizes: Sequence[int], size: int) -> int:
    """Return the smallest of ascending sizes that is at least `size`."""
    assert size <= sizes[-1], f"{size} is more than {sizes[-1]}"
    return sizes[bisect.bisect_left(sizes, size)]


def _cut(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    return (*sorted({size for size in sizes if size < largest}), largest)


@dataclass(frozen=True, slots=True)
class CacheKind:
    """The caches of one role, all of one shape, in one block at equal distances; `cache` is any of them."""

    names: tuple[str, ...]
    cache: Cache
    element_bytes: int

    @classmethod
    def of(cls, caches: Sequence[Cache], role: Role, element_bytes: int) -> "CacheKind":
        """Return a role's caches; raise `DeviceError` if there are none, shapes differ, or one has no axis of positions."""
        alike = [cache for cache in caches if cache.role == role]
        if not alike:
            raise DeviceError(f"the model has no {role}-attention caches, which a device needs; run it with --device cpu")
        for cache in alike:
            if cache.position_axis is None:
                raise DeviceError(f"cache {cache.name} is not indexed by position, which a device needs; run it with --device cpu")
            if cache.shape != alike[0].shape:
                raise DeviceError(
                    f"cache {cache.name} has another shape than {alike[0].name}, and a device keeps one shape a role; "
                    "run it with --device cpu"
                )
        return cls(tuple(cache.name for cache in alike), alike[0], element_bytes)

    @property
    def num_tensors(self) -> int:
        return len(self.names)

    @property
    def num_pieces(self) -> int:
        """Contiguous pieces of one row of one tensor: H for the shape `[H, T, Dh]`."""
        return math.prod(size for size in self.cache.shape[: self.cache.position_axis] if isinstance(size, int))

    @property
    def position_bytes(self) -> int:
        """Size of one position of one piece: Dh numbers for the shape `[H, T, Dh]`."""
        return self.token_bytes // self.num_pieces

    @property
    def token_bytes(self) -> int:
        """Size of one position of all pieces of one tensor."""
        return self.cache.elements_per_position * self.element_bytes

    def shape(self, num_rows: int, capacity: int) -> tuple[int, ...]:
        return num_rows, *self.cache.row_shape(capacity)


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """Dimensions and graphs of a bundle, as in `dragoman.export.manifest.Manifest`."""

    encoder_path: Path
    decoder_path: Path
    precision: str
    caches: Sequence[Cache]
    d_model: int
    target_vocab_size: int
    num_choices: int
    pad_id: int
    eos_id: int
    decoder_start_id: int
    max_source_tokens: int
    max_target_tokens: int

    @classmethod
    def of(cls, directory: Path, manifest: object) -> Self:
        """Return the dimensions of the bundle in a directory; `manifest` is anything with a manifest's attributes."""
        described: dict[str, Any] = {field.name: getattr(manifest, field.name) for field in fields(cls)[2:]}
        return cls(directory / "encoder.onnx", directory / "decoder.onnx", **described)

    @property
    def element_type(self) -> Any:
        """Element type of the caches for ONNX Runtime's bindings: ONNX's number if NumPy has no such type."""
        return {"fp16": np.float16, "bf16": BFLOAT16}.get(self.precision, np.float32)

    @property
    def element_bytes(self) -> int:
        return 2 if self.precision in ("fp16", "bf16") else 4

    @property
    def self_kv(self) -> CacheKind:
        """Self-attention caches, which steps write; raises `DeviceError` if a device cannot hold them."""
        return CacheKind.of(self.caches, "self", self.element_bytes)

    @property
    def cross_kv(self) -> CacheKind:
        """Cross-attention caches, which the encoder fills; raises `DeviceError` if a device cannot hold them."""
        return CacheKind.of(self.caches, "cross", self.element_bytes)

    @property
    def scorer_path(self) -> Path:
        """Path of the scorer's graph, which may be missing."""
        return self.encoder_path.with_name("scorer.onnx")

    @property
    def projection_bytes(self) -> int:
        """Extra memory of an output projection stored in half precision: sessions widen it when opened."""
        return 4 * self.num_choices * self.d_model if self.element_bytes == 2 else 0

    def read_graph(self, path: Path) -> GraphFile:
        """Return the content of a graph's file; raises `BundleError` if it is no graph."""
        return GraphFile.read(path)
