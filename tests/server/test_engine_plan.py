"""How many engines, threads and cores each model gets."""

import os
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman.server import engine_plan
from dragoman.server.config import ConfigError, load
from dragoman.server.engine_plan import choose_replicas, plan_engine, plan_engines


def plans(num_cores: int, monkeypatch: pytest.MonkeyPatch, *precisions: str, **settings: Any) -> list[tuple[int, int]]:
    monkeypatch.setattr(engine_plan, "available_cores", lambda: num_cores)
    named = enumerate(precisions or ("int8",))
    bundles: Any = [SimpleNamespace(manifest=SimpleNamespace(name=f"m{i}", precision=precision)) for i, precision in named]
    config = load({"models": "bundles"} | settings)
    return [(plan.num_replicas, plan.num_threads) for plan in plan_engines(config, bundles).values()]


@pytest.mark.parametrize(
    ("num_cores", "expected"),
    [(1, (1, 1)), (2, (1, 2)), (4, (1, 4)), (5, (1, 5)), (6, (2, 3)), (7, (2, 3)), (8, (2, 4)), (32, (8, 4)), (64, (16, 4))],
)
def test_a_model_gets_an_engine_for_every_four_cores(num_cores: int, expected: tuple[int, int]) -> None:
    assert choose_replicas(num_cores) == expected


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (4, 4)),
        ({"num_threads": 3}, (1, 3)),
        ({"replicas": 1}, (1, 16)),
        ({"replicas": 5}, (5, 3)),
        ({"replicas": 32}, (32, 1)),
        ({"replicas": 2, "num_threads": 1}, (2, 1)),
        ({"engine": "inline"}, (1, 16)),
    ],
)
def test_settings_come_before_the_rule(
    settings: dict[str, Any], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plans(16, monkeypatch, **settings) == [expected]


def test_models_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plans(16, monkeypatch, "fp32", "int8") == [(2, 4), (2, 4)]
    assert plans(2, monkeypatch, "fp32", "int8", "int8") == [(1, 1)] * 3


def test_what_may_run_on_a_gpu_has_one_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plans(16, monkeypatch, "fp16", "int8") == [(1, 8), (2, 4)]
    assert plans(16, monkeypatch, "fp16", device="cpu") == [(4, 4)]
    assert plans(16, monkeypatch, "fp16", device="cpu", replicas=2) == [(2, 8)]
    with pytest.raises(ConfigError, match=r"replicas: model m0 \(bf16\) may run on a GPU"):
        plans(16, monkeypatch, "bf16", replicas=2)


@pytest.mark.parametrize("settings", [{"device": "cuda"}, {"device": "cuda:1"}, {"engine": "inline"}])
def test_several_engines_are_for_processes_on_the_cpu(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="replicas are"):
        load({"models": "bundles", "replicas": 2} | settings)
    load({"models": "bundles", "replicas": 1} | settings)


def test_each_replica_has_cores_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    bundles: Any = [SimpleNamespace(manifest=SimpleNamespace(name=name, precision="int8")) for name in "ab"]
    config = load({"models": "bundles", "replicas": 3, "num_threads": 1, "pin_engines": True})
    assert [plan.cores for plan in plan_engines(config, bundles).values()] == [((2,), (3,), (4,)), ((5,), (6,), (7,))]
    crowded = load({"models": "bundles", "replicas": 4, "num_threads": 1, "pin_engines": True})
    with pytest.raises(ConfigError, match=r"pin_engines: 8 x 1 threads and the front end need 9 cores"):
        plan_engines(crowded, bundles)


def test_a_version_that_comes_later_has_its_part_of_the_cores_and_is_pinned_to_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_plan, "available_cores", lambda: 16)
    bundle: Any = SimpleNamespace(manifest=SimpleNamespace(name="m", precision="int8"))
    config = load({"models": "bundles"})
    for num_models, expected in ((1, (4, 4)), (2, (2, 4)), (100, (1, 1))):
        plan = plan_engine(config, bundle, num_models)
        assert (plan.num_replicas, plan.num_threads) == expected and plan.cores == ((),) * expected[0]
    assert plan_engine(load({"models": "bundles", "replicas": 3, "num_threads": 2}), bundle, 1) == engine_plan.EnginePlan(
        2, ((),) * 3
    )
    large: Any = SimpleNamespace(manifest=SimpleNamespace(name="m", precision="bf16"))
    with pytest.raises(ConfigError, match=r"replicas: model m \(bf16\) may run on a GPU"):
        plan_engine(load({"models": "bundles", "replicas": 2}), large, 1)
