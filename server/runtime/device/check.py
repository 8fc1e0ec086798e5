"""`dragoman gpu-check`: tries everything that serving a bundle on a GPU needs, in order, until nothing further can be tried."""

import ctypes
import math
import os
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dragoman.export.bundle import Bundle, BundleError
from dragoman.extras import installed_version
from dragoman.server.runtime.device.device import Device, DeviceError
from dragoman.server.runtime.device.memory import GIB
from dragoman.server.runtime.device.model import Buckets, DeviceModel
from dragoman.server.runtime.device.runner import DeviceRunner
from dragoman.server.runtime.device.steps import Shape
from dragoman.server.runtime.onnx import OnnxScorer
from dragoman.server.runtime.providers import (
    driver_obstacle,
    driver_versions,
    library_obstacle,
    wheel_obstacle,
)
from dragoman.server.runtime.runner import Candidates

# Makes ONNX Runtime print the kernel of each attention node.
KERNEL_VARIABLE = "ORT_ENABLE_ATTENTION_KERNEL_DEBUG_INFO"
_KERNEL = re.compile(r"Operator=(\w+) Node=(\S+) .*?SdpaKernel=(\w+)")
MIN_CAPABILITY = (8, 0)
SOURCE_TOKENS = 5
AGAIN = "Export the checkpoint again with this release."
FEWER_SLOTS = "Serve with fewer slots (--max-slots), or free memory of the device."
OVER_PLAN = "More is taken than planned: lower --gpu-memory-gib by the difference, and report it."
WITHOUT_GRAPHS = "Serving works without graphs, more slowly."
REPORT = "This is a bug of ours or of ONNX Runtime: report it with this output and the versions that `pip freeze` says."


@dataclass(frozen=True, slots=True)
class Finding:
    """One output line: name and result of a check, details, and advice if it failed."""

    name: str
    is_good: bool
    text: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{'ok  ' if self.is_good else 'FAIL'}  {self.name}: {self.text}{f'. {self.advice}' if self.advice else ''}"


@dataclass(frozen=True, slots=True)
class Wanted:
    """Server settings for the check; see `DeviceRunner`."""

    max_slots: int = 64
    prefill_tokens: int = 512
    max_bytes: int = 0


class GpuCheck:
    """Check of one bundle on one device."""

    def __init__(self, directory: Path, open_device: Callable[[], Device], wanted: Wanted) -> None:
        self._directory, self._open_device, self._wanted = directory, open_device, wanted
        self._kernels: dict[str, Counter[str]] = {}
        self._free_before = 0

    def run(self) -> Iterator[Finding]:
        """Yield the findings, each as soon as it is known."""
        try:
            bundle = Bundle.open(self._directory)
        except BundleError as error:
            yield Finding("bundle", False, _one_line(error), "" if "export the checkpoint again" in str(error) else AGAIN)
            return
        manifest = bundle.manifest
        if manifest.is_packed:
            advice = "Export the checkpoint with --precision fp16 or bf16."
            yield Finding("bundle", False, f"{manifest.name} is {manifest.precision}, which is for the CPU", advice)
            return
        yield Finding("bundle", True, f"{manifest.name} version {manifest.version}, {manifest.precision}; its attention is CUDA's")
        try:
            device = self._open_device()
        except (DeviceError, MemoryError) as error:
            yield Finding("device", False, _one_line(error), "See whether another process holds the device (nvidia-smi).")
            return
        self._free_before = device.available_bytes()
        yield _device_finding(device, self._free_before)
        with _standard_output():  # options are printed there, too
            found, runner = self._load(bundle, device)
        yield found
        if runner is not None:
            yield from self._use(bundle, device, runner)

    def _load(self, bundle: Bundle, device: Device) -> tuple[Finding, DeviceRunner | None]:
        """Load the graphs and reserve the memory, as the server does."""
        manifest, wanted = bundle.manifest, self._wanted
        sizes = manifest.num_choices, manifest.max_target_tokens, manifest.max_source_tokens
        try:
            runner = DeviceRunner(
                device,
                DeviceModel.of(bundle.directory, manifest),
                Buckets.of(wanted.max_slots, *sizes),
                prefill_tokens=wanted.prefill_tokens,
                max_bytes=wanted.max_bytes,
                is_ahead=False,
            )
        except (DeviceError, MemoryError) as error:
            return Finding("load", False, _one_line(error), FEWER_SLOTS), None
        except Exception as error:  # ONNX Runtime's errors have no narrower base
            return Finding("load", False, _one_line(error), REPORT), None
        parts = ", ".join(f"{name} {_gib(size)}" for name, size in runner.memory.items() if size)
        return Finding("load", True, f"{wanted.max_slots} slots; the plan: {parts}"), runner

    def _use(self, bundle: Bundle, device: Device, runner: DeviceRunner) -> Iterator[Finding]:
        """Try each operation of serving once."""
        tries: tuple[tuple[str, Callable[[], tuple[str, str]]], ...] = (
            ("encode", lambda: self._encode(runner, bundle)),
            ("step", lambda: self._step(runner, bundle)),
            ("capture", lambda: self._capture(runner)),
            ("replay", lambda: self._replay(runner, bundle)),
            ("score", lambda: self._score(runner, bundle)),
            ("attention", self._attention),
            ("memory", lambda: self._memory(device, runner)),
        )
        for name, do in tries:
            try:
                with _standard_output() as said:
                    text, advice = do()
                self._kernels[name] = kernels_of(said())
            except Exception as error:  # ONNX Runtime's errors have no narrower base
                text, advice = _one_line(error), REPORT
            yield Finding(name, not advice, text, advice)

    def _encode(self, runner: DeviceRunner, bundle: Bundle) -> tuple[str, str]:
        num_rows = min(2, runner.max_rows)
        runner.prefill(_sources(bundle, num_rows), list(range(num_rows)))
        return f"{num_rows} sources of different lengths", ""

    def _step(self, runner: DeviceRunner, bundle: Bundle) -> tuple[str, str]:
        found = _decode(runner, bundle, min(2, runner.max_rows), 1)
        is_right = _is_plausible(found, bundle.manifest.target_vocab_size)
        return "probabilities are finite and below 1" if is_right else f"log-probabilities {found.log_probs.tolist()}", (
            "" if is_right else "Try bf16 if activations may be beyond 65504; else report it."
        )

    def _capture(self, runner: DeviceRunner) -> tuple[str, str]:
        shapes = _some_shapes(runner)
        for shape in shapes:
            runner.capture(shape)
        if runner.graphs.is_disabled:
            return _one_line(runner.graphs.reason), WITHOUT_GRAPHS
        is_whole = all(shape in runner.graphs for shape in shapes)
        text = f"{runner.graphs.num_captured} steps"
        return text if is_whole else f"memory is too short for some of them, {text} are captured", "" if is_whole else FEWER_SLOTS

    def _replay(self, runner: DeviceRunner, bundle: Bundle) -> tuple[str, str]:
        """Compare captured steps with the same steps without graphs, bit by bit."""
        shapes = [shape for shape in _some_shapes(runner) if shape in runner.graphs]
        for shape in shapes:
            sources = _sources(bundle, shape.num_rows)
            runner.prefill(sources, list(range(len(sources))))
            replayed = _decode(runner, bundle, shape.num_rows, shape.num_candidates)
            with runner.graphs.ignored():
                plain = _decode(runner, bundle, shape.num_rows, shape.num_candidates)
            if (replayed.ids.tobytes(), replayed.log_probs.tobytes()) != (plain.ids.tobytes(), plain.log_probs.tobytes()):
                return f"{shape.num_rows} rows and {shape.num_candidates} candidates differ", REPORT
        return f"{len(shapes)} steps have the bits of plain ones" if shapes else "nothing is captured", ""

    def _score(self, runner: DeviceRunner, bundle: Bundle) -> tuple[str, str]:
        scorer = OnnxScorer(bundle, 1, runner.open_session)
        scorer.open()
        (source,) = _sources(bundle, 1)
        log_probs, attention = scorer.score(source, source[-2:])
        is_right = bool(np.isfinite(log_probs).all() and (log_probs <= 0).all() and np.isfinite(attention).all())
        return f"a pair has log-probability {float(log_probs.sum()):.2f}", "" if is_right else REPORT

    def _attention(self) -> tuple[str, str]:
        """Return the kernels that compute attention, as far as ONNX Runtime printed them."""
        kernels = ", ".join(
            f"{kernel} in {count} nodes ({name})"
            for name in ("encode", "step", "score")
            for kernel, count in sorted(self._kernels.get(name, Counter()).items())
        )
        return kernels or "ONNX Runtime did not say which kernels it chose", ""

    def _memory(self, device: Device, runner: DeviceRunner) -> tuple[str, str]:
        device.synchronize()
        free = device.available_bytes()
        taken, allowed = self._free_before - free, runner.budget.allowed
        text = f"{_gib(self._free_before)} free before, {_gib(free)} after; {_gib(allowed)} may be taken"
        return (
            text,
            "" if taken <= allowed else OVER_PLAN,
        )


def cuda_findings(ordinal: int) -> Iterator[Finding]:
    """Check libraries and driver before a device is opened: one line if there is no GPU."""
    if obstacle := wheel_obstacle():
        yield Finding("libraries", False, obstacle)
    elif obstacle := driver_obstacle(ordinal):
        yield Finding("driver", False, f"no GPU can be used: {obstacle}")
    else:
        yield Finding("driver", True, f"cuda:{ordinal} is there, {driver_versions()}")
        obstacle = library_obstacle()
        text = obstacle or f"onnxruntime-gpu {installed_version('onnxruntime-gpu')} and all of CUDA that it needs"
        yield Finding("libraries", not obstacle, text)


def _device_finding(device: Device, free: int) -> Finding:
    capability = device.compute_capability
    if capability is None:
        return Finding("device", True, f"{device.name}, {_gib(free)} free")
    text = f"{device.name}, compute capability {capability[0]}.{capability[1]}, {_gib(free)} free"
    is_good = capability >= MIN_CAPABILITY
    return Finding("device", is_good, text, "" if is_good else "It takes 8.0 or more; use another device.")


def kernels_of(said: str) -> Counter[str]:
    """Count attention nodes by kernel in ONNX Runtime's output."""
    chosen = {(node, kernel) for _, node, kernel in _KERNEL.findall(said)}
    return Counter(kernel for _, kernel in chosen)


def _sources(bundle: Bundle, count: int) -> list[list[int]]:
    """Return sources of different lengths, of common tokens."""
    manifest = bundle.manifest
    longest = min(SOURCE_TOKENS, manifest.max_source_tokens)
    tokens = [token for token in range(min(64, manifest.source_vocab_size)) if token not in (manifest.pad_id, manifest.eos_id)]
    lengths = [max(1, longest - i % 3) for i in range(count)]
    return [[*(tokens[(i + j) % len(tokens)] for j in range(length - 1)), manifest.eos_id] for i, length in enumerate(lengths)]


def _some_shapes(runner: DeviceRunner) -> list[Shape]:
    """Return the largest, a middle and the smallest shape of steps."""
    shapes = runner.graphs.at_start()
    return list(dict.fromkeys((shapes[0], shapes[len(shapes) // 2], shapes[-1])))


def _decode(runner: DeviceRunner, bundle: Bundle, num_rows: int, num_candidates: int) -> Candidates:
    """Decode the first token of every row, into new arrays."""
    tokens: NDArray[np.int64] = np.full(num_rows, bundle.manifest.decoder_start_id, np.int64)
    return runner.step(tokens, np.zeros(num_rows, np.int64), num_candidates).kept(num_candidates)


def _is_plausible(found: Candidates, vocabulary: int) -> bool:
    ids, log_probs = found.ids, found.log_probs
    return bool((ids >= 0).all() and (ids < vocabulary).all() and np.isfinite(log_probs).all() and (log_probs <= 1e-3).all())


@contextmanager
def _standard_output() -> Iterator[Callable[[], str]]:
    """Capture standard output, of native code too; the yielded function returns it after the `with`."""
    library, kept = ctypes.CDLL(None), ""
    with tempfile.TemporaryFile() as file:
        library.fflush(None)
        standard = os.dup(1)
        os.dup2(file.fileno(), 1)
        try:
            yield lambda: kept
        finally:
            library.fflush(None)
            os.dup2(standard, 1)
            os.close(standard)
            file.seek(0)
            kept = file.read().decode(errors="replace")


def _one_line(error: Exception | str) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if math.fabs(size) >= GIB / 100 else f"{size / 2**20:.1f} MiB"
