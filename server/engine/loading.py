"""From a bundle to an engine that runs it on ONNX Runtime."""

from export.bundle import Bundle
from server.engine.engine import Engine
from server.engine.scheduler import Limits
from server.engine.search.search import TargetSide
from server.engine.warmup import warm_up


def load_engine(bundle: Bundle, limits: Limits, num_threads: int, *, is_warmed_up: bool) -> Engine:
    """Load a bundle's graphs, reserve its caches and, if asked to, run everything once.

    Raises:
        ImportError: If ONNX Runtime is not installed.
    """
    from server.runtime.onnx import OnnxRunner  # here, so that its absence is said like any other reason not to start

    manifest = bundle.manifest
    runner = OnnxRunner(bundle, limits.max_slots, num_threads)
    if is_warmed_up:
        warm_up(runner, manifest)
    target = TargetSide(manifest.target_vocab_size, manifest.eos_id, manifest.decoder_start_id, manifest.max_target_tokens)
    return Engine(runner, limits, target)
