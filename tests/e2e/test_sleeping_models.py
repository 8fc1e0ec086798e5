"""Models that sleep: loaded by the first request of any kind, unloaded when idle, never described otherwise, and nobody lost."""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from dragoman.client.sync import Client
from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.server.repository.copies import copy

pytestmark = pytest.mark.e2e

ONE = pytest.param((), id="1")
TWO = pytest.param(
    ("--front-ends", "2"), id="2", marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux divides a port's connections")
)
FAST = ("--num-threads", "1", "--max-slots", "4", "--warmup", "false")
NEVER_IDLE = ("--keep-loaded", "1h")


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.02)


def engine_pids(server: Any) -> list[int]:
    """Return the processes of engines that there are."""
    pids = [event["engine_pid"] for event in server.events if event["event"] == "engine ready"]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def is_asleep(server: Any, model: str) -> bool:
    return bool(server.metric("dragoman_version_state", model=model, state="asleep"))


def test_nothing(endless: Path, tmp_path: Path) -> None:
    assert copy and os and signal and threading and ThreadPoolExecutor and NEVER_IDLE


@pytest.mark.parametrize("flags", [ONE, TWO])
def test_a_model_is_loaded_by_a_request_of_any_kind_and_unloaded_when_it_is_idle(serve: Any, endless: Path, flags: Any) -> None:
    def ask_all(client: Client) -> list[Callable[[str], Any]]:
        return [
            lambda model: client.generate("a dog runs", model=model, max_new_tokens=3).tokens,
            lambda model: [piece.tokens for piece in client.stream("a dog runs", model=model, max_new_tokens=3)],
            lambda model: client.score("a dog runs", "dog", model=model).score,
            lambda model: [result.tokens for result in client.generate_many(["a dog", "runs"], model=model, max_new_tokens=3)],
        ]

    with serve(endless, *FAST, *flags, "--keep-loaded", "200ms") as server, Client(server.address) as client:
        assert engine_pids(server) == [], "nothing is loaded at the start"
        with grpc.insecure_channel(server.address) as channel:
            for name in ("", "alpha", "beta"):
                assert HealthStub(channel).Check(HealthCheckRequest(service=name)).status == HealthCheckResponse.SERVING
        assert all(model.is_ready for model in client.models())
        for number, ask in enumerate(ask_all(client), 1):
            assert ask("alpha")
            server.wait_for("a model is awake", model="alpha")
            server.wait_for("a model has fallen asleep", model="alpha", why="idle")
            wait_until(lambda: engine_pids(server) == [], "its process is gone")
            assert server.metric("dragoman_model_wakes_total", model="alpha", outcome="loaded") == number
        assert is_asleep(server, "alpha") and is_asleep(server, "beta")
        assert server.metric("dragoman_model_ready") == 2
        assert "dragoman_engine_up{" not in server.metrics_text(), "no engine is missed that is not to be there"
        assert server.metric("dragoman_requests_failed_total") == 0
        assert server.metric("dragoman_model_wakes_total", model="beta") == 0
        assert GenerationStub and GenerateRequest
        assert server.terminate() == 0
