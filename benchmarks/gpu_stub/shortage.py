"""A bundle on a device that has less and less memory for what a run computes with; run in the bed.

    python -m benchmarks.gpu_stub run -m benchmarks.gpu_stub.shortage BUNDLE

For each size of the arena beyond the weights it says what a full batch of the longest sources and a full step ended with (`error`,
empty where all went well). `num_refusals` counts the runs that the arena had no room for, after each of which the runner tries a
smaller part; `texts` is what ONNX Runtime said.
"""

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.gpu_stub.exercise import MAX_SLOTS
from benchmarks.gpu_stub.sessions import Sessions
from dragoman.export.bundle import Bundle
from dragoman.server.engine.loading import load_runner
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.settings import DeviceSettings
from dragoman.server.runtime.device import cuda

SPARE = [2**size for size in range(25, 11, -1)]


class TightDevice(cuda.CudaDevice):
    """A CUDA device whose sessions get their weights and a little more, and replay nothing."""

    spare_bytes = 0

    def open_session(self, path: Path, *, max_arena_bytes: int, is_captured: bool) -> onnxruntime.InferenceSession:
        """See `Device`."""
        del max_arena_bytes, is_captured
        weights = sum(file.stat().st_size for file in path.parent.glob("*.weights"))
        return super().open_session(path, max_arena_bytes=2 * weights + self.spare_bytes, is_captured=False)


def with_spare(bundle: Bundle, spare_bytes: int) -> dict[str, Any]:
    """Encode a full batch and decode a full step with so much memory beyond the weights."""
    TightDevice.spare_bytes = spare_bytes
    sessions = Sessions()
    longest = bundle.manifest.max_source_tokens
    error = ""
    try:
        limits = Limits(MAX_SLOTS, 100, 10**6, MAX_SLOTS * longest)
        runner = load_runner(bundle, limits, 1, DeviceSettings(name="cuda"), is_warmed_up=False)
        runner.prefill([[5] * (longest - 1) + [1] for _ in range(MAX_SLOTS)], range(MAX_SLOTS))
        runner.step(np.full(MAX_SLOTS, 3, np.int64), np.zeros(MAX_SLOTS, np.int64), 1)
    except Exception as raised:  # what it is, is what is asked
        error = f"{type(raised).__name__}: {raised}"
    texts = sum((opened.refusals for opened in sessions.finish()), start=Counter[str]())
    return {"spare_bytes": spare_bytes, "error": error, "num_refusals": sum(texts.values()), "texts": sorted(texts)}


def main() -> None:
    """Take memory away from the bundle that the command line names."""
    cuda.CudaDevice = TightDevice  # type: ignore[misc]
    bundle = Bundle.open(Path(sys.argv[1]))
    print(json.dumps([with_spare(bundle, spare_bytes) for spare_bytes in SPARE], indent=2))


if __name__ == "__main__":
    main()
