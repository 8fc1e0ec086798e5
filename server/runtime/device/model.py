"""A model's dimensions on a device: its graphs, its caches, and the sizes that steps are padded to."""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from dragoman.export.caches import Cache, Role
from dragoman.export.graph_file import BFLOAT16, GraphFile
from dragoman.server.runtime.device.device import DeviceError

# Beyond 64 rows a step's time grows with its rows, so that gaps of a third are worth a graph.
ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
CANDIDATES = (1, 16, 64)
# Attention's kernels split their work by the buffer's length, not by what is valid; below 512 that costs nothing worth a move.
CAPACITIES = (512, 1024, 2048, 4096, 8192)
NO_GRAPH = -1
# A cache of one position would look like the first tokens of a text to attention's kernels.
MIN_CAPACITY = 2


@dataclass(frozen=True, slots=True)
class Buckets:
    """Sizes a step may have.

    Attributes:
        rows: Of the decode batch, rising, the last the most there can be.
        candidates: K, rising; a step that wants more than the last runs as it is, without a graph.
        targets: Positions that self-attention caches are laid out for, rising.
        sources: The same of cross-attention.
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
        """Cut the usual sizes to a model and its number of rows; each list ends with the most that is ever needed."""
        return cls(
            _cut(rows or ROWS, max_rows),
            tuple(k for k in CANDIDATES if k <= num_choices),
            _cut([size for size in capacities or CAPACITIES if size >= MIN_CAPACITY], max(max_targets, MIN_CAPACITY)),
            _cut([size for size in capacities or CAPACITIES if size >= MIN_CAPACITY], max(max_sources, MIN_CAPACITY)),
        )

    def padded_rows(self, num_rows: int) -> int:
        """Return the rows that a step of `num_rows` computes."""
        return at_least(self.rows, num_rows)

    def padded_candidates(self, num_candidates: int) -> int:
        """Return the K that a step asks the decoder for; more than the largest bucket stays what it is."""
        return num_candidates if num_candidates > self.candidates[-1] else at_least(self.candidates, num_candidates)

    def graph_id(self, num_rows: int, num_candidates: int, targets: int, sources: int) -> int:
        """Return the number of a shape's graph, from 1; `NO_GRAPH` for one that is not captured.

        All arguments but K must be sizes of this object.
        """
        if num_candidates not in self.candidates:
            return NO_GRAPH
        place = self.rows.index(num_rows)
        for sizes, size in ((self.candidates, num_candidates), (self.targets, targets), (self.sources, sources)):
            place = place * len(sizes) + sizes.index(size)
        return place + 1  # 0 is what a run has that does not say


def padded_sizes(largest: int) -> tuple[int, ...]:
    """Return few sizes up to a largest one, rising: the powers of two and the halves between them, as 1, 2, 3, 4, 6, 8, 12, 16.

    What is rounded up to one of them grows by less than a half.
    """
    powers = [1 << exponent for exponent in range(largest.bit_length())]
    return _cut([size for power in powers for size in (power, power + power // 2)], largest)


def at_least(sizes: Sequence[int], size: int) -> int:
    """Return the smallest of rising sizes that is not below one."""
    assert size <= sizes[-1], f"{size} is more than {sizes[-1]}"
    return sizes[bisect.bisect_left(sizes, size)]


def _cut(sizes: Sequence[int], largest: int) -> tuple[int, ...]:
    return (*sorted({size for size in sizes if size < largest}), largest)


@dataclass(frozen=True, slots=True)
class CacheKind:
    """Caches of one role, which have one shape.

    Attributes:
        names: Of the tensors, in the graphs' order.
        cache: Any of them.
        element_bytes: Size of a number.
    """

    names: tuple[str, ...]
    cache: Cache
    element_bytes: int

    @classmethod
    def of(cls, caches: Sequence[Cache], role: Role, element_bytes: int) -> "CacheKind":
        """Take the caches of a role from all of a model's.

        Raises:
            DeviceError: If there are none, or one is not as the first, or is not indexed by position; it is named.
        """
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
        """How many there are."""
        return len(self.names)

    @property
    def num_pieces(self) -> int:
        """Pieces of memory that a row of one of them is made of: heads, where the shape is `[H, T, Dh]`."""
        return math.prod(size for size in self.cache.shape[: self.cache.position_axis] if isinstance(size, int))

    @property
    def position_bytes(self) -> int:
        """What one position of one piece takes: Dh numbers, where the shape is `[H, T, Dh]`."""
        return self.token_bytes // self.num_pieces

    @property
    def token_bytes(self) -> int:
        """What one position of all pieces of one tensor takes."""
        return self.cache.elements_per_position * self.element_bytes

    def shape(self, num_rows: int, capacity: int) -> tuple[int, ...]:
        """Return the shape of so many rows with room for `capacity` positions."""
        return num_rows, *self.cache.row_shape(capacity)


@dataclass(frozen=True, slots=True)
class DeviceModel:
    """A model on disk, as its manifest describes it; see `dragoman.export.manifest.Manifest`."""

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
        """Describe a bundle.

        Args:
            directory: Of the bundle.
            manifest: Its manifest, or anything with the same attributes.
        """
        described: dict[str, Any] = {field.name: getattr(manifest, field.name) for field in fields(cls)[2:]}
        return cls(directory / "encoder.onnx", directory / "decoder.onnx", **described)

    @property
    def element_type(self) -> Any:
        """Type of the caches' elements, as ONNX Runtime takes it when it binds memory: ONNX's number where NumPy has none."""
        return {"fp16": np.float16, "bf16": BFLOAT16}.get(self.precision, np.float32)

    @property
    def element_bytes(self) -> int:
        """Size of one of them."""
        return 2 if self.precision in ("fp16", "bf16") else 4

    @property
    def self_kv(self) -> CacheKind:
        """The caches that steps write.

        Raises:
            DeviceError: If a device cannot keep them.
        """
        return CacheKind.of(self.caches, "self", self.element_bytes)

    @property
    def cross_kv(self) -> CacheKind:
        """The caches that the encoder gives.

        Raises:
            DeviceError: If a device cannot keep them.
        """
        return CacheKind.of(self.caches, "cross", self.element_bytes)

    @property
    def scorer_path(self) -> Path:
        """The graph that scores, beside the others; a model may do without one."""
        return self.encoder_path.with_name("scorer.onnx")

    @property
    def projection_bytes(self) -> int:
        """What the output projection takes on top where it is stored in halves: sessions widen it when they are made."""
        return 4 * self.num_choices * self.d_model if self.element_bytes == 2 else 0

    def read_graph(self, path: Path) -> GraphFile:
        """Return what the file of one of the graphs says.

        Raises:
            BundleError: If it is no graph.
        """
        return GraphFile.read(path)
