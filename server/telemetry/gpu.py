"""What the NVIDIA driver says of a GPU: memory and utilisation, asked through NVML where it is there.

The answer is kept for a moment, since one scrape asks for several figures. A driver that stops answering costs the figures, nothing
else.
"""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

MAX_AGE_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class GpuReading:
    """One look at a device.

    Attributes:
        memory_used_bytes: Of all processes.
        memory_total_bytes: Of the device.
        utilization_ratio: Share of the last sample period, a sixth of a second to one second, in which a kernel ran.
    """

    memory_used_bytes: int
    memory_total_bytes: int
    utilization_ratio: float


NOTHING = GpuReading(0, 0, 0.0)


class GpuSource:
    """Reads one device."""

    def __init__(self, nvml: Any, handle: object, clock: Callable[[], float] = time.monotonic) -> None:
        """Take NVML and the device's handle; use `open_gpu_source`, which finds both out."""
        self._nvml, self._handle, self._clock = nvml, handle, clock
        self._last = NOTHING
        self._expires = float("-inf")

    def read(self) -> GpuReading:
        """Return what is known of the last second; of what the driver does not answer, the last that is known.

        Each figure is asked for by itself: a device that is cut into parts (MIG) has memory to tell of, but no utilisation.
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
    """Return the source for a device that a runner names, for example `cuda:0 (NVIDIA H200)`.

    Args:
        device: Its name.
        visible: What CUDA_VISIBLE_DEVICES says.
        load: Imports a module.

    Returns:
        None for what is no CUDA device, and where there is no NVML.
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
    """Return NVML's handle of a device by CUDA's number, which counts visible devices only."""
    names = [name.strip() for name in visible.split(",") if name.strip()]
    name = names[ordinal] if ordinal < len(names) else str(ordinal)
    if name.isdecimal():
        return nvml.nvmlDeviceGetHandleByIndex(int(name))
    return nvml.nvmlDeviceGetHandleByUUID(name)
