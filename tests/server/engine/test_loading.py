"""That an engine's settings of a device reach the runner, without a device."""

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

LIMITS = Limits(4, 100, 10_000, 128)
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
        runner = load_runner(bundle, LIMITS, 1, DeviceSettings("cuda:1", **settings), is_warmed_up=False)
        assert isinstance(runner, DeviceRunner)
        load_scorer(bundle, 1, runner)
        return runner

    return load


def test_the_usual_settings_reach_the_runner(load: Callable[..., Any]) -> None:
    runner = load()
    assert runner._device.opened == ((1,), {"attention_kernels": "flash,efficient"})
    assert runner.graphs.is_on and runner._is_ahead and runner.budget.allowed == int(0.9 * 8 * GIB)
    assert runner.buckets.rows == (1, 2, 4) and runner.buckets.targets == (512,)


def test_settings_reach_the_runner(load: Callable[..., Any]) -> None:
    runner = load(
        max_memory_bytes=3 * GIB,
        row_buckets=(3,),
        capacity_buckets=(64, 128),
        attention_kernels="math",
        graphs="never",
        is_ahead=False,
    )
    assert runner._device.opened == ((1,), {"attention_kernels": "math"})
    assert not runner.graphs.is_on and not runner._is_ahead and runner.budget.allowed == 3 * GIB
    assert runner.buckets.rows == (3, 4) and runner.buckets.targets == (64, 128, 512)
    arenas = runner._device.arenas
    assert arenas == {name: getattr(runner.budget, name) for name in ("encoder", "decoder", "scorer")}


def test_all_graphs_are_captured_at_the_start_if_that_is_asked_for(load: Callable[..., Any]) -> None:
    graphs = load(graphs="start", capacity_buckets=(64,)).graphs
    assert len(graphs.at_start()) == len(list(graphs.shapes())) == 3 * 3 * 4


def test_the_reason_for_plain_steps_is_logged_once(load: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    runner = load()
    runner._device.capture_error = RuntimeError("CUDA failure 900")
    runner.warm_up()
    said = capsys.readouterr()
    assert (said.out + said.err).count("CUDA graphs are off") == 1
