"""Load a bundle into an engine on ONNX Runtime, on the device chosen for it, and warm it up."""

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

PROMPT_PART = 4
"""Of `prefill_tokens_per_step` prompts have one part in so many, for they pass all of the layers that a step passes. To read 128
tokens takes about as long as two steps of 32 rows, and 512 as long as seven, while a prompt as a whole is read hardly faster."""


def load_engine(
    bundle: Bundle, limits: Limits, num_threads: int, *, is_warmed_up: bool, device: DeviceSettings | None = None
) -> Engine:
    """Load a bundle's graphs, reserve its caches and, if asked to, run everything once.

    Raises:
        ImportError: If ONNX Runtime is not installed.
        DeviceError: If the device cannot be used, or the model does not fit.
    """
    manifest = bundle.manifest
    if manifest.has_prompts:
        limits = replace(limits, prefill_tokens_per_step=max(limits.prefill_tokens_per_step // PROMPT_PART, 1))
    runner = load_runner(bundle, limits, num_threads, device or DeviceSettings(), is_warmed_up=is_warmed_up)
    costs = warm_up(runner, manifest) if is_warmed_up else usual_costs(manifest)
    log.info("encoder measured", model=manifest.name, is_measured=is_warmed_up, **asdict(costs))
    target = TargetSide(
        manifest.target_vocab_size, manifest.eos_id, manifest.decoder_start_id, manifest.max_target_tokens, manifest.num_choices
    )
    return Engine(runner, limits, target, costs=costs)


def load_runner(bundle: Bundle, limits: Limits, num_threads: int, device: DeviceSettings, *, is_warmed_up: bool) -> Runner:
    """Choose the device, load a bundle's graphs there and, if asked to, capture its decode steps.

    Raises:
        ImportError: If ONNX Runtime is not installed.
        DeviceError: If the device cannot be used, or the model does not fit.
    """
    # Imported here, so that the absence of a library is said like any other reason not to start.
    from dragoman.server.runtime.providers import choose_device

    manifest = bundle.manifest
    choice = choose_device(device.name, manifest.precision)
    if choice.ordinal is None:
        from dragoman.server.runtime.onnx import OnnxRunner
        from dragoman.server.runtime.weights import Weights

        log.info("device chosen", model=manifest.name, device="cpu", asked_for=device.name, reason=choice.reason)
        return OnnxRunner(bundle, limits.max_slots, num_threads, Weights.of(bundle, device.weights_cache))
    from dragoman.server.runtime.device.cuda import CudaDevice
    from dragoman.server.runtime.device.model import Buckets, DeviceModel
    from dragoman.server.runtime.device.runner import DeviceRunner

    sizes = manifest.num_choices, manifest.max_target_tokens, manifest.max_source_tokens

    def warn(reason: str) -> None:
        """Say once that steps are not replayed."""
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
    """Return what decides the bits that this process's graphs give on the CPU.

    Raises:
        ImportError: If ONNX Runtime is not installed.
    """
    from dragoman.export.session import this_platform

    return this_platform()


def load_scorer(bundle: Bundle, num_threads: int, runner: Runner) -> "OnnxScorer":
    """Return the scorer of a bundle, on the device of its runner.

    On the CPU its graph is still to be opened, which takes as long as opening the other two did. On a device it is opened here, of
    the files that the runner has just read; if that fails, for there may be no memory left, it is still to be opened, too.
    """
    from dragoman.server.runtime.device.runner import DeviceRunner
    from dragoman.server.runtime.onnx import OnnxRunner, OnnxScorer

    if not isinstance(runner, DeviceRunner):
        return OnnxScorer(bundle, num_threads, weights=runner.weights if isinstance(runner, OnnxRunner) else None)
    scorer = OnnxScorer(bundle, num_threads, runner.open_session)
    try:
        scorer.open()
    except Exception as error:  # what it is is known when it has failed again
        log.warning("the scorer cannot be loaded yet", model=bundle.manifest.name, reason=str(error))
    return scorer


def warm_up(runner: Runner, manifest: Manifest) -> Costs:
    """Run the encoder, or what reads prompts, on a short and a long source, and the decoder on 1, 2, 4 … `max_rows` rows.

    Its content of the caches is never read: a row's length starts at 0 with each request.

    Returns:
        Costs of the encoder.
    """
    longest = min(64, manifest.max_source_tokens)
    if manifest.has_prompts:  # which share their room with what follows
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
