"""Processes and servers that are killed or hang: calls in them end with UNAVAILABLE, and clients that try again are answered."""

import json
import os
import re
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from grpc import aio
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from dragoman.v1.generation_pb2 import GenerateRequest, ListModelsRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.conftest import ONLY_LINUX
from tests.system.harness.callers import CALL_SECONDS, RETRYING, Caller, Callers, Outcome, bearer, connection, generate, outcome
from tests.system.harness.http2 import HEADERS, Http2
from tests.system.harness.server import (
    ROOT,
    Event,
    Server,
    is_running,
    kill,
    processes,
    serving,
    stopped,
    wait_until,
)

pytestmark = pytest.mark.e2e

SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE


def mapped_weights(pid: int) -> set[str]:
    return set(re.findall(r"\S*weights\S*$", Path(f"/proc/{pid}/maps").read_text(), re.MULTILINE))


def test_a_killed_engine_costs_only_what_was_in_it(topology: tuple[str, ...], endless: Path) -> None:
    """Its requests end once, with a time to come back; the other model and watchers of health that read nothing hold nothing up."""
    flags = ("--num-threads", "1", "--max-slots", "4")
    with serving(endless, *topology, *flags) as server, ExitStack() as stack:
        server.wait_until_whole(num_models=2)
        is_one = server.num_engines == 1
        victim = server.engines("alpha")[-1]
        weights = mapped_weights(victim)
        for service in ("", "alpha", "liveness", "nobody"):
            unread = stack.enter_context(Http2(server.port, window=0))
            request = HealthCheckRequest(service=service).SerializeToString()
            unread.wait_for(HEADERS, unread.call("/grpc.health.v1.Health/Watch", request))
        channel = stack.enter_context(connection(server))
        watch = HealthStub(channel).Watch(HealthCheckRequest(service="alpha"))
        assert next(watch).status == SERVING
        expected = generate(channel, 300).result().answers[0]
        bystanders = stack.enter_context(Callers(server, ["beta"], num=2, pause_seconds=0.02, max_new_tokens=20))
        calls = [generate(channel, 300) for _ in range(60)]
        wait_until(lambda: server.metric("dragoman_slots_in_use", model="alpha") == 4 * server.num_engines, "all slots are in use")
        several = {"text_input": ["a dog runs"] * 3, "max_new_tokens": 300}
        pool = stack.enter_context(ThreadPoolExecutor(8))
        for _ in range(8):
            pool.submit(requests.post, f"{server.http_address}/v2/models/alpha/generate", json=several)
        wait_until(lambda: server.metric("dragoman_num_requests_waiting", model="alpha") >= 60, "texts of messages wait, too")
        patient = stack.enter_context(Callers(server, ["alpha"], kinds=RETRYING, num=20, max_new_tokens=100))
        kill(victim)
        if is_one:
            assert next(watch).status == NOT_SERVING
            assert next(watch).status == SERVING, "its successor is ready"
        bystanders.wait_for_more(40)
        errors = [call.exception() for call in calls]
        lost = [error for error in errors if error is not None]
        assert {error.code() for error in lost} == {UNAVAILABLE}
        assert not any("text_input" in error.details() for error in lost)
        assert is_one or len(lost) <= 4 + 2, "what one engine has at the most"
        assert all(call.result().answers[0] == expected for call, error in zip(calls, errors, strict=True) if error is None)
        server.wait_until_whole(num_models=2)
        patient.wait_for_more(40)
        stack.pop_all().close()
        assert bystanders.failures == patient.failures == []
        assert bystanders.answered_differently() == patient.answered_differently() == []
        successor = server.engines("alpha")[-1]
        assert is_one or (weights and mapped_weights(successor) == weights), "the same pages of memory"
        assert server.metric("dragoman_engine_restarts_total", model="alpha") == 1
        assert server.metric("dragoman_engine_restarts_total", model="beta") == 0
        assert not any(event["code"] == "INTERNAL" for event in server.logged(Event.CALL))
        server.wait_until_idle()


CALLERS = """
[callers.web]
token = "web"
[callers.few]
token = "few"
max_requests = 1
"""


@ONLY_LINUX
def test_a_killed_frontend_costs_only_its_own_calls(endless: Path) -> None:
    """Its callers' places are given back, and its successor knows the callers that were read last from their file."""
    flags, first = ("--front-ends", "2", "--watchdog-seconds", "300"), CALLERS.replace('"web"', '"old"')

    def kill_frontend(number: int) -> None:
        kill(server.frontends()[number])
        server.wait_for(Event.FRONTEND_RESTARTS, front_end=number)
        server.wait_for(Event.FRONTEND_READY, front_end=number)

    def knows(number: int, token: str) -> bool:
        with connection(server, number, "few") as channel:
            call = GenerationStub(channel).ListModels.future(ListModelsRequest(), metadata=bearer(token), timeout=60)
            assert call.code() in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
            return bool(call.code() is grpc.StatusCode.OK)

    def wait_until_running(caller: str, count: int) -> None:
        server.wait_for_metric(count, "dragoman_caller_requests_running", caller=caller)

    with serving(endless / "alpha", *flags, callers=first) as server:
        server.callers_file.write_text(CALLERS)
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(Event.RELOADED, source="callers")
        for number in (0, 1):
            wait_until(lambda number=number: knows(number, "web"), "the new token is known")  # type: ignore[misc]
            assert not knows(number, "old")
        server.callers_file.write_text("[callers.web\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(Event.NOT_RELOADED, source="callers")
        with connection(server, 0, "web") as spared, connection(server, 1, "web") as doomed:
            watch = HealthStub(spared).Watch(HealthCheckRequest())
            assert next(watch).status == SERVING
            with stopped(*server.engines()):
                lost = [generate(doomed, 1000, "web") for _ in range(80)] + [generate(doomed, token="few")]
                kept = [generate(spared, 100, "web") for _ in range(80)]
                wait_until_running("web", 160)  # more than there are slots for: some wait
                wait_until_running("few", 1)
                kill_frontend(1)
                assert {call.exception().code() for call in lost} == {UNAVAILABLE}
                wait_until_running("few", 0)
                wait_until_running("web", 80)
                kept.append(generate(spared, token="few"))
                wait_until_running("few", 1)
            assert [len(call.result().answers[0].tokens) for call in kept] == [100] * 80 + [2]
            watch.cancel()
            with pytest.raises(grpc.RpcError) as left:
                next(watch)
            assert left.value.code() is grpc.StatusCode.CANCELLED, "the watcher of the other one was told nothing"
        assert knows(1, "web") and not knows(1, "old")
        server.wait_until_whole()
        server.wait_until_idle()
        restarts = [server.metric("dragoman_front_end_restarts_total", front_end=number) for number in "01"]
        assert restarts == [0, 1] and server.metric("dragoman_engine_restarts_total") == 0
        assert server.metric("dragoman_request_success_total") == 81
        assert [event["source"] for event in server.logged(Event.RELOADED)] == ["callers"], "told once"
        assert server.metric("dragoman_reload_stale", source="callers") == 1


def test_retries_are_answered_when_processes_are_killed_or_hang(topology: tuple[str, ...], endless: Path, tmp_path: Path) -> None:
    flags = ("--num-threads", "1", "--max-slots", "4", "--max-waiting-requests", "8", "--watchdog-seconds", "2")
    with serving(endless / "alpha", *topology, *flags, environment={"TMPDIR": str(tmp_path)}) as server:
        server.wait_until_whole()
        with Callers(server, kinds=RETRYING, num=12, max_new_tokens=30) as callers:

            def go_on() -> None:
                callers.wait_for_more(24)
                server.wait_until_whole()

            go_on()
            kill(*server.engines())
            go_on()
            if server.num_frontends > 1:
                kill(server.frontends()[0])
                server.wait_for(Event.FRONTEND_READY, front_end=0)
                go_on()
                kill(server.engine(1), server.frontends()[1])
                server.wait_for(Event.FRONTEND_READY, front_end=1)
                go_on()
            restarts = server.metric("dragoman_engine_restarts_total")
            os.kill(server.engine(0), signal.SIGSTOP)  # a process that hangs is killed and started again, too
            wait_until(lambda: server.metric("dragoman_engine_restarts_total") > restarts, "it is started again")
            go_on()
            if server.num_frontends > 1:
                os.kill(server.frontends()[1], signal.SIGSTOP)
                assert server.wait_for(Event.FRONTEND_RESTARTS, front_end=1)["reason"].startswith("silent for")
                server.wait_for(Event.FRONTEND_READY, front_end=1)
                go_on()
            kill(*server.engines(), *server.frontends().values())
            go_on()
        assert callers.failures == [] and callers.answered_differently() == []
        server.wait_until_idle()
        assert server.metric("dragoman_request_success_total") <= len(callers.answers)
        kill(*server.engines(), *[pid for number, pid in server.frontends().items() if number])
        server.wait_for(Event.ENGINE_RESTARTS)
        assert server.terminate() == 0
        assert not any("Traceback" in str(event) for event in server.events)
    left = [path for path in tmp_path.rglob("*") if path.is_socket()]
    assert left == [] and set(tmp_path.glob("dragoman-*")) <= {tmp_path / f"dragoman-{os.getuid()}"}, "the weights alone stay"


def test_no_process_survives_a_server_that_is_killed(topology: tuple[str, ...], endless: Path) -> None:
    """Nor one that is stopped; and what they had in the temporary folder is tidied up."""
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        serving(endless / "alpha", *topology, environment={"TMPDIR": folder}) as server,
    ):
        server.wait_until_whole()
        sockets = [path for path in Path(folder).rglob("*") if path.is_socket()]
        everything = processes(server)
        assert sockets and {*server.engines(), *server.frontends().values()} < everything
        os.kill(server.engine(0), signal.SIGSTOP)
        server.process.kill()
        server.wait()
        wait_until(lambda: not any(map(is_running, everything)), "all processes are gone")
        wait_until(lambda: not any(path.parent.exists() for path in sockets), "they have tidied up")


REPLICA_FLAGS = ("--num-threads", "1", "--max-connection-age-seconds", "2")


def documented_options() -> list[tuple[str, Any]]:
    """Return the options with gRPC's own retries that docs/deploy.md gives to clients of other languages."""
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    (config,) = [block for block in re.findall(r"```json\n(.*?)```", text, re.DOTALL) if "retryPolicy" in block]
    return [("grpc.use_local_subchannel_pool", 1), ("grpc.service_config", json.dumps(json.loads(config)))]


async def configured(caller: Caller, model: str, text: str) -> list[Outcome]:
    async with aio.insecure_channel(caller.address, documented_options()) as channel:
        stub: Any = GenerationStub(channel)
        request = GenerateRequest(model=model, text=text, **caller.options)
        return [outcome(await stub.Generate(request, timeout=CALL_SECONDS)) for _ in range(20)]


async def streaming(caller: Caller, model: str, text: str) -> list[Outcome]:
    pieces = [piece async for piece in caller.client.stream(text, model=model, **caller.options)]
    return [("", "".join(piece.text for piece in pieces))]


def num_answered(server: Server) -> float:
    return server.metric("dragoman_request_success_total")


def test_no_call_fails_while_replicas_are_restarted_one_after_another_and_one_is_killed(endless: Path) -> None:
    """Neither with the Python client nor with gRPC's own retries; of streams, only those cut in the middle by the kill."""
    bundle = endless / "alpha"
    with ExitStack() as stack:
        replicas = [stack.enter_context(serving(bundle, *REPLICA_FLAGS)) for _ in range(3)]
        target = "ipv4:" + ",".join(server.address for server in replicas)
        kinds = RETRYING | {"configured": configured, "stream": streaming}
        callers = stack.enter_context(Callers(target, kinds=kinds, num=6, max_new_tokens=20))
        callers.wait_for_more(90)
        shares = [num_answered(server) for server in replicas]
        assert min(shares) > 0.2 * sum(shares), f"not balanced: {shares}"
        for number in (0, 1):
            port = replicas[number].address.rpartition(":")[2]
            assert replicas[number].terminate() == 0
            callers.wait_for_more(60)
            replicas[number] = stack.enter_context(serving(bundle, *REPLICA_FLAGS, "--port", port))
            callers.wait_for_more(60)
        assert callers.failures == []
        replicas[2].process.kill()
        replicas[2].wait()
        callers.wait_for_more(60)
        before = [num_answered(server) for server in replicas[:2]]
        callers.wait_for_more(120)
        assert all(num_answered(server) > count for server, count in zip(replicas, before, strict=False))
        callers.stop()
        assert {failure.kind for failure in callers.failures} <= {"stream"}
        assert callers.statuses.keys() <= {"UNAVAILABLE"} and len(callers.failures) <= 6
        assert callers.answered_differently() == []
        assert [server.terminate() for server in replicas[:2]] == [0, 0]
