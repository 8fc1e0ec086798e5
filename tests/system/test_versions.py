"""Versions of real models change under calls of every kind: none fails, and each is answered by a version that was the policy's."""

import os
import signal
import sys
from collections import Counter
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.swaps.callers import MIX, Callers
from benchmarks.swaps.timeline import Timeline
from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.models import FLAGS, ModelFolder
from tests.system.harness.server import is_running, next_engine, processes, wait_until

pytestmark = pytest.mark.e2e

AT_ONCE = "[swap]\nprobation_seconds = 0\n"
TWO_OF_EACH = pytest.param(
    ("--front-ends", "2", "--replicas", "2"),
    id="two of each",
    marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux divides a port's connections"),
)
ONE_AND_TWO = pytest.mark.parametrize("flags", [pytest.param((), id="one"), TWO_OF_EACH])


def serves(server: Any, version: str) -> None:
    """Wait until a version answers all requests that name none."""
    server.wait_for("versions that serve", default=version)


def ask(server: Any, timeout: float = 30, **fields: Any) -> Any:
    options = [("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
    with grpc.insecure_channel(server.address, options) as channel:
        request = GenerateRequest(text="a dog runs", **{"max_new_tokens": 3} | fields)
        return GenerationStub(channel).Generate(request, timeout=timeout)


def health(server: Any, service: str) -> Any:
    """Return what the server says of a model: a state, or the code of an error."""
    with grpc.insecure_channel(server.address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(service=service))
        except grpc.RpcError as error:
            return error.code()
        return answer.status


def until_more_are_answered(callers: Callers) -> None:
    seen = len(callers.answers)
    wait_until(lambda: len(callers.answers) > seen + 20, "more are answered")


def until_settled(server: Any, num_engines: int, other_engines: int = 0) -> None:
    """Wait until so many engines are left, in the metrics as among the processes."""
    wait_until(lambda: server.metric("dragoman_engine_up", model="alpha") == num_engines, "as many engines are up")
    wait_until(lambda: sum(map(is_running, server.engine_pids())) == num_engines + other_engines, "old engines have ended")


@ONE_AND_TWO
def test_swaps_forwards_and_back_lose_nothing(serve: Any, models: ModelFolder, flags: tuple[str, ...]) -> None:
    one, two = models.put("alpha", "1", "one"), models.content("two")
    models.put("beta", "1", "other")
    models.say("alpha", AT_ONCE)
    num_replicas = 2 if flags else 1
    with serve(models.path, *FLAGS, *flags) as server:
        with Callers(server.address, ["alpha", "beta"], ["a dog runs", "the grass"], 40, max_new_tokens=6) as callers:
            for number in range(2):
                models.put("alpha", "2", "two")
                serves(server, "2")
                server.wait_for("a version has ended", version="1")
                models.remove("alpha", "2")
                serves(server, "1")
                if number:
                    until_more_are_answered(callers)
        assert callers.failures == []
        assert {answer.kind for answer in callers.answers} == set(MIX)
        versions = Counter(answer.version for answer in callers.answers if answer.model == "alpha")
        assert versions.keys() == {one, two}
        timeline = Timeline(server.events, models.asked)
        assert [period.version for period in timeline.periods["alpha"]] == [one, two, one, two, one]
        wrong = [each for each in callers.answers if not timeline.allows(each.model, each.version, each.began, each.ended)]
        assert wrong == []
        until_settled(server, num_replicas, num_replicas)
        assert server.metric("dragoman_version_swaps_total", model="alpha", outcome="done") == 4
        assert server.metric("dragoman_version_state", model="alpha", version="1", state="serving") == 1
        assert server.metric("dragoman_version_state", model="alpha", version="2") == 0
        wait_until(lambda: server.metric("dragoman_slots_in_use") == 0, "no slot is in use")
        assert server.metric("dragoman_num_requests_running") == server.metric("dragoman_num_requests_waiting") == 0
        assert server.metric("dragoman_engine_restarts_total") == 0
        assert health(server, "alpha") == health(server, "") == health_pb2.HealthCheckResponse.SERVING
        everything = processes(server)
        assert server.terminate() == 0
    assert not any(map(is_running, everything))


def test_a_canary_gets_its_share_and_requests_may_name_versions(serve: Any, models: ModelFolder) -> None:
    one, two = models.put("alpha", "1", "one"), models.put("alpha", "2", "two")
    models.say("alpha", AT_ONCE + '[labels]\ncanary = "2"\nstable = "1"\n[weights]\ncanary = 0.3\n')
    with serve(models.path, *FLAGS) as server:
        with grpc.insecure_channel(server.address) as channel:
            stub = GenerationStub(channel)

            def version_of(request_id: str) -> str:
                request = GenerateRequest(text="a dog runs", max_new_tokens=1, request_id=request_id)
                return str(stub.Generate(request, timeout=30).model_version)

            answered = {f"r-{number}": version_of(f"r-{number}") for number in range(100)}
            assert 15 <= Counter(answered.values())[two] <= 45
            assert {name: version_of(name) for name in list(answered)[:10]} == dict(list(answered.items())[:10])
        named = {"1": one, "2": two, "stable": one, "canary": two, one: one, two: two}
        assert {name: ask(server, model_version=name).model_version for name in named} == named
        with pytest.raises(grpc.RpcError, match=r"model_version: '3' of model alpha is not served; served: ") as caught:
            ask(server, model_version="3")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        models.say("alpha", AT_ONCE + '[labels]\nstable = "1"\n')
        serves(server, "2")
        assert ask(server).model_version == two and ask(server, model_version="stable").model_version == one
        with pytest.raises(grpc.RpcError, match="'canary' of model alpha is not served"):
            ask(server, model_version="canary")
        assert server.terminate() == 0


@ONE_AND_TWO
def test_a_stream_ends_on_the_version_that_it_began_on(serve: Any, models: ModelFolder, flags: tuple[str, ...]) -> None:
    one, two = models.put("alpha", "1", "one"), models.content("two")
    models.say("alpha", AT_ONCE)
    with serve(models.path, *FLAGS, *flags) as server, grpc.insecure_channel(server.address) as channel:
        stream = GenerationStub(channel).GenerateStream(GenerateRequest(text="a dog runs", max_new_tokens=900), timeout=60)
        next(stream)
        engines = server.engine_pids()
        for pid in engines:  # it has not ended before the swap, however fast this machine is
            os.kill(pid, signal.SIGSTOP)
        models.put("alpha", "2", "two")
        serves(server, "2")
        assert ask(server).model_version == two
        assert all(map(is_running, engines)) and server.metric("dragoman_version_state", version="1", state="retiring") == 1
        for pid in engines:
            os.kill(pid, signal.SIGCONT)
        messages = list(stream)
        assert messages[-1].result.model_version == one and len(messages[-1].result.tokens) == 900
        server.wait_for("a version has ended", version="1")
        until_settled(server, 2 if flags else 1)
        assert server.terminate() == 0


@ONE_AND_TWO
def test_a_model_that_is_taken_away_finishes_what_it_has(serve: Any, models: ModelFolder, flags: tuple[str, ...]) -> None:
    one = models.put("alpha", "1", "one")
    models.put("beta", "1", "other")
    with serve(models.path, *FLAGS, *flags) as server, grpc.insecure_channel(server.address) as channel:
        assert ask(server, model="alpha").model_version == one
        assert health(server, "alpha") == health_pb2.HealthCheckResponse.SERVING
        stream = GenerationStub(channel).GenerateStream(
            GenerateRequest(model="alpha", text="a dog", max_new_tokens=900), timeout=60
        )
        next(stream)
        models.remove("alpha", "1")
        server.wait_for("versions that serve", model="alpha", default=None)
        with pytest.raises(grpc.RpcError, match="'alpha' is not loaded; loaded: beta"):
            ask(server, model="alpha")
        assert health(server, "alpha") is grpc.StatusCode.NOT_FOUND and health(server, "") == health_pb2.HealthCheckResponse.SERVING
        assert list(stream)[-1].result.model_version == one
        server.wait_for("a version has ended", model="alpha", version="1")
        assert server.metric("dragoman_engine_up", model="alpha") == server.metric("dragoman_model_ready", model="alpha") == 0
        models.put("alpha", "2", "two")
        server.wait_for("versions that serve", model="alpha", default="2")
        assert ask(server, model="alpha").model_version == models.content("two")
        assert not any("Traceback" in str(event) for event in server.events)
        assert server.terminate() == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux divides a port's connections")
def test_a_front_end_that_is_started_again_does_not_need_the_folder(serve: Any, models: ModelFolder) -> None:
    """What serves is in memory; its folder may hold something else by now, and the other models are none of its business."""
    one = models.put("alpha", "1", "one")
    other = models.put("beta", "1", "other")
    with serve(models.path, *FLAGS, "--front-ends", "2") as server:
        for model in ("alpha", "beta"):
            (models.path / model / "1" / "bundle.json").write_text("{}")
            server.wait_for("a version is refused", model=model)
        pids = {event["front_end"]: event["pid"] for event in server.events if event["event"] == "front end listens"}
        os.kill(pids[1], signal.SIGKILL)
        server.wait_for("front end ended, restarting", front_end=1)
        server.wait_for("front end listens", front_end=1)
        os.kill(pids[0], signal.SIGSTOP)  # all calls are the new one's
        try:
            versions = {model: ask_at_last(server, model) for model in ("alpha", "beta")}
        finally:
            os.kill(pids[0], signal.SIGCONT)
        assert versions == {"alpha": one, "beta": other}
        assert server.terminate() == 0


def ask_at_last(server: Any, model: str) -> str:
    """Return the version that answers; the kernel may give a connection to a front end that does not answer."""
    for _ in range(30):
        try:
            return str(ask(server, model=model, timeout=2).model_version)
        except grpc.RpcError as error:
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    pytest.fail("no call came to the front end that was started again")


def test_a_hangup_has_the_folder_looked_at_at_once(serve: Any, models: ModelFolder) -> None:
    models.put("alpha", "1", "one")
    with serve(models.path, "--models-poll-seconds", "0", "--num-threads", "1") as server:
        models.put("alpha", "2", "two")
        server.process.send_signal(signal.SIGHUP)
        serves(server, "2")
        assert ask(server).model_version == models.content("two")
        assert server.terminate() == 0


@pytest.mark.parametrize("when", ["loading", "probation", "finishing"])
def test_a_drain_in_the_middle_of_a_swap_is_an_orderly_end(serve: Any, models: ModelFolder, when: str) -> None:
    models.put("alpha", "1", "one")
    models.say("alpha", "[swap]\nprobation_seconds = 0\n" if when == "finishing" else "[swap]\nprobation_seconds = 600\n")
    with serve(models.path, *FLAGS, "--drain-seconds", "30") as server, grpc.insecure_channel(server.address) as channel:
        stream = GenerationStub(channel).GenerateStream(GenerateRequest(text="a dog runs", max_new_tokens=900), timeout=60)
        next(stream)
        before = processes(server)
        models.put("alpha", "2", "two")
        if when == "loading":
            os.kill(next_engine(server, before), signal.SIGSTOP)
        else:
            serves(server, "2")
        everything = processes(server)
        server.process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].HasField("result"), "what runs has the drain"
        assert server.wait() == 0
        assert not any("Traceback" in str(event) for event in server.events)
    wait_until(lambda: not any(map(is_running, everything)), "all processes have ended", 5)
