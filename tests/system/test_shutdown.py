"""The end of a server: requests under way are answered, others refused, nobody else is waited for, and the exit code tells how."""

import http.client
import json
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
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
from tests.system.conftest import ONE_ENGINE, TWO_OF_EACH
from tests.system.harness.callers import connection, generate
from tests.system.harness.http2 import HEADERS, Http2
from tests.system.harness.server import ROOT, Event, Server, is_running, processes, serving, wait_until

pytestmark = pytest.mark.e2e

# Far longer than a test may take: where something uses up the drain, nothing ends.
DRAIN_SECONDS = "10000"
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
FEWEST_AND_MOST = pytest.mark.parametrize("topology", [ONE_ENGINE, TWO_OF_EACH], scope="session")


def unread(server: Server, path: str, request: Any) -> Http2:
    """Return a connection with a call that the server has begun to answer and whose messages it cannot send."""
    found = Http2(int(server.address.rpartition(":")[2]), window=0)
    found.wait_for(HEADERS, found.call(path, request.SerializeToString()))
    return found


def over_http(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.http_address.removeprefix("http://"), timeout=60)


def ask_over_http(connection: http.client.HTTPConnection, num_tokens: int) -> tuple[http.client.HTTPResponse, Any]:
    message = json.dumps({"text": "a dog runs", "maxNewTokens": num_tokens})
    connection.request("POST", "/v1/generate", message, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response, json.loads(response.read())


def test_a_drain_answers_what_runs_refuses_what_comes_and_waits_for_nobody_else(topology: tuple[str, ...], endless: Path) -> None:
    """Watchers, unread or not, streams on which nothing is asked and connections that are kept open hold nothing up."""
    flags = ("--num-threads", "1", "--drain-seconds", DRAIN_SECONDS, "--max-slots", "32")
    is_over = threading.Event()

    def silence(*first: Any) -> Iterator[Any]:
        yield from first
        is_over.wait(60)

    def ask(connection: http.client.HTTPConnection) -> tuple[int, str | None, Any]:
        with closing(connection):
            response, body = ask_over_http(connection, 900)
            return response.status, response.headers["Connection"], body

    with serving(endless / "alpha", *topology, *flags) as server, ThreadPoolExecutor(8) as pool, ExitStack() as stack:
        server.wait_until_whole()
        for service in ("", "alpha"):
            stack.enter_context(unread(server, "/grpc.health.v1.Health/Watch", HealthCheckRequest(service=service)))
        channels = [stack.enter_context(connection(server, number)) for number in (0, 1)]
        watches = [HealthStub(channel).Watch(HealthCheckRequest()) for channel in channels]
        assert [next(watch).status for watch in watches] == [SERVING] * 2
        reflection = ServerReflectionStub(channels[0]).ServerReflectionInfo(silence(ServerReflectionRequest(list_services="")))
        assert next(reflection).list_services_response.service
        first = GenerateRequest(request_id="a", text="a dog runs", max_new_tokens=2)
        batch = GenerationStub(channels[0]).GenerateBatch(silence(first))
        assert next(batch).response.text
        kept = [stack.enter_context(closing(over_http(server))) for _ in range(2)]
        for each in kept:
            each.request("GET", "/v1/models")
            assert each.getresponse().read()
        bodies = [pool.submit(ask, over_http(server)) for _ in range(8)]
        calls = [generate(channels[number % 2], 300) for number in range(100)]  # more than there are slots for

        def num_arrived() -> float:
            gauges = ("dragoman_num_requests_running", "dragoman_num_requests_waiting")
            return sum(map(server.metric, gauges)) + sum(each.done() for each in (*calls, *bodies))

        wait_until(lambda: num_arrived() >= 108, "all have arrived")
        assert not all(call.done() for call in calls)
        server.process.send_signal(signal.SIGTERM)
        assert [next(watch).status for watch in watches] == [NOT_SERVING] * 2
        for channel in channels:
            assert generate(channel).code() is grpc.StatusCode.UNAVAILABLE
        response, body = ask_over_http(kept[0], 2)
        assert (response.status, response.headers["Connection"]) == (503, "close") and response.headers["Retry-After"]
        assert body["code"] == grpc.StatusCode.UNAVAILABLE.value[0]
        assert [call.result().usage.generated_tokens for call in calls] == [300] * 100
        for status, closes, body in (each.result() for each in bodies):
            assert (status, closes) == (200, "close") and body["usage"]["generatedTokens"] == 900
        assert server.wait() == 0
        is_over.set()
        for call in (reflection, batch):
            with pytest.raises(grpc.RpcError) as caught:
                next(call)
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE


@FEWEST_AND_MOST
def test_calls_during_the_end_are_answered_or_told_to_try_elsewhere(topology: tuple[str, ...], endless: Path) -> None:
    """Calls that gRPC core had not handed over when the port closed used to end as CANCELLED, which no client retries."""
    codes: Counter[grpc.StatusCode] = Counter()

    def call_until_the_end() -> None:
        with connection(server) as channel:
            while server.process.poll() is None:
                codes.update(call.code() for call in [generate(channel) for _ in range(20)])

    with serving(endless / "alpha", *topology) as server, ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(call_until_the_end) for _ in range(8)]
        wait_until(lambda: codes[grpc.StatusCode.OK] > 200, "200 are answered")
        assert server.terminate() == 0
        for future in futures:
            future.result()
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


def test_answers_that_nobody_reads_have_the_drain_and_not_more(endless: Path) -> None:
    """They cannot be ended on the wire, either: their last words would wait behind what was not read."""
    with serving(endless / "alpha", "--drain-seconds", "0.2") as server, ExitStack() as stack:
        for _ in range(3):
            request = GenerateRequest(text="a dog runs", max_new_tokens=900)
            stack.enter_context(unread(server, "/dragoman.v1.Generation/GenerateStream", request))
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for(Event.DRAINING)["num_running"] == 3
        assert server.wait_for(Event.DRAIN_TIME_OVER)["num_running"] == 3
        assert server.wait() == 0


@FEWEST_AND_MOST
def test_a_second_signal_ends_everything_at_once(topology: tuple[str, ...], endless: Path) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        serving(endless / "alpha", *topology, "--max-slots", "2", environment={"TMPDIR": folder}) as server,
        connection(server) as channel,
    ):
        everything = processes(server)
        sockets = [path for path in Path(folder).rglob("*") if path.is_socket()]
        calls = [generate(channel, 1000) for _ in range(100)]
        wait_until(lambda: server.metric("dragoman_num_requests_running") > 0, "they run")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(Event.DRAINING)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 130
        assert calls[-1].code() is grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: not any(map(is_running, everything)), "all processes are gone")
        wait_until(lambda: not any(path.parent.exists() for path in sockets), "they have tidied up")


@FEWEST_AND_MOST
def test_a_signal_during_the_start_is_an_orderly_end(topology: tuple[str, ...], endless: Path) -> None:
    ports = ("--port", "0", "--http-port", "0", "--metrics-port", "0")
    command = [sys.executable, "-m", "dragoman", "serve", "--models", str(endless / "alpha"), *ports, *topology]
    with subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        process.stderr.readline()  # it has begun, and no engine is ready
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(60) == 0, rest
        assert "Traceback" not in rest and f'"event":"{Event.SERVING}"' not in rest
