"""Loading of a bundle into an engine on ONNX Runtime: device choice and warm-up."""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING

import numpy as np
import structlog

from dragoman.export.bundle import Bundle, Manifest
from dragoman.export.processor import Platform
from dragoman.server.engine.costs import PACKED, PADDED, Costs, measured
from dragoman.server.engine.engine import Engine
from dragoman.server.engine.search.hypothesis import TargetSide
from dragoman.server.engine.settings import DeviceSettings, Limits
from dragoman.server.runtime.runner import Runner

if TYPE_CHECKING:
    from dragoman.server.runtime.onnx import OnnxScorer

log = structlog.get_logger("dragoman.engine")

# Prompts get this part of `prefill_tokens_per_step`, as they pass all decoder layers: reading 128 tokens takes about as long as two
# steps of 32 rows, 512 as seven, and larger pieces hardly speed up a prompt.
PROMPT_PART = 4


def load_engine(
    bundle: Bundle, limits: Limits, num_threads: int, *, is_warmed_up: bool, device: DeviceSettings | None = None
) -> Engine:
    """Load a bundle's graphs, reserve its caches and, if requested, warm up.

    Raises:
        ImportError: If ONNX Runtime is not installed.
        DeviceError: If the device cannot be used, or the model does not fit.
    """
    manifest = bundle.manifest
    if manifest.has_prompts:
        limits = replace(limits, prefill_tokens_per_step=max(limits.prefill_tokens_per_step // PROMPT_PART, 1))
    runner = load_runner(bundle, limits, num_threads, device or DeviceSettings(), is_warmed_up=is_warmed_up)
    costs = warm_up(runner, manifest) if is_warmed_up else usual_costs(manifest)
    runner.rest()
    log.info("encoder measured", model=manifest.name, is_measured=is_warmed_up, **asdict(costs))
    target = TargetSide(
        manifest.target_vocab_size, manifest.eos_id, manifest.decoder_start_id, manifest.max_target_tokens, manifest.num_choices
    )
    return Engine(runner, limits, target, costs=costs)


def load_runner(bundle: Bundle, limits: Limits, num_threads: int, device: DeviceSettings, *, is_warmed_up: bool) -> Runner:
    """Choose the device, load a bundle's graphs there and, if requested, capture its decode steps; raises as `load_engine`."""
    # Imported here, so that a missing library is reported like any other failure to start.
    from dragoman.server.runtime.providers import choose_device

    manifest = bundle.manifest
    choice = choose_device(device.name, manifest.precision)
    if choice.ordinal is None:
        from dragoman.server.runtime.elastic import Elastic, open_mark
        from dragoman.server.runtime.onnx import OnnxRunner
        from dragoman.server.runtime.weights import Weights

        log.info("device chosen", model=manifest.name, device="cpu", asked_for=device.name, reason=choice.reason)
        weights = Weights.of(bundle, device.weights_cache)
        mark = open_mark(weights.folder)
        elastic = None if mark is None else Elastic(mark, device.wide)
        return OnnxRunner(bundle, limits.max_slots, num_threads, weights, elastic)
    from dragoman.server.runtime.device.cuda import CudaDevice
    from dragoman.server.runtime.device.model import Buckets, DeviceModel
    from dragoman.server.runtime.device.runner import DeviceRunner

    sizes = manifest.num_choices, manifest.max_target_tokens, manifest.max_source_tokens

    def warn(reason: str) -> None:
        """Log once that steps are not replayed."""
        log.warning("CUDA graphs are off, steps are begun one kernel at a time", model=manifest.name, reason=reason)

    runner = DeviceRunner(
        CudaDevice(choice.ordinal),
        DeviceModel.of(bundle.directory, manifest),
        Buckets.of(limits.max_slots, *sizes),
        prefill_tokens=limits.prefill_tokens_per_step,
        max_bytes=device.max_memory_bytes,
        warn=warn,
    )
    log.info("device memory divided", model=manifest.name, slot_bytes=runner.plan.slot_bytes, **runner.memory)
    if is_warmed_up:
        runner.warm_up()
    log.info("device chosen", model=manifest.name, device=runner.device, asked_for=device.name, reason=choice.reason)
    return runner


def platform_of_engine() -> Platform:
    """Return the platform that determines the bits of results on the CPU; raise `ImportError` without ONNX Runtime."""
    from dragoman.export.session import this_platform

    return this_platform()


def load_scorer(bundle: Bundle, num_threads: int, runner: Runner) -> "OnnxScorer":
    """Return the scorer of a bundle, on its runner's device.

    Its graph is not open yet on the CPU, where opening takes long, nor on a GPU if opening fails here, perhaps for lack of memory.
    """
    from dragoman.server.runtime.device.runner import DeviceRunner
    from dragoman.server.runtime.onnx import OnnxRunner, OnnxScorer

    if not isinstance(runner, DeviceRunner):
        return OnnxScorer(bundle, num_threads, weights=runner.weights if isinstance(runner, OnnxRunner) else None)
    scorer = OnnxScorer(bundle, num_threads, runner.open_session)
    try:
        scorer.open()
    except Exception as error:  # retried by `Scoring`, which logs the error
        log.warning("the scorer cannot be loaded yet", model=bundle.manifest.name, reason=str(error))
    return scorer


def warm_up(runner: Runner, manifest: Manifest) -> Costs:
    """Run prefill on a short and a long source, and the decoder on 1, 2, 4 … `max_rows` rows; return the encoder's costs.

    The caches' content from this is never read: a row's length starts at 0 with each request.
    """
    longest = min(64, manifest.max_source_tokens)
    if manifest.has_prompts:  # the prompt shares `max_target_tokens` with the answer
        longest = min(longest, manifest.max_target_tokens - 1)
    for length in (1, longest):
        runner.prefill([[manifest.eos_id] * length], [0])
    num_rows = 1
    while True:
        zeros = np.zeros(num_rows, np.int64)
        runner.step(zeros + manifest.decoder_start_id, zeros, 1)
        if num_rows == runner.max_rows:
            break
        num_rows = min(2 * num_rows, runner.max_rows)
    if runner.holder is None:
        return usual_costs(manifest)

    def encode(lengths: list[int]) -> None:
        runner.prefill([[manifest.eos_id] * length for length in lengths], list(range(len(lengths))))

    return measured(encode, runner.max_rows, manifest.max_source_tokens)


def usual_costs(manifest: Manifest) -> Costs:
    """Return the encoder's costs where they are not measured."""
    return PACKED if manifest.is_packed else PADDED
