"""Memory and CPU time of processes, from /proc; memory and utilisation of GPUs, from NVML where it is installed."""

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
# One scrape reads several figures of a GPU.
MAX_AGE_SECONDS = 1.0
# Fields of /proc/PID/stat after the name, which may hold anything and ends with the last parenthesis.
USER_TICKS, SYSTEM_TICKS, RESIDENT_PAGES = 11, 12, 21


@dataclass(frozen=True, slots=True)
class ProcessReading:
    """Figures of a process.

    Attributes:
        resident_memory_bytes: Resident memory, shared pages included.
        cpu_seconds: CPU time used.
    """

    resident_memory_bytes: int
    cpu_seconds: float


def read_process(process_id: int, proc: Path = Path("/proc")) -> ProcessReading | None:
    """Return the figures of a process; None if it is gone, or where there is no /proc."""
    try:
        fields = (proc / str(process_id) / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    ticks = int(fields[USER_TICKS]) + int(fields[SYSTEM_TICKS])
    return ProcessReading(int(fields[RESIDENT_PAGES]) * PAGE_BYTES, ticks / TICKS_PER_SECOND)


@dataclass(frozen=True, slots=True)
class GpuReading:
    """Figures of a GPU.

    Attributes:
        memory_used_bytes: Memory in use, by all processes.
        memory_total_bytes: Memory of the device.
        utilization_ratio: Share of the last sample period, a sixth of a second to one second, in which a kernel ran.
    """

    memory_used_bytes: int = 0
    memory_total_bytes: int = 0
    utilization_ratio: float = 0.0


class GpuSource:
    """Reads one GPU; made by `open_gpu_source`."""

    def __init__(self, nvml: Any, handle: object, clock: Callable[[], float] = time.monotonic) -> None:
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self._last = GpuReading()
        self._expires = float("-inf")

    def read(self) -> GpuReading:
        """Return the figures of the last second; where the driver does not answer, the last known.

        Memory and utilisation are read apart: a partition of a device (MIG) has no utilisation.
        """
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
    """Return a reader of the device that a runner names, for example `cuda:0 (NVIDIA H200)`.

    Args:
        device: Name of the device.
        visible: Value of CUDA_VISIBLE_DEVICES.
        load: Imports a module.

    Returns:
        None for other devices than CUDA's, and without NVML.
    """
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
    """Return NVML's handle of a device by its CUDA ordinal, which counts visible devices only."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    name = names[ordinal] if ordinal < len(names) else str(ordinal)
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
