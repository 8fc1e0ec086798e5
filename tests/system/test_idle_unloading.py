"""Models that are unloaded when idle and loaded by a request: described as ready all the while, and no request is lost."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from dragoman.client.sync import Client
from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.conftest import ONE_ENGINE, ONLY_LINUX
from tests.system.harness.callers import Callers, connection, generate
from tests.system.harness.models import ModelFolder
from tests.system.harness.server import LONG, Event, Server, kill, resident_bytes, serving, wait_until

pytestmark = pytest.mark.e2e

FAST = ("--num-threads", "1", "--max-slots", "4")
NEVER_IDLE = ("--keep-loaded", "1h")
TOPOLOGIES = pytest.mark.parametrize(
    "flags", [ONE_ENGINE, pytest.param(("--front-ends", "2"), id="two frontends", marks=ONLY_LINUX)]
)


def is_unloaded(server: Server, model: str) -> bool:
    return bool(server.metric("dragoman_version_state", model=model, state="asleep"))


@TOPOLOGIES
def test_a_request_of_any_kind_loads_a_model_that_is_unloaded_when_idle(endless: Path, flags: tuple[str, ...]) -> None:
    kinds: list[Callable[[Client, str], Any]] = [
        lambda client, model: client.generate("a dog runs", model=model, max_new_tokens=3).tokens,
        lambda client, model: [piece.tokens for piece in client.stream("a dog runs", model=model, max_new_tokens=3)],
        lambda client, model: client.score("a dog runs", "dog", model=model).score,
    ]
    with serving(endless, *FAST, *flags, "--keep-loaded", "200ms") as server, Client(server.address) as client:
        assert server.engines() == [], "nothing is loaded at the start"
        with connection(server) as channel:
            for name in ("", "alpha", "beta"):
                assert HealthStub(channel).Check(HealthCheckRequest(service=name)).status == HealthCheckResponse.SERVING
        assert all(model.is_ready for model in client.models())
        for number, ask in enumerate(kinds, 1):
            assert ask(client, "alpha")
            server.wait_for(Event.MODEL_LOADED, model="alpha")
            server.wait_for(Event.MODEL_UNLOADED, model="alpha", why="idle")
            wait_until(lambda: server.engines() == [], "its process is gone")
            assert server.metric("dragoman_model_wakes_total", model="alpha", outcome="loaded") == number
        assert is_unloaded(server, "alpha") and is_unloaded(server, "beta")
        assert server.metric("dragoman_model_ready") == 2
        assert "dragoman_engine_up{" not in server.metrics_text(), "no engine is missed that is not to be there"
        assert server.metric("dragoman_requests_failed_total") == 0
        assert server.metric("dragoman_model_wakes_total", model="beta") == 0


@TOPOLOGIES
def test_many_models_in_the_memory_of_one_give_way_to_each_other_and_lose_nothing(
    models: ModelFolder, flags: tuple[str, ...]
) -> None:
    """Callers of all kinds ask for them by Zipf's law; the bound of memory is kept, and no two engines are there at once."""
    names = [f"model-{number}" for number in range(20 if LONG else 3)]
    for name in names:
        models.copy("one", models.path / name, name)
    shares = [1 / rank for rank in range(1, len(names) + 1)]
    most, is_over = [0, 0], threading.Event()
    with serving(models.path, *FAST, *flags, *NEVER_IDLE, "--models-memory-gib", "0.15") as server:

        def watch() -> None:
            while not is_over.wait(0.02):
                engines = server.engines()
                most[:] = [max(most[0], len(engines)), max(most[1], sum(map(resident_bytes, engines)))]

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            with Callers(server, names, weights=shares, num=4, max_new_tokens=4) as callers:
                end = time.monotonic() + (120 if LONG else 3)
                wait_until(lambda: {answer.model for answer in callers.answers} == set(names), "all models have answered", 120)
                wait_until(lambda: time.monotonic() > end, "they have been asked for long enough", 150)
        finally:
            is_over.set()
            watching.join()
        assert callers.failures == [] and callers.answered_differently() == []
        assert most[0] == 1 and most[1] < 0.15 * 2**30
        assert server.metric("dragoman_model_sleeps_total", cause="memory") >= len(names) - 1
        assert server.metric("dragoman_requests_failed_total") == server.metric("dragoman_engine_restarts_total") == 0
    assert server.engines() == []


def test_a_call_that_cannot_wait_for_a_model_is_refused_and_a_later_one_is_answered(endless: Path) -> None:
    with serving(endless, *FAST, *NEVER_IDLE) as server, connection(server) as channel:
        hasty = GenerateRequest(model="alpha", text="a dog runs", max_new_tokens=2)
        refusal = GenerationStub(channel).Generate.future(hasty, timeout=0.5).exception()
        assert (refusal.code(), refusal.details()) == (grpc.StatusCode.UNAVAILABLE, "model 'alpha' is being loaded")
        server.wait_for(Event.MODEL_LOADED, model="alpha")
        assert generate(channel).result().answers
        assert server.metric("dragoman_requests_rejected_total", model="alpha", reason="not_ready") == 1


def test_a_model_that_never_fits_is_refused_by_name(endless: Path) -> None:
    flags = (*NEVER_IDLE, "--models-memory-gib", "0.05")
    with serving(endless, *FAST, *flags) as server, connection(server) as channel:
        refusal = generate(channel).exception()
        assert refusal.code() is grpc.StatusCode.UNAVAILABLE
        assert refusal.details() == "model 'alpha' cannot be loaded: there is no memory for it now"
        told = server.wait_for(Event.MODEL_NOT_LOADED, model="alpha", cause="memory")
        assert told["reason"].startswith("it may take ") and "51 MiB of 51 MiB (models_memory_gib) is left" in told["reason"]
        assert server.metric("dragoman_model_wakes_total", model="alpha", outcome="failed") == 1
        assert is_unloaded(server, "alpha"), "there may be memory another time"


@ONLY_LINUX
def test_frontends_that_are_killed_while_a_model_is_loaded_leave_it_loadable(endless: Path) -> None:
    with serving(endless, *FAST, "--front-ends", "2", *NEVER_IDLE) as server:
        with connection(server) as channel:
            call = generate(channel)
            wait_until(lambda: not is_unloaded(server, "alpha"), "it is being loaded")
            kill(*server.frontends().values())
            assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
            for _ in range(2):
                server.wait_for(Event.FRONTEND_RESTARTS)
        server.wait_for_metric(2, "dragoman_front_end_up")
        with Client(server.address, timeout_seconds=60) as client:
            for model in ("alpha", "beta"):
                assert client.generate("a dog", model=model, max_new_tokens=2).tokens
