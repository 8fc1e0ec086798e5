"""An engine's settings of a device reach the runner; host memory stands for the device."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import Bundle
from dragoman.server.engine.loading import load_runner, load_scorer
from dragoman.server.engine.settings import DeviceSettings, Limits
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
        runner = load_runner(bundle, Limits(4, 128), 1, device, is_warmed_up=False)
        assert isinstance(runner, DeviceRunner)
        load_scorer(bundle, 1, runner)
        return runner

    return load


def test_settings_reach_the_runner(load: Callable[..., Any]) -> None:
    quick = load()
    other = load(max_memory_bytes=3 * GIB)
    for runner in (quick, other):
        assert runner._device.opened == ((1,), {})
        assert runner.graphs.is_on and runner._is_ahead
        assert runner._device.arenas == {name: getattr(runner.budget, name) for name in ("encoder", "decoder", "scorer")}
    assert (quick.budget.allowed, other.budget.allowed) == (int(0.9 * 8 * GIB), 3 * GIB)
    assert (quick.buckets.rows, quick.buckets.targets) == ((1, 2, 4), (512,))
