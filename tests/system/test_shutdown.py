"""What the end of a server waits for: requests, and nobody else."""

import http.client
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.http2 import HEADERS, Http2

pytestmark = pytest.mark.e2e

# Far longer than a test may take: where something uses up the drain, nothing ends.
DRAIN_SECONDS = 10_000
WATCH, STREAM = "/grpc.health.v1.Health/Watch", "/dragoman.v1.Generation/GenerateStream"
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def port(server: Any) -> int:
    return int(server.address.rpartition(":")[2])


def taking_nothing(server: Any, path: str, request: Any) -> Http2:
    """Return a connection with a call that the server has begun to answer and whose messages it cannot send."""
    connection = Http2(port(server), window=0)
    connection.wait_for(HEADERS, connection.call(path, request.SerializeToString()))
    return connection


def test_watchers_that_take_nothing_hold_up_neither_health_nor_the_end(serve: Any, endless: Path) -> None:
    """A single one used to freeze the health of everybody, and to delay the end of the process for as long as it liked."""
    flags = ("--drain-seconds", str(DRAIN_SECONDS), "--restart-backoff-initial-seconds", "0.1")
    with serve(endless / "alpha", *flags) as server, ExitStack() as stack:
        for service in ("", "alpha", "liveness", "nobody"):
            stack.enter_context(taking_nothing(server, WATCH, HealthCheckRequest(service=service)))
        channel = stack.enter_context(grpc.insecure_channel(server.address))
        watch = HealthStub(channel).Watch(HealthCheckRequest())
        assert next(watch).status == SERVING
        [engine] = [event["engine_pid"] for event in server.events if event["event"] == "engine ready"]
        os.kill(engine, signal.SIGKILL)
        assert next(watch).status == NOT_SERVING
        assert next(watch).status == SERVING, "it was restarted"
        assert HealthStub(channel).Check(HealthCheckRequest(service="alpha"), timeout=60).status == SERVING
        server.process.send_signal(signal.SIGTERM)
        assert next(watch).status == NOT_SERVING, "who listens is told before the end"
        assert server.wait() == 0


def test_streams_that_ask_for_nothing_do_not_use_up_the_drain(serve: Any, endless: Path) -> None:
    with (
        serve(endless / "alpha", "--drain-seconds", str(DRAIN_SECONDS)) as server,
        grpc.insecure_channel(server.address) as channel,
    ):
        is_over = threading.Event()

        def silence(*first: Any) -> Iterator[Any]:
            yield from first
            is_over.wait(60)

        reflection = ServerReflectionStub(channel).ServerReflectionInfo(silence(ServerReflectionRequest(list_services="")))
        next(reflection)
        batch = GenerationStub(channel).GenerateBatch(silence(GenerateRequest(request_id="a", text="a dog runs", max_new_tokens=2)))
        assert next(batch).response.text
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for("draining")["num_running"] == 1, "the batch, which ends by itself"
        assert server.wait() == 0
        is_over.set()
        for call in (reflection, batch):
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


def test_answers_that_nobody_takes_have_the_drain_and_not_more(serve: Any, endless: Path) -> None:
    """They cannot be ended on the wire, either: their last words would wait behind what was not taken."""
    with serve(endless / "alpha", "--drain-seconds", "0.2") as server, ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(taking_nothing(server, STREAM, GenerateRequest(text="a dog runs", max_new_tokens=900)))
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for("draining")["num_running"] == 3
        assert server.wait_for("drain time is over")["num_running"] == 3
        assert server.wait() == 0


def test_a_drain_loses_no_request_over_http(serve: Any, endless: Path) -> None:
    """Those that run are answered, on connections that then close; each that comes is told to come again, and none is cut."""

    def ask(server: Any, num_tokens: int) -> tuple[int, dict[str, str], bytes]:
        message = json.dumps({"text": "a dog runs", "maxNewTokens": num_tokens})
        connection = http.client.HTTPConnection(server.http_address.removeprefix("http://"), timeout=60)
        try:
            connection.request("POST", "/v1/generate", message, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, {name.lower(): value for name, value in response.getheaders()}, response.read()
        finally:
            connection.close()

    with (
        serve(endless / "alpha", "--drain-seconds", str(DRAIN_SECONDS)) as server,
        ThreadPoolExecutor(8) as pool,
        ExitStack() as stack,
    ):
        kept = [
            stack.enter_context(closing(http.client.HTTPConnection(server.http_address.removeprefix("http://")))) for _ in range(2)
        ]
        for connection in kept:
            connection.request("GET", "/v1/models")
            assert connection.getresponse().read()
        running = [pool.submit(ask, server, 900) for _ in range(8)]
        deadline = time.monotonic() + 30
        while server.metric("dragoman_slots_in_use", model="alpha") < len(running):
            assert time.monotonic() < deadline
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for("draining")["num_running"] == len(running)
        kept[0].request("POST", "/v1/generate", '{"text": "a"}', {"Content-Type": "application/json"})
        refused = kept[0].getresponse()
        assert (refused.status, refused.headers["Connection"]) == (503, "close") and refused.headers["Retry-After"]
        assert json.loads(refused.read())["code"] == grpc.StatusCode.UNAVAILABLE.value[0]
        for status, headers, body in (each.result() for each in running):
            assert (status, headers["connection"]) == (200, "close")
            assert json.loads(body)["usage"]["generatedTokens"] == 900
        assert server.wait() == 0, "a connection on which nothing is asked for holds nothing up"
