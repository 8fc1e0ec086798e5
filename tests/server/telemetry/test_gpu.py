"""GPU figures from a made-up NVML."""

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from dragoman.server.telemetry import metrics
from dragoman.server.telemetry.gpu import NOTHING, GpuReading, GpuSource, open_gpu_source


class FakeNvml:
    class NVMLError(Exception):
        pass

    def __init__(self, has_driver: bool = True) -> None:
        self.has_driver = self.answers = has_driver
        self.num_questions = 0
        self.has_utilization = True
        self.used = 10

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


def test_a_reading_is_kept_for_a_second() -> None:
    nvml, now = FakeNvml(), [5.0]
    source = GpuSource(nvml, "handle", lambda: now[0])
    assert source.read() == source.read() == GpuReading(10, 100, 0.37)
    assert nvml.num_questions == 1
    now[0], nvml.used = 6.5, 20
    assert source.read().memory_used_bytes == 20


def test_a_driver_that_stops_answering_leaves_the_last_reading() -> None:
    nvml, now = FakeNvml(), [5.0]
    source = GpuSource(nvml, "handle", lambda: now[0])
    nvml.answers = False
    assert source.read() == NOTHING
    nvml.answers, now[0] = True, 7.0
    reading = source.read()
    nvml.answers, now[0] = False, 9.0
    assert source.read() == reading


def test_a_part_of_a_device_shows_its_memory_though_it_has_no_utilisation() -> None:
    nvml = FakeNvml()
    nvml.has_utilization = False
    assert GpuSource(nvml, "handle").read() == GpuReading(10, 100, 0.0)


@pytest.mark.parametrize(
    ("device", "visible", "handle"),
    [
        ("cuda:1 (NVIDIA H200)", "", ("index", 1)),
        ("cuda:1 (NVIDIA H200)", "4,6", ("index", 6)),
        ("cuda:0 (NVIDIA H200)", "GPU-5d, GPU-7e", ("uuid", "GPU-5d")),
    ],
)
def test_the_device_is_found_among_the_visible_ones(device: str, visible: str, handle: object) -> None:
    source = open_gpu_source(device, visible, lambda name: FakeNvml())
    assert source is not None and source._handle == handle


def test_there_is_no_source_without_a_gpu_or_nvml() -> None:
    def missing(name: str) -> Any:
        raise ImportError(name)

    assert open_gpu_source("cpu", "", lambda name: FakeNvml()) is None
    assert open_gpu_source("", "", lambda name: FakeNvml()) is None
    assert open_gpu_source("cuda:0 (x)", "", missing) is None
    assert open_gpu_source("cuda:0 (x)", "", lambda name: FakeNvml(has_driver=False)) is None


def test_a_device_is_shown_once_however_many_models_run_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml()
    monkeypatch.setattr(metrics, "open_gpu_source", lambda device, visible: open_gpu_source(device, visible, lambda name: nvml))
    registry = CollectorRegistry()
    shown = metrics.Metrics(registry, (1.0,))
    for name in ("en-de", "en-fr"):
        shown.add_model(name, "1", "fp16", "cuda:0 (NVIDIA H200)", 64)
    text = generate_latest(registry).decode()
    assert 'dragoman_gpu_memory_used_bytes{device="cuda:0 (NVIDIA H200)"} 10.0' in text
    assert 'dragoman_gpu_utilization_ratio{device="cuda:0 (NVIDIA H200)"} 0.37' in text
    assert text.count("dragoman_gpu_memory_total_bytes{") == 1
    shown.remove_model("en-de")
    assert "dragoman_gpu_memory_used_bytes{" in generate_latest(registry).decode()
