"""Replicas, threads, cores and settings of the engines of each model."""

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dragoman.export.bundle import Bundle
from dragoman.server.config import ConfigError, load
from dragoman.server.engine.settings import DeviceSettings, EngineSettings
from dragoman.server.runtime.elastic import WideSteps
from dragoman.server.runtime.plan import Plan, Sizes
from dragoman.server.system import available_cores
from dragoman.server.workers import engines
from dragoman.server.workers.engines import EnginePlan, divide_cores, engine_settings, measure_engines, plan_engine, plan_engines

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize("content", ["max 100000", "100000 100000", "50000 100000", f"{1000 * 100000} 100000", "nonsense", None])
def test_quota_lowers_the_number_of_cores(tmp_path: Path, content: str | None) -> None:
    quota = tmp_path / "cpu.max"
    if content is not None:
        quota.write_text(content + "\n")
    assert available_cores(quota) == (1 if content in ("100000 100000", "50000 100000") else CORES)


def test_engines_get_the_last_cores_and_the_frontend_is_left_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 2, 4, 5, 7, 8})
    assert divide_cores(2, 2) == [(5, 7), (8, 9)]
    assert divide_cores(5, 1) == [(4,), (5,), (7,), (8,), (9,)]
    for num_engines, num_threads in ((2, 3), (6, 1), (1, 7)):
        with pytest.raises(ConfigError, match=f"need {num_engines * num_threads + 1} cores; there are 6"):
            divide_cores(num_engines, num_threads)


def bundle_of(name: str, precision: str = "int8") -> Any:
    return SimpleNamespace(manifest=SimpleNamespace(name=name, precision=precision))


def test_model_gets_a_replica_for_every_four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    plans = {1: (1, 1), 2: (1, 2), 4: (1, 4), 5: (1, 5), 6: (2, 3), 7: (2, 3), 8: (2, 4), 32: (8, 4), 64: (16, 4)}
    config = load({"models": "bundles"})
    for num_cores, expected in plans.items():
        monkeypatch.setattr(engines, "available_cores", lambda num_cores=num_cores: num_cores)
        plan = plan_engine(config, bundle_of("m"), 1)
        assert (plan.num_replicas, plan.num_threads) == expected


@pytest.mark.parametrize(
    ("num_cores", "precisions", "settings", "expected"),
    [
        (16, "int8", {}, [(4, 4)]),
        (16, "int8", {"num_threads": 3}, [(1, 3)]),
        (16, "int8", {"replicas": 1}, [(1, 16)]),
        (16, "int8", {"replicas": 5}, [(5, 3)]),
        (16, "int8", {"replicas": 32}, [(32, 1)]),
        (16, "int8", {"replicas": 2, "num_threads": 1}, [(2, 1)]),
        (16, "fp32 int8", {}, [(2, 4), (2, 4)]),
        (2, "fp32 int8 int8", {}, [(1, 1)] * 3),
        (16, "fp16 int8", {}, [(1, 8), (2, 4)]),  # what may run on a GPU has one engine
        (16, "fp16", {"device": "cpu"}, [(4, 4)]),
        (16, "fp16", {"device": "cpu", "replicas": 2}, [(2, 8)]),
        (16, "bf16", {"replicas": 2}, None),
    ],
)
def test_replicas_and_threads(
    monkeypatch: pytest.MonkeyPatch,
    num_cores: int,
    precisions: str,
    settings: dict[str, Any],
    expected: list[tuple[int, int]] | None,
) -> None:
    monkeypatch.setattr(engines, "available_cores", lambda: num_cores)
    bundles = [bundle_of(f"m{i}", precision) for i, precision in enumerate(precisions.split())]
    config = load({"models": "bundles"} | settings)
    if expected is None:
        for plan in (lambda: plan_engines(config, bundles), lambda: plan_engine(config, bundles[0], 1)):
            with pytest.raises(ConfigError, match=r"replicas: model m0 \(bf16\) may run on a GPU"):
                plan()
    else:
        assert [(plan.num_replicas, plan.num_threads) for plan in plan_engines(config, bundles).values()] == expected


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"device": "cuda:1"}])
def test_several_replicas_are_for_processes_on_the_cpu(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="replicas are"):
        load({"models": "bundles", "replicas": 2} | settings)
    load({"models": "bundles", "replicas": 1} | settings)


def test_each_replica_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    bundles = [bundle_of(name) for name in "ab"]
    pinned = {"models": "bundles", "num_threads": 1, "pin_engines": True}
    plans = plan_engines(load(pinned | {"replicas": 3}), bundles)
    assert [plan.cores for plan in plans.values()] == [((2,), (3,), (4,)), ((5,), (6,), (7,))]
    with pytest.raises(ConfigError, match=r"pin_engines: 8 x 1 threads and the front end need 9 cores"):
        plan_engines(load(pinned | {"replicas": 4}), bundles)


def test_version_that_comes_later_has_its_part_of_the_cores_and_is_pinned_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "available_cores", lambda: 16)
    for num_models, expected in ((1, (4, 4)), (2, (2, 4)), (100, (1, 1))):
        plan = plan_engine(load({"models": "bundles"}), bundle_of("m"), num_models)
        assert (plan.num_replicas, plan.num_threads) == expected and plan.cores == ((),) * expected[0]
    own = load({"models": "bundles", "replicas": 3, "num_threads": 2})
    assert plan_engine(own, bundle_of("m"), 1) == EnginePlan(2, ((),) * 3)


@pytest.mark.parametrize(
    ("settings", "precision", "num_models"),
    [
        ({"replicas": 1}, "int8", 1),
        ({"num_threads": 1}, "int8", 1),
        ({"weights_cache": "off"}, "int8", 1),
        ({}, "fp16", 1),
        ({}, "int8", 2),
    ],
)
async def test_nothing_is_measured_where_something_else_decides(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: dict[str, Any], precision: str, num_models: int
) -> None:
    asked: list[tuple[Any, ...]] = []

    async def measured_plan(*arguments: Any) -> Plan | None:
        asked.append(arguments)
        return Plan(2, 1, WideSteps(2, {1: 0.5}))

    monkeypatch.setattr(engines, "measured_plan", measured_plan)
    monkeypatch.setattr(engines, "available_cores", lambda: 2)
    usual = {"models": "bundles", "weights_cache": str(tmp_path), "max_slots": 9}
    assert await measure_engines(load(usual | settings), bundle_of("m", precision), num_models, 9) is None and not asked
    plan = await measure_engines(load(usual), bundle_of("m"), 1, 7)
    assert plan == EnginePlan(1, ((), ()), WideSteps(2, {1: 0.5}), str(tmp_path))
    monkeypatch.setattr(engines, "available_cores", lambda: 9)  # where two engines are usual
    for most in (0, 7, 100):
        await measure_engines(load(usual), bundle_of("m"), 1, most)
    expected = [Sizes(2, 2, 9), Sizes(9, 2, 9), Sizes(9, 4, 9), Sizes(9, 8, 9)]
    assert [arguments[1:] for arguments in asked] == [(str(tmp_path), sizes) for sizes in expected]


def test_engines_are_started_with_the_settings_of_the_device(tiny_bundle: Path) -> None:
    config = load({"models": tiny_bundle.parent, "device": "cuda:1", "gpu_memory_gib": 2**20, "weights_cache": "off"})
    (found,) = engine_settings(config, Bundle.open(tiny_bundle), EnginePlan(1, ((),)))
    assert found.device == DeviceSettings("cuda:1", 2**50, "")
    assert msgspec.json.decode(msgspec.json.encode(found), type=EngineSettings) == found
