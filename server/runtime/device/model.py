"""What the device runner must know of a model: its dimensions and where its graphs lie; no bundle is opened here."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import numpy as np

from dragoman.export.caches import Cache
from dragoman.export.graph_file import BFLOAT16, GraphFile
from dragoman.server.runtime.device.kind import CacheKind


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
