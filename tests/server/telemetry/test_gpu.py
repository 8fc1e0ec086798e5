"""GPU figures and figures of processes, from a made-up NVML and a made-up /proc."""

import os
import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.server.telemetry.processes import (
    PAGE_BYTES,
    TICKS_PER_SECOND,
    GpuReading,
    GpuSource,
    open_gpu_source,
    read_process,
)


class FakeNvml:
    class NVMLError(Exception):
        pass

    def __init__(self, has_driver: bool = True) -> None:
        self.has_driver = self.answers = has_driver
        self.has_utilization, self.num_questions, self.used = True, 0, 10

    def nvmlInit(self) -> None:
        if not self.has_driver:
            raise self.NVMLError

    def nvmlDeviceGetHandleByIndex(self, index: int) -> object:
        return ("index", index)

    def nvmlDeviceGetHandleByUUID(self, name: str) -> object:
        return ("uuid", name)

    def nvmlDeviceGetMemoryInfo(self, handle: object) -> Any:
        self.num_questions += 1
        if not self.answers:
            raise self.NVMLError
        return SimpleNamespace(used=self.used, total=100)

    def nvmlDeviceGetUtilizationRates(self, handle: object) -> Any:
        if not (self.answers and self.has_utilization):
            raise self.NVMLError
        return SimpleNamespace(gpu=37)


def test_a_reading_is_kept_for_a_second_and_while_the_driver_does_not_answer() -> None:
    nvml, now = FakeNvml(), [5.0]
    source = GpuSource(nvml, "handle", lambda: now[0])
    assert source.read() == source.read() == GpuReading(10, 100, 0.37) and nvml.num_questions == 1
    now[0], nvml.used = 6.5, 20
    reading = source.read()
    assert reading.memory_used_bytes == 20
    nvml.answers, now[0] = False, 9.0
    assert source.read() == reading and GpuSource(nvml, "handle").read() == GpuReading()
    nvml.answers, nvml.has_utilization = True, False
    assert GpuSource(nvml, "handle").read() == GpuReading(20, 100, 0.0), "a part of a device has no utilisation"


@pytest.mark.parametrize(
    ("device", "visible", "handle"),
    [
        ("cuda:1 (NVIDIA H200)", "", ("index", 1)),
        ("cuda:1 (NVIDIA H200)", "4,6", ("index", 6)),
        ("cuda:0 (NVIDIA H200)", "GPU-5d, GPU-7e", ("uuid", "GPU-5d")),
        ("cpu", "", None),
        ("", "", None),
    ],
)
def test_the_device_is_found_among_the_visible_ones(device: str, visible: str, handle: object) -> None:
    source = open_gpu_source(device, visible, lambda name: FakeNvml())
    assert (None if source is None else source._handle) == handle

    def missing(name: str) -> Any:
        raise ImportError(name)

    assert open_gpu_source("cuda:0 (x)", "", missing) is None
    assert open_gpu_source("cuda:0 (x)", "", lambda name: FakeNvml(has_driver=False)) is None


def test_a_process_is_read_as_the_kernel_has_it(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = ["S", *("0" for _ in range(10)), "300", "200", *("0" for _ in range(8)), "5", "0"]
    (tmp_path / "7/stat").write_text(f"7 (a) b (c)) {' '.join(fields)}\n")
    reading = read_process(7, tmp_path)
    assert reading is not None and reading.cpu_seconds == 500 / TICKS_PER_SECOND
    assert reading.resident_memory_bytes == 5 * PAGE_BYTES
    assert read_process(1, tmp_path) is None
    usage, own = resource.getrusage(resource.RUSAGE_SELF), read_process(os.getpid())
    assert own is not None and own.cpu_seconds == pytest.approx(usage.ru_utime + usage.ru_stime, abs=1.0)
    assert own.resident_memory_bytes > 2**20
