"""What the workshop of a server asks of an engine that is to be proved."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dragoman.export.processor import Platform
from dragoman.server.config import LATENCY_BUCKETS, load
from dragoman.server.proof import PROOF_SECONDS, Found, Proof
from dragoman.server.repository import model_workshop
from dragoman.server.repository.model_workshop import ModelWorkshop
from dragoman.server.telemetry.metrics import Metrics


@pytest.mark.parametrize(("load_seconds", "seconds"), [(1800.0, 1800.0), (4.0, PROOF_SECONDS)])
def test_a_model_that_may_take_long_to_load_may_take_long_to_answer(
    monkeypatch: pytest.MonkeyPatch, load_seconds: float, seconds: float
) -> None:
    """24 steps of a model of some gigabytes take more than a minute where all cores are taken."""
    allowed: list[float] = []

    async def prove(*_: object, seconds: float) -> Proof:
        allowed.append(seconds)
        return Proof(True, True, 0.0, Found(), 0.0)

    monkeypatch.setattr(model_workshop, "prove", prove)
    config = load({"models": Path("models"), "load_timeout_seconds": load_seconds})
    nothing: Any = lambda *_: None  # noqa: E731
    metrics = Metrics(CollectorRegistry(), LATENCY_BUCKETS)
    workshop = ModelWorkshop(config, metrics, None, num_models=lambda: 1, on_change=nothing, on_published=nothing)
    engine = SimpleNamespace(ready=SimpleNamespace(platform=Platform()))
    model: Any = SimpleNamespace(name="tiny", version="1", bundle=None, engine=engine, device="cpu")
    asyncio.run(workshop.prove(model))
    assert allowed == [seconds]
