"""Memory and CPU time of processes from /proc, and memory and utilisation of GPUs from NVML."""

import contextlib
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")
# Caches GPU readings: one scrape reads several values.
MAX_AGE_SECONDS = 1.0
# Field indexes in /proc/PID/stat after the name, which may contain anything and ends with the last parenthesis.
USER_TICKS, SYSTEM_TICKS, RESIDENT_PAGES = 11, 12, 21


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """Memory and CPU time of a process; resident memory includes shared pages."""

    resident_memory_bytes: int
    cpu_seconds: float


def read_process(process_id: int, proc: Path = Path("/proc")) -> ProcessReading | None:
    """Return a process's memory and CPU time; None if the process or /proc does not exist."""
    try:
        fields = (proc / str(process_id) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    ticks = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
    return ProcessReading(int(fields[RESIDENT_PAGES]) * PAGE_BYTES, ticks / TICKS_PER_SECOND)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Memory and utilisation of a GPU, by all processes; the ratio is of the last sample period, 1/6 s to 1 s."""

    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    utilization_ratio: float = 0.0


class GpuSource:
    """Cached reader of one GPU; created by `open_gpu_source`."""

    def __init__(self, nvml: Any, handle: object, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self._last = GpuReading()
        self._expires = float("-inf")

    def read(self) -> GpuReading:
        """Return values at most a second old; the last known if the driver fails. Partitions (MIG) have no utilisation."""
        now = self._clock()
        if now < self._expires:
            return self._last
        self._expires = now + MAX_AGE_SECONDS
        with contextlib.suppress(self._nvml.NVMLError):
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
            self._last = replace(self._last, memory_used_bytes=int(memory.used), memory_total_bytes=int(memory.total))
        with contextlib.suppress(self._nvml.NVMLError):
            utilization = self._nvml.nvmlDeviceGetUtilizationRates(self._handle)
            self._last = replace(self._last, utilization_ratio=utilization.gpu / 100)
        return self._last


def open_gpu_source(device: str, visible: str = "", load: Callable[[str], Any] = import_module) -> GpuSource | None:
    """Return a reader of a device such as `cuda:0 (NVIDIA H200)`; None without CUDA or NVML. `visible` is CUDA_VISIBLE_DEVICES."""
    kind, _, ordinal = device.partition(" ")[0].partition(":")
    if kind != "cuda":
        return None
    try:
        nvml = load("pynvml")
    except ImportError:
        return None
    try:
        nvml.nvmlInit()
        return GpuSource(nvml, _handle(nvml, int(ordinal), visible))
    except nvml.NVMLError:
        return None


def _handle(nvml: Any, ordinal: int, visible: str) -> object:
    """Return NVML's handle of a CUDA ordinal, which counts visible devices only."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    name = names[ordinal] if ordinal < len(names) else str(ordinal)
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
