"""Settings that engines are started with, and metrics of their replicas."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from dragoman.export.bundle import Bundle
from dragoman.server.config import LATENCY_BUCKETS, load
from dragoman.server.dispatch.replicated_engine import ReplicatedEngine
from dragoman.server.engine.messages import Statistics, Step
from dragoman.server.engine.settings import DeviceSettings, EngineSettings
from dragoman.server.engine_plan import EnginePlan
from dragoman.server.engines import engine_settings, make_engine
from dragoman.server.telemetry.metrics import Metrics


def test_engines_are_started_with_the_settings_of_the_device(tiny_bundle: Path) -> None:
    gpu = {"memory_gib": 2**20, "row_buckets": [3, 5], "capacity_buckets": [64], "attention_kernels": "math", "graphs": "start"}
    settings = {f"gpu_{name}": value for name, value in gpu.items()} | {"gpu_steps_ahead": False, "weights_cache": "off"}
    config = load({"models": tiny_bundle.parent, "device": "cuda:1"} | settings)
    (found,) = engine_settings(config, Bundle.open(tiny_bundle), EnginePlan(1, ((),)))
    assert found.device == DeviceSettings("cuda:1", 2**50, (3, 5), (64,), "", "math", "start", False)
    assert msgspec.json.decode(msgspec.json.encode(found), type=EngineSettings) == found


@pytest.mark.parametrize("front_ends", [1, 2])
async def test_steps_of_a_self_test_are_not_counted(tiny_bundle: Path, front_ends: int) -> None:
    """Its process is shown all the same, under the number that tells it from the engines of another version."""
    registry = CollectorRegistry()
    metrics = Metrics(registry, LATENCY_BUCKETS)
    metrics.add_model("tiny", "v1", "fp32", "cpu", 8)
    metrics.add_engines("tiny", range(1, 2))
    is_proved, deaths = [False], list[str]()

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(f"dragoman_{name}", {"model": "tiny", **labels})

    def ask(engine: Any) -> None:
        """Say what an engine says after a step, and that it is started again."""
        supervisor = engine.pool.replicas[0] if isinstance(engine, ReplicatedEngine) else engine
        client = supervisor._attach("ipc:///nowhere")
        client._on_statistics(Statistics(num_running=2, steps=[Step(3, 0.1)]))
        supervisor._on_restart()
        if (link := getattr(client, "_link", None)) is not None:
            link.close()

    engine = make_engine(
        load({"models": tiny_bundle, "front_ends": front_ends}),
        Bundle.open(tiny_bundle),
        EnginePlan(1, ((),)),
        metrics,
        on_change=lambda: None,
        on_death=lambda: deaths.append("death"),
        is_observed=lambda: is_proved[0],
        first_replica=1,
    )
    ask(engine)
    assert value("engine_steps_total", replica="1") == 0 and value("step_batch_size_sum") == 0
    is_proved[0] = True
    ask(engine)
    assert value("engine_steps_total", replica="1") == 1 and value("step_batch_size_sum") == 3
    assert value("engine_steps_total", replica="0") == 0
    assert value("engine_restarts_total", replica="1") == 2 and deaths == ["death"] * 2
    await engine.stop()
