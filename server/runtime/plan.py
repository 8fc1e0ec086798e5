"""Plan of a model's engines on the CPU: their number, their threads, and the steps that take all cores.

It is measured once for a model's size and a machine, in a process of its own, and kept beside the shared weights:

    python -m dragoman.server.runtime.plan BUNDLE DIGEST FOLDER NUM_CORES MAX_ENGINES MAX_SLOTS
"""

import asyncio
import contextlib
import hashlib
import sys
import time
from asyncio.subprocess import PIPE
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, NamedTuple

import msgspec
import numpy as np
import structlog
from msgspec import Meta, Struct

from dragoman.export.bundle import Bundle, Manifest
from dragoman.export.processor import processor_identity
from dragoman.extras import installed_version
from dragoman.server.runtime.elastic import WideSteps, open_mark
from dragoman.server.runtime.weights_cache import Cache, CacheError, Entry
from dragoman.server.system import end_with_parent, kill_group, last_line, start_process

if TYPE_CHECKING:
    from dragoman.server.runtime.onnx import OnnxRunner
    from dragoman.server.runtime.runner import Candidates
    from dragoman.server.runtime.weights import Weights

log = structlog.get_logger("dragoman.engine")

FORMAT = 2
PLAN_FILE = "plan.json"
# Time after which a measurement is given up, and what it may wait for before: the weights, and measurements of other models.
MAX_SECONDS, MAX_WAIT_SECONDS = 120.0, 1200.0
# Requests under way for each core, of this many tokens, of which so many steps are measured.
ROWS_PER_CORE, SOURCE_TOKENS, NUM_STEPS = 8, 20, 4
SECONDS_PER_PLAN = 0.1
# Fewer threads are chosen unless more give this much: steps of fewer threads suffer less from other processes.
MIN_GAIN = 1.05
# Part of a narrow step's time that a wide one may take to be worth it. Both are run in turns, at least so often and for so long.
MAX_WIDE_PART, NUM_RUNS, SECONDS_PER_NUM_ROWS = 0.85, 3, 0.04
# Most rows of a wide step: an engine with more is seldom the only one that computes.
MAX_WIDE_ROWS = 16


class Sizes(NamedTuple):
    """Limits of a plan."""

    num_cores: int
    max_engines: int
    max_slots: int  # of an engine


class Plan(Struct, frozen=True, tag=True):
    """Number of engines, threads of each, steps with more threads, and tokens a second by the plans tried (`2 x 1`)."""

    num_replicas: Annotated[int, Meta(ge=1)]
    num_threads: Annotated[int, Meta(ge=1)]
    wide: WideSteps = WideSteps()
    rates: dict[str, float] = {}


class Failure(Struct, frozen=True, tag=True):
    """Reason why models of a size cannot be measured, kept in place of a plan so that it is not tried at each start."""

    reason: str


def known_plan(manifest: Manifest, folder: str, sizes: Sizes) -> Plan | Failure | None:
    """Return the outcome of a measurement for models of this size; None if there was none."""
    try:
        entry = Cache(Path(folder)).find(_name(manifest, sizes))
        return None if entry is None else _read(entry)
    except (CacheError, OSError):
        return None


async def measured_plan(bundle: Bundle, folder: str, sizes: Sizes) -> Plan | None:
    """Return the plan for a model, measured now if it is not known; log and return None where it cannot be."""
    manifest = bundle.manifest
    started = time.monotonic()
    found = await asyncio.to_thread(known_plan, manifest, folder, sizes)
    if isinstance(found, Plan):
        return found
    if found is None:
        reason = await _measure_in_process(bundle, folder, sizes)
        found = await asyncio.to_thread(known_plan, manifest, folder, sizes) or Failure(reason)
    if isinstance(found, Failure):
        log.warning("engines could not be measured, the usual plan is used", model=manifest.name, reason=found.reason)
        return None
    log.info(
        "engines measured",
        model=manifest.name,
        engines_and_threads=f"{found.num_replicas} x {found.num_threads}",
        lone_threads=found.wide.num_threads or found.num_threads,
        tokens_per_second=found.rates,
        seconds=round(time.monotonic() - started, 3),
    )
    return found


async def _measure_in_process(bundle: Bundle, folder: str, sizes: Sizes) -> str:
    """Run `main` in a process; return the reason if it fails."""
    arguments = str(bundle.directory), bundle.digest, folder, *map(str, sizes)
    try:
        process = await start_process("dragoman.server.runtime.plan", *arguments, stdout=asyncio.subprocess.DEVNULL, stderr=PIPE)
    except OSError as error:
        return str(error)
    assert process.stderr is not None
    try:
        async with asyncio.timeout(MAX_WAIT_SECONDS + MAX_SECONDS):
            errors = await process.stderr.read()  # not `communicate`, which would close its input
            code = await process.wait()
        return last_line(errors) or f"its process ended with {code}"
    except TimeoutError:
        return f"it took more than {MAX_WAIT_SECONDS + MAX_SECONDS:.0f} s"
    finally:
        kill_group(process)
        await process.wait()


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


def _read(entry: Entry) -> Plan | Failure:
    path = entry.directory / PLAN_FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=Plan | Failure)
    except msgspec.MsgspecError as error:
        return Failure(f"{path}: {error}; remove it")


def measure(bundle: Bundle, weights: "Weights", sizes: Sizes) -> Plan:
    """Measure plans on all cores; raise `TimeoutError` if that takes too long."""
    from dragoman.server.runtime.onnx import OnnxRunner

    until = time.monotonic() + MAX_SECONDS
    num_cores, max_engines, max_slots = sizes
    rates: dict[tuple[int, int], float] = {}  # by the numbers of engines and of threads
    for num_threads in sorted({num_cores, *(1 << i for i in range(num_cores.bit_length() - 1))}):
        num_engines = min(num_cores // num_threads, max_engines)
        num_rows = min(ROWS_PER_CORE * num_cores // num_engines, max_slots)
        runners = [OnnxRunner(bundle, num_rows, num_threads, weights) for _ in range(num_engines)]
        rates[num_engines, num_threads] = _tokens_per_second(runners, bundle.manifest)
        runners.clear()  # their memory is for the next
        _check_time(until)
    best = max(rates.values())
    num_engines, num_threads = next(plan for plan, rate in rates.items() if rate * MIN_GAIN >= best)
    wide = WideSteps()
    if num_threads < num_cores:
        num_rows = min(MAX_WIDE_ROWS, max_slots)
        narrow, other = (OnnxRunner(bundle, num_rows, num, weights) for num in (num_threads, num_cores))
        if found := _narrow_seconds(narrow, other, bundle.manifest, until):
            wide = WideSteps(num_cores, found)
    by_plan = {f"{engines} x {threads}": round(rate, 1) for (engines, threads), rate in rates.items()}
    return Plan(num_engines, num_threads, wide, by_plan)


def _check_time(until: float) -> None:
    if time.monotonic() >= until:
        raise TimeoutError(f"it takes more than {MAX_SECONDS:.0f} s")


def _tokens_per_second(runners: Sequence["OnnxRunner"], manifest: Manifest) -> float:
    """Return how many tokens engines decode together, with the encoder's part of the time."""

    def warm_up(runner: "OnnxRunner") -> None:
        _prefill(runner, manifest)
        _step(runner, manifest, runner.max_rows, 0)

    def run(runner: "OnnxRunner") -> float:
        num_tokens, started = 0, time.perf_counter()
        while (seconds := time.perf_counter() - started) < SECONDS_PER_PLAN:
            num_tokens += _work(runner, manifest)
        return num_tokens / seconds

    with ThreadPoolExecutor(len(runners)) as pool:
        list(pool.map(warm_up, runners))  # all are warm before the first is measured
        return sum(pool.map(run, runners))


def _work(runner: "OnnxRunner", manifest: Manifest) -> int:
    """Encode a batch of sources, decode tokens, and return the number of these."""
    num_steps = max(min(NUM_STEPS, manifest.max_target_tokens // 2), 1)
    _prefill(runner, manifest)
    for position in range(num_steps):
        _step(runner, manifest, runner.max_rows, position)
    return runner.max_rows * num_steps


def _narrow_seconds(narrow: "OnnxRunner", wide: "OnnxRunner", manifest: Manifest, until: float) -> dict[int, float]:
    """Return the seconds of narrow steps for the numbers of rows where wide ones are faster; raise if their bits differ."""
    for runner in (narrow, wide):
        _prefill(runner, manifest)
    found: dict[int, float] = {}
    num_rows = 1
    while num_rows <= narrow.max_rows:
        seconds: dict[OnnxRunner, list[float]] = {narrow: [], wide: []}
        answers: set[bytes] = set()
        ends = time.perf_counter() + SECONDS_PER_NUM_ROWS
        while len(seconds[wide]) < NUM_RUNS or time.perf_counter() < ends:
            for runner, times in seconds.items():
                started = time.perf_counter()
                candidates = _step(runner, manifest, num_rows, 0)
                times.append(time.perf_counter() - started)
                answers.add(candidates.ids.tobytes() + candidates.log_probs.tobytes())
        if len(answers) > 1:
            raise CacheError("steps of another number of threads have other bits")
        if median(seconds[wide]) <= MAX_WIDE_PART * median(seconds[narrow]):
            found[num_rows] = median(seconds[narrow])
        num_rows *= 2
        _check_time(until)
    return found


def _prefill(runner: "OnnxRunner", manifest: Manifest) -> None:
    # A prompt shares the positions of its row with the answer.
    length = min(SOURCE_TOKENS, manifest.max_target_tokens // 2 if manifest.has_prompts else manifest.max_source_tokens)
    runner.prefill([[manifest.eos_id] * length] * runner.max_rows, list(range(runner.max_rows)))


def _step(runner: "OnnxRunner", manifest: Manifest, num_rows: int, position: int) -> "Candidates":
    zeros = np.zeros(num_rows, np.int64)
    return runner.step(zeros + manifest.decoder_start_id, zeros + position, min(4, manifest.num_choices))


def main() -> None:
    """Measure a plan and keep it, or the reason why that is impossible."""
    from dragoman.server.runtime.weights import Weights

    end_with_parent()
    directory, digest, folder, *sizes = sys.argv[1:]
    limits = Sizes(*map(int, sizes))
    bundle = Bundle.open(Path(directory))
    bundle.refuse_other(digest)
    weights = Weights.of(bundle, folder)
    if weights.folder is None:
        raise CacheError("weights cannot be shared")
    mark = open_mark(weights.folder) or contextlib.nullcontext()

    def make(entry: Path, lock: int) -> None:  # one measurement at a time: they take all cores
        outcome: Plan | Failure
        try:
            with mark:  # engines of other models do not take all cores meanwhile
                outcome = measure(bundle, weights, limits)
        except (TimeoutError, CacheError) as error:  # what would happen again
            outcome = Failure(str(error))
        (entry / PLAN_FILE).write_bytes(msgspec.json.encode(outcome))

    Cache(Path(folder)).find_or_make(_name(bundle.manifest, limits), make, MAX_WAIT_SECONDS)


if __name__ == "__main__":
    main()
