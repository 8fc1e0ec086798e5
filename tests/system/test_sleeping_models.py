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
from tests.system.harness.server import wait_until

pytestmark = pytest.mark.e2e

ONE = pytest.param((), id="1")
ONLY_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux divides a port's connections")
TWO = pytest.param(("--front-ends", "2"), id="2", marks=ONLY_LINUX)
FAST = ("--num-threads", "1", "--max-slots", "4", "--warmup", "false")
NO_RETRIES = [("grpc.enable_retries", 0)]
NEVER_IDLE = ("--keep-loaded", "1h")


def engine_pids(server: Any) -> list[int]:
    """Return the processes of engines that there are."""
    pids = [event["engine_pid"] for event in server.events if event["event"] == "engine ready"]
    return [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def is_asleep(server: Any, model: str) -> bool:
    return bool(server.metric("dragoman_version_state", model=model, state="asleep"))


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
        assert server.terminate() == 0


@pytest.mark.parametrize("flags", [ONE, TWO])
def test_models_give_way_to_each_other_and_nobody_is_lost(serve: Any, endless: Path, tmp_path: Path, flags: Any) -> None:
    """There is memory for one of two; callers of both come all the time."""
    names = ["alpha", "beta"] * 20
    with serve(endless, *FAST, *flags, *NEVER_IDLE, "--models-memory-gib", "0.2") as server:
        with Client(server.address, timeout_seconds=60) as client, ThreadPoolExecutor(4) as pool:
            client.generate("a dog", model="alpha", max_new_tokens=1)
            most, is_over = [0], threading.Event()

            def watch() -> None:
                while not is_over.is_set():
                    most[0] = max(most[0], len(engine_pids(server)))
                    time.sleep(0.05)

            watching = threading.Thread(target=watch)
            watching.start()
            results = list(pool.map(lambda model: client.generate("a dog runs", model=model, max_new_tokens=5), names))
            is_over.set()
            watching.join()
        assert [result.model for result in results] == names and all(len(result.tokens) == 5 for result in results)
        assert most == [1], "never two at once"
        assert server.metric("dragoman_model_sleeps_total", cause="memory") >= 1
        assert server.metric("dragoman_requests_failed_total") == 0
        assert server.metric("dragoman_engine_restarts_total") == 0
        assert server.terminate() == 0
    assert engine_pids(server) == []


@pytest.mark.parametrize("flags", [ONE, TWO])
def test_who_cannot_wait_is_told_when_to_come_back_and_finds_the_model_loaded_then(serve: Any, endless: Path, flags: Any) -> None:
    with serve(endless, *FAST, *flags, *NEVER_IDLE, "--load-wait-seconds", "0.02") as server:
        with grpc.insecure_channel(server.address, NO_RETRIES) as channel:
            stub = GenerationStub(channel)
            request = GenerateRequest(model="alpha", text="a dog runs", max_new_tokens=2)
            with pytest.raises(grpc.RpcError) as refusal:
                stub.Generate(request, timeout=60)
            assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
            assert refusal.value.details() == "model 'alpha' is being loaded"
            server.wait_for("a model is awake", model="alpha")
            wait_until(lambda: stub.Generate.with_call(request, timeout=60)[1].code() is grpc.StatusCode.OK, "it is answered")
        assert server.metric("dragoman_requests_rejected_total", model="alpha", reason="not_ready") == 1
        assert server.terminate() == 0


def test_what_never_fits_is_refused_by_name_and_what_runs_goes_on(serve: Any, endless: Path) -> None:
    with serve(endless, *FAST, *NEVER_IDLE, "--models-memory-gib", "0.05") as server:
        request = GenerateRequest(model="alpha", text="a dog", max_new_tokens=2)
        with grpc.insecure_channel(server.address, NO_RETRIES) as channel, pytest.raises(grpc.RpcError) as refusal:
            GenerationStub(channel).Generate(request, timeout=60)
        assert refusal.value.code() is grpc.StatusCode.UNAVAILABLE
        assert refusal.value.details() == "model 'alpha' cannot be loaded: there is no memory for it now"
        told = server.wait_for("a model cannot be woken", model="alpha", cause="memory")
        assert told["reason"].startswith("it may take ")
        assert "51 MiB of 51 MiB (models_memory_gib) is left" in told["reason"]
        assert server.metric("dragoman_model_wakes_total", model="alpha", outcome="failed") == 1
        assert is_asleep(server, "alpha"), "there may be memory another time"
        assert server.terminate() == 0


def test_models_that_are_always_loaded_and_do_not_fit_end_the_start(serve: Any, endless: Path) -> None:
    with pytest.raises(AssertionError, match="the server ended") as ended, serve(endless, *FAST, "--models-memory-gib", "0.2"):
        pass
    assert "models_memory_gib" in str(ended.value)


@ONLY_LINUX
def test_a_killed_front_end_leaves_nobody_waited_for(serve: Any, endless: Path) -> None:
    """Both are killed while a model is loaded for a caller of theirs; those that come after them serve both models."""
    with serve(endless, *FAST, "--front-ends", "2", *NEVER_IDLE) as server:
        with grpc.insecure_channel(server.address, NO_RETRIES) as channel:
            request = GenerateRequest(model="alpha", text="a dog", max_new_tokens=2)
            call = GenerationStub(channel).Generate.future(request, timeout=60)
            wait_until(lambda: server.metric("dragoman_version_state", model="alpha", state="asleep") == 0, "it is being loaded")
            for event in [event for event in server.events if event["event"] == "front end listens"]:
                os.kill(event["pid"], signal.SIGKILL)
            assert call.exception().code() is grpc.StatusCode.UNAVAILABLE
            for _ in range(2):
                server.wait_for("front end ended, restarting")
        wait_until(lambda: server.metric("dragoman_front_end_up") == 2, "both are back")
        with Client(server.address, timeout_seconds=60) as client:
            assert client.generate("a dog", model="alpha", max_new_tokens=2).tokens
            assert client.generate("a dog", model="beta", max_new_tokens=2).tokens
        assert server.terminate() == 0
