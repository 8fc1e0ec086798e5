"""An engine's settings of a device reach the runner; host memory stands for the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import Bundle
from dragoman.server.engine.loading import load_runner, load_scorer
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.settings import DeviceSettings
from dragoman.server.runtime import providers
from dragoman.server.runtime.device import cuda
from dragoman.server.runtime.device.runner import DeviceRunner
from tests.server.runtime.conftest import FailingDevice

GIB = 2**30


@pytest.fixture
def load(shipped_bundle: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Load an fp16 bundle on host memory that stands for cuda:1; the device notes what it was opened with."""
    bundle = Bundle.open(shipped_bundle("en-de", "fp16"))

    def opened(*arguments: Any, **named: Any) -> FailingDevice:
        device = FailingDevice(max_bytes=8 * GIB)
        device.opened = arguments, named  # type: ignore[attr-defined]
        return device

    monkeypatch.setattr(cuda, "CudaDevice", opened)
    monkeypatch.setattr(providers, "cuda_obstacle", lambda ordinal: "")

    def load(**settings: Any) -> DeviceRunner:
        device = DeviceSettings("cuda:1", **settings)
        runner = load_runner(bundle, Limits(4, 100, 10_000, 128), 1, device, is_warmed_up=False)
        assert isinstance(runner, DeviceRunner)
        load_scorer(bundle, 1, runner)
        return runner

    return load


SET = {
    "max_memory_bytes": 3 * GIB,
    "row_buckets": (3,),
    "capacity_buckets": (64, 128),
    "attention_kernels": "math",
    "graphs": "never",
    "is_ahead": False,
}


@pytest.mark.parametrize(
    ("settings", "kernels", "is_quick", "max_bytes", "rows", "targets"),
    [({}, "flash,efficient", True, int(0.9 * 8 * GIB), (1, 2, 4), (512,)), (SET, "math", False, 3 * GIB, (3, 4), (64, 128, 512))],
)
def test_settings_reach_the_runner(
    load: Callable[..., Any],
    settings: dict[str, Any],
    kernels: str,
    is_quick: bool,
    max_bytes: int,
    rows: tuple[int, ...],
    targets: tuple[int, ...],
) -> None:
    runner = load(**settings)
    assert runner._device.opened == ((1,), {"attention_kernels": kernels})
    assert runner.graphs.is_on == runner._is_ahead == is_quick and runner.budget.allowed == max_bytes
    assert (runner.buckets.rows, runner.buckets.targets) == (rows, targets)
    assert runner._device.arenas == {name: getattr(runner.budget, name) for name in ("encoder", "decoder", "scorer")}


def test_graphs_are_captured_at_the_start_and_the_reason_against_them_is_logged_once(
    load: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    graphs = load(graphs="start", capacity_buckets=(64,)).graphs
    assert len(graphs.at_start()) == len(list(graphs.shapes())) == 3 * 3 * 4
    runner = load()
    runner._device.capture_error = RuntimeError("CUDA failure 900")
    runner.warm_up()
    output = capsys.readouterr()
    assert (output.out + output.err).count("CUDA graphs are off") == 1
