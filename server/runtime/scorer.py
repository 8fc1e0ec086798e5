"""The scorer on ONNX Runtime: one session of its own, of the files that the engine's sessions were made of."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.export.bundle import Bundle
from dragoman.server.runtime.weights import Weights

OpenSession = Callable[[Path], onnxruntime.InferenceSession]


class OnnxScorer:
    """See `dragoman.server.engine.scoring.Scorer`. A pair is always computed alone, without padding, so its bits never change."""

    def __init__(
        self, bundle: Bundle, num_threads: int, open_on_device: OpenSession | None = None, weights: Weights | None = None
    ) -> None:
        """Remember what to load.

        Args:
            bundle: Opened; what lies in its directory is compared with it again by `check`.
            num_threads: Threads of ONNX Runtime's pool, the calling one included.
            open_on_device: Loads the graph elsewhere than on the CPU.
            weights: Of the runner on the CPU; those in the bundle where they are left out.
        """
        self._bundle = bundle
        self._has_attention = bundle.manifest.attention_layers > 0
        self._num_threads = num_threads
        self._open_on_device = open_on_device
        self._weights = weights or Weights(bundle)
        self._session: onnxruntime.InferenceSession | None = None
        self._running: onnxruntime.RunOptions | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the session has been made."""
        return self._session is not None

    @property
    def is_on_device(self) -> bool:
        """See `Scorer`."""
        return self._open_on_device is not None

    def check(self) -> None:
        """See `Scorer`.

        Raises:
            BundleError: If the bundle is away, or is not the one that was opened.
        """
        self._bundle.check_unchanged()

    def open(self) -> None:
        """See `Scorer`."""
        path = self._bundle.scorer_path
        if self._open_on_device is not None:
            self._session = self._open_on_device(path)
        else:
            # Threads that spin while they wait would take time from decode steps for nothing.
            self._session = self._weights.open(path, self._num_threads, is_spinning=False)

    def score(
        self, source_ids: Sequence[int], target_ids: Sequence[int], layer: int | None = None, decoder_start_id: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `Scorer`."""
        assert self._session is not None, "it has not been opened"
        labels = np.array([target_ids], np.int64)
        start = self._bundle.manifest.decoder_start_id if decoder_start_id is None else decoder_start_id
        inputs = {
            "src_ids": np.array([source_ids], np.int64),
            "src_lens": np.array([len(source_ids)], np.int64),
            "tgt_ids": np.array([[start, *target_ids[:-1]]], np.int64),
            "tgt_lens": np.array([len(target_ids)], np.int64),
            "labels": labels,
        }
        self._running = onnxruntime.RunOptions()
        if not self._has_attention:
            (log_probs,) = self._session.run(["label_log_probs"], inputs, self._running)
            return log_probs[0], np.zeros((len(target_ids), 0), np.float32)
        log_probs, attention = self._session.run(["label_log_probs", "attention"], inputs, self._running)
        return log_probs[0], attention[0].mean(0) if layer is None else attention[0, layer]

    def interrupt(self) -> None:
        """See `Scorer`."""
        if self._running is not None:
            self._running.terminate = True
