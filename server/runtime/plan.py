"""Plan of a model's engines on the CPU: their number, their threads, and the steps that take all cores.

It is measured once for a model's size and a machine, in a process of its own, and kept beside the shared weights:

    python -m dragoman.server.runtime.plan BUNDLE FOLDER NUM_CORES MAX_ENGINES MAX_SLOTS
"""

import asyncio
import hashlib
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec
import numpy as np
import structlog
from msgspec import Struct

from dragoman.export.bundle import Bundle, Manifest
from dragoman.export.processor import processor_identity
from dragoman.extras import installed_version
from dragoman.server.runtime.elastic import WideSteps
from dragoman.server.runtime.weights_cache import Cache, CacheError, Entry
from dragoman.server.system import last_line, module_command

if TYPE_CHECKING:
    from dragoman.server.runtime.onnx import OnnxRunner
    from dragoman.server.runtime.runner import Candidates
    from dragoman.server.runtime.weights import Weights

log = structlog.get_logger("dragoman.engine")

FORMAT = 1
PLAN_FILE = "plan.json"
# Time after which a measurement is given up.
MAX_SECONDS = 120.0
# Requests under way for each core, of this many tokens, of which so many steps are measured.
ROWS_PER_CORE, SOURCE_TOKENS, NUM_STEPS = 8, 20, 4
SECONDS_PER_PLAN = 0.1
# Fewer threads are chosen unless more give this much: steps of fewer threads suffer less from other processes.
MIN_GAIN = 1.05
# Part of a narrow step's time that a wide one may take to be worth it, and the runs of which each time is the median.
MAX_WIDE_PART, NUM_RUNS = 0.85, 3
# Most rows of a wide step: an engine with more is seldom the only one that computes.
MAX_WIDE_ROWS = 16


class Sizes(NamedTuple):
    """Limits of a plan."""

    num_cores: int
    max_engines: int
    max_slots: int  # of an engine


class Plan(Struct, frozen=True):
    """Number of engines, threads of each, steps with more threads, and tokens a second by the plans tried (`2 x 1`)."""

    num_replicas: int
    num_threads: int
    wide: WideSteps = WideSteps()
    rates: dict[str, float] = {}


def known_plan(manifest: Manifest, folder: str, sizes: Sizes) -> Plan | None:
    """Return the plan that was measured for models of this size; None if there is none."""
    try:
        entry = Cache(Path(folder)).find(_name(manifest, sizes))
        return None if entry is None else _read(entry)
    except (CacheError, OSError, ValueError):
        return None


async def measured_plan(bundle: Bundle, folder: str, sizes: Sizes) -> Plan | None:
    """Return the plan for a model, measured now if it is not known; log and return None where it cannot be."""
    manifest = bundle.manifest
    if (known := await asyncio.to_thread(known_plan, manifest, folder, sizes)) is not None:
        return known
    command, environment = module_command("dragoman.server.runtime.plan", str(bundle.directory), folder, *map(str, sizes))
    process = await asyncio.create_subprocess_exec(
        *command,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    started = time.monotonic()
    try:
        async with asyncio.timeout(MAX_SECONDS):
            _, errors = await process.communicate()
    except TimeoutError:
        errors = f"it took more than {MAX_SECONDS:.0f} s".encode()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    plan = await asyncio.to_thread(known_plan, manifest, folder, sizes)
    if plan is None:
        log.warning("engines could not be measured, the usual plan is used", model=manifest.name, reason=last_line(errors))
    else:
        log.info(
            "engines measured",
            model=manifest.name,
            engines_and_threads=f"{plan.num_replicas} x {plan.num_threads}",
            lone_threads=plan.wide.num_threads or plan.num_threads,
            tokens_per_second=plan.rates,
            seconds=round(time.monotonic() - started, 3),
        )
    return plan


def _name(manifest: Manifest, sizes: Sizes) -> str:
    """Return the name of the entry of models with the same graphs, but for their numbers, on this machine; raise `CacheError`."""
    if not (processor := processor_identity()):
        raise CacheError("this processor does not say what it can do")
    runtimes = [installed_version(package) for package in ("onnxruntime", "onnxruntime-gpu")]
    layers = [manifest.d_model, manifest.num_encoder_layers, manifest.num_decoder_layers, manifest.num_weight_bytes]
    tokens = [manifest.num_choices, manifest.max_target_tokens, manifest.max_source_tokens]
    kind = [manifest.precision, manifest.can_overflow, [cache.shape for cache in manifest.caches], manifest.cache_precision]
    key = msgspec.json.encode([processor, runtimes, sizes, layers, tokens, kind], order="sorted")
    return f"plan-{hashlib.sha256(key).hexdigest()[:16]}-{FORMAT}"


def _read(entry: Entry) -> Plan:
    return msgspec.json.decode((entry.directory / PLAN_FILE).read_bytes(), type=Plan)


def measure(bundle: Bundle, weights: "Weights", sizes: Sizes) -> Plan:
    """Measure plans on all cores."""
    from dragoman.server.runtime.onnx import OnnxRunner

    num_cores, max_engines, max_slots = sizes
    rates: dict[tuple[int, int], float] = {}  # by the numbers of engines and of threads
    for num_threads in sorted({num_cores, *(1 << i for i in range(num_cores.bit_length() - 1))}):
        num_engines = min(num_cores // num_threads, max_engines)
        num_rows = min(ROWS_PER_CORE * num_cores // num_engines, max_slots)
        runners = [OnnxRunner(bundle, num_rows, num_threads, weights) for _ in range(num_engines)]
        rates[num_engines, num_threads] = _tokens_per_second(runners, bundle.manifest)
    best = max(rates.values())
    num_engines, num_threads = next(plan for plan, rate in rates.items() if rate * MIN_GAIN >= best)
    wide = WideSteps()
    if num_threads < num_cores:
        num_rows = min(MAX_WIDE_ROWS, max_slots)
        narrow, other = (OnnxRunner(bundle, num_rows, num, weights) for num in (num_threads, num_cores))
        if found := _narrow_seconds(narrow, other, bundle.manifest):
            wide = WideSteps(num_cores, found)
    by_plan = {f"{engines} x {threads}": round(rate, 1) for (engines, threads), rate in rates.items()}
    return Plan(num_engines, num_threads, wide, by_plan)


def _tokens_per_second(runners: Sequence["OnnxRunner"], manifest: Manifest) -> float:
    """Return how many tokens engines decode together, with the encoder's part of the time."""
    together = threading.Barrier(len(runners), timeout=MAX_SECONDS / 2)

    def run(runner: "OnnxRunner") -> tuple[int, float]:
        _prefill(runner, manifest)
        _step(runner, manifest, runner.max_rows, 0)
        together.wait()
        num_tokens, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < SECONDS_PER_PLAN:
            num_tokens += _work(runner, manifest)
        return num_tokens, seconds

    with ThreadPoolExecutor(len(runners)) as pool:
        return sum(num_tokens / seconds for num_tokens, seconds in pool.map(run, runners))


def _work(runner: "OnnxRunner", manifest: Manifest) -> int:
    """Encode a batch of sources, decode tokens, and return the number of these."""
    num_steps = max(min(NUM_STEPS, manifest.max_target_tokens // 2), 1)
    _prefill(runner, manifest)
    for position in range(num_steps):
        _step(runner, manifest, runner.max_rows, position)
    return runner.max_rows * num_steps


def _narrow_seconds(narrow: "OnnxRunner", wide: "OnnxRunner", manifest: Manifest) -> dict[int, float]:
    """Return the seconds of narrow steps for the numbers of rows where wide ones are faster; raise if their bits differ."""
    for runner in (narrow, wide):
        _prefill(runner, manifest)
    found: dict[int, float] = {}
    num_rows = 1
    while num_rows <= narrow.max_rows:
        seconds: list[float] = []
        answers: list[bytes] = []
        for runner in (narrow, wide):
            times = []
            for _ in range(NUM_RUNS):
                started = time.perf_counter()
                candidates = _step(runner, manifest, num_rows, 0)
                times.append(time.perf_counter() - started)
            seconds.append(sorted(times)[NUM_RUNS // 2])
            answers.append(candidates.ids.tobytes() + candidates.log_probs.tobytes())
        if answers[0] != answers[1]:
            raise CacheError("steps of another number of threads have other bits")
        if seconds[1] <= MAX_WIDE_PART * seconds[0]:
            found[num_rows] = seconds[0]
        num_rows *= 2
    return found


def _prefill(runner: "OnnxRunner", manifest: Manifest) -> None:
    # A prompt shares the positions of its row with the answer.
    length = min(SOURCE_TOKENS, manifest.max_target_tokens // 2 if manifest.has_prompts else manifest.max_source_tokens)
    runner.prefill([[manifest.eos_id] * length] * runner.max_rows, list(range(runner.max_rows)))


def _step(runner: "OnnxRunner", manifest: Manifest, num_rows: int, position: int) -> "Candidates":
    zeros = np.zeros(num_rows, np.int64)
    return runner.step(zeros + manifest.decoder_start_id, zeros + position, min(4, manifest.num_choices))


def main() -> None:
    """Measure and keep a plan."""
    from dragoman.server.runtime.weights import Weights

    directory, folder, sizes = Path(sys.argv[1]), Path(sys.argv[2]), Sizes(*map(int, sys.argv[3:]))
    bundle = Bundle.open(directory)
    weights = Weights.of(bundle, str(folder))
    if weights.folder is None:
        raise CacheError("weights cannot be shared")

    def make(entry: Path, lock: int) -> None:  # one measurement at a time: they take all cores
        (entry / PLAN_FILE).write_bytes(msgspec.json.encode(measure(bundle, weights, sizes)))

    Cache(folder).find_or_make(_name(bundle.manifest, sizes), make, MAX_SECONDS)


if __name__ == "__main__":
    main()
