"""The runner that the engine uses on a device with memory of its own."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.runtime.device.decoder import DeviceDecoder


class DeviceRunner(DeviceDecoder):
    """See `runner.Runner`. Encoded sources go into rows at once: memory of the device is reckoned and taken before."""

    holder = None
    reader = None

    @property
    def memory(self) -> Mapping[str, int]:
        """See `Runner`."""
        return self.plan.parts(self.budget)

    def step(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Candidates:
        """See `Runner`."""
        return Candidates(*self.decode(tokens, positions, num_candidates))

    def look(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int) -> Candidates:
        """See `Runner`."""
        return Candidates(*self.decode_part(tokens, positions, num_candidates, first_row))

    def open_session(self, path: Path) -> onnxruntime.InferenceSession:
        """Load the scorer on the same device, in the same order of work, within its part of the memory."""
        return self._device.open_session(path, max_arena_bytes=self.budget.scorer, is_captured=False)
