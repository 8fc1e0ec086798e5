"""The scorer on ONNX Runtime: one session of its own, loaded when the first pair comes."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import onnxruntime
from numpy.typing import NDArray

from dragoman.export.bundle import Bundle, BundleError
from dragoman.export.session import open_session

OpenSession = Callable[[Path], onnxruntime.InferenceSession]


class OnnxScorer:
    """See `dragoman.server.engine.scoring.Scorer`. A pair is always computed alone, without padding, so its bits never change."""

    def __init__(self, bundle: Bundle, num_threads: int, open_on_device: OpenSession | None = None) -> None:
        """Remember what to load.

        Args:
            bundle: Opened; what lies in its directory is compared with it again when it is loaded.
            num_threads: Threads of ONNX Runtime's pool, the calling one included.
            open_on_device: Loads the graph elsewhere than on the CPU.
        """
        self._bundle = bundle
        self._num_threads = num_threads
        self._open_on_device = open_on_device
        self._session: onnxruntime.InferenceSession | None = None
        self._error: BundleError | None = None

    @property
    def is_loaded(self) -> bool:
        """Whether the session has been made."""
        return self._session is not None

    def score(
        self, source_ids: Sequence[int], target_ids: Sequence[int], layer: int | None = None
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See `dragoman.server.engine.scoring.Scorer`.

        Raises:
            BundleError: If the bundle has been replaced since it was opened.
        """
        if self._error is not None:
            raise self._error
        if self._session is None:
            self._session = self._load()
        labels = np.array([target_ids], np.int64)
        inputs = {
            "src_ids": np.array([source_ids], np.int64),
            "src_lens": np.array([len(source_ids)], np.int64),
            "tgt_ids": np.array([[self._bundle.manifest.decoder_start_id, *target_ids[:-1]]], np.int64),
            "tgt_lens": np.array([len(target_ids)], np.int64),
            "labels": labels,
        }
        log_probs, attention = self._session.run(["label_log_probs", "attention"], inputs)
        return log_probs[0], attention[0].mean(0) if layer is None else attention[0, layer]

    def _load(self) -> onnxruntime.InferenceSession:
        """Make the session, from the files that the other sessions were made from; if those are gone, they stay gone."""
        bundle = self._bundle
        try:
            found = Bundle.open(bundle.directory).manifest
            if found.files != bundle.manifest.files:
                served = bundle.manifest.version
                raise BundleError(f"{bundle.directory}: is now version {found.version}, but {served} is being served")
        except BundleError as error:
            self._error = error
            raise
        if self._open_on_device is not None:
            return self._open_on_device(bundle.scorer_path)
        return open_session(str(bundle.scorer_path), self._num_threads)
