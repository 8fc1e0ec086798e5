"""The end of a server: what runs is answered, what comes is refused, and the exit code tells of it; SIGHUP and lost terminals."""

import http.client
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from dragoman.client.errors import Unauthenticated
from dragoman.client.sync import Client
from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.callers import connection, generate
from tests.system.harness.http2 import HEADERS, Http2
from tests.system.harness.models import ModelFolder
from tests.system.harness.server import ROOT, Event, Server, is_running, processes, serving, wait_until

pytestmark = pytest.mark.e2e

# Far longer than a test may take: where something uses up the drain, nothing ends.
DRAIN_SECONDS = "10000"
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING


def unread(server: Server, path: str, request: Any) -> Http2:
    found = Http2(server.port, window=0)
    found.wait_for(HEADERS, found.call(path, request.SerializeToString()))
    return found


def over_http(server: Server) -> http.client.HTTPConnection:
    return http.client.HTTPConnection(server.http_address.removeprefix("http://"), timeout=60)


def ask_over_http(connection: http.client.HTTPConnection, num_tokens: int) -> tuple[http.client.HTTPResponse, Any]:
    message = json.dumps({"text": "a dog runs", "maxNewTokens": num_tokens})
    connection.request("POST", "/v1/generate", message, {"Content-Type": "application/json"})
    response = connection.getresponse()
    return response, json.loads(response.read())


def test_a_drain_answers_what_runs_refuses_other_calls_and_waits_for_nothing_else(topology: tuple[str, ...], endless: Path) -> None:
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
        watches = [HealthStub(channels[i]).Watch(HealthCheckRequest(service=name)) for i, name in enumerate(("", "alpha"))]
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


def test_unread_answers_have_the_drain_time_and_not_more(endless: Path) -> None:
    """They cannot be ended on the wire, either: their last words would wait behind what was not read."""
    with serving(endless / "alpha", "--drain-seconds", "0.2") as server, ExitStack() as stack:
        for _ in range(3):
            request = GenerateRequest(text="a dog runs", max_new_tokens=900)
            stack.enter_context(unread(server, "/dragoman.v1.Generation/GenerateStream", request))
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for(Event.DRAINING)["num_running"] == 3
        assert server.wait_for(Event.DRAIN_TIME_OVER)["num_running"] == 3
        assert server.wait() == 0


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


# Code that the child runs before it becomes the server.
TAKE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
IGNORE_HANGUPS = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"


@contextmanager
def started(models: Path, before: str, **streams: Any) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    code = f"{before}\nimport os, sys; os.execv(sys.executable, [sys.executable, '-m', 'dragoman', 'serve', *sys.argv[1:]])"
    host, ports = "127.11.7.5", []  # an address that nobody else takes ports of
    for _ in range(2):
        with socket.create_server((host, 0)) as free:
            ports.append(str(free.getsockname()[1]))
    flags = ["--models", str(models), "--host", host, "--port", ports[0], "--metrics-host", host, "--metrics-port", ports[1]]
    process = subprocess.Popen([sys.executable, "-c", code, *flags], cwd=ROOT, start_new_session=True, **streams)
    try:
        with Client(f"{host}:{ports[0]}") as client:
            wait_until(lambda: process.poll() is not None or client.is_ready(), "it serves", 120)
        assert process.poll() is None
        yield process, f"{host}:{ports[0]}", f"{host}:{ports[1]}"
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()


def test_hangups_end_nothing_and_do_not_cut_a_drain_short(endless: Path) -> None:
    """Systemd may send them to every process of a service, also after the SIGTERM; a terminal that closes, more than one."""
    with serving(endless / "alpha") as server, Client(server.address) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.generate, "a dog runs", max_new_tokens=1000)
        wait_until(lambda: server.metric("dragoman_num_requests_running") == 1, "it runs")
        for pid in (*server.engines(), server.process.pid):
            os.kill(pid, signal.SIGHUP)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for(Event.DRAINING)["num_running"] == 1
        for _ in range(2):
            server.process.send_signal(signal.SIGHUP)
        assert answer.result().usage.generated_tokens == 1000
        assert server.wait() == 0
        assert server.events[-1]["event"] == Event.STOPPED and len(server.logged(Event.ENGINE_READY)) == 1


def test_a_hangup_has_the_folder_of_models_and_the_file_of_callers_read_again(models: ModelFolder) -> None:
    models.put("alpha", "1", "one")
    flags = ("--models-poll-seconds", "0", "--num-threads", "1")
    with (
        serving(models.path, *flags, callers='[callers.web]\ntoken = "old"\n') as server,
        Client(server.address, token="old") as old,
        Client(server.address, token="new") as new,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(old.generate, "a dog runs", max_new_tokens=1000)
        server.wait_for_metric(1, "dragoman_num_requests_running")
        two = models.put("alpha", "2", "two")
        server.callers_file.write_text('[callers.web]\ntoken = "new"\n')
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(Event.VERSIONS_SERVE, default="2")
        assert new.generate("a dog runs", max_new_tokens=2).model_version == two
        with pytest.raises(Unauthenticated):
            old.generate("a dog runs")
        assert answer.result().usage.generated_tokens == 1000


def read_now(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except BlockingIOError:
        return b""


def test_closing_the_terminal_drains_and_loses_the_log_alone(endless: Path) -> None:
    master, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with started(endless / "alpha", TAKE_TERMINAL, **streams) as (process, address, metrics), ThreadPoolExecutor(1) as pool:
        os.close(terminal)
        with Client(address) as client:
            answer = pool.submit(client.generate, "a dog runs", max_new_tokens=1000)
            running = re.compile(r"^dragoman_num_requests_running\{.*\} 1\.0$", re.MULTILINE)
            wait_until(lambda: bool(running.search(urlopen(f"http://{metrics}/metrics").read().decode())), "it runs")
            os.set_blocking(master, False)
            said = re.sub(rb"\x1b\[\d*m", b"", b"".join(iter(partial(read_now, master), b"")))
            assert re.search(rb" serving .* console=http://127[.\d]+:\d+/ ", said) and b'{"' not in said  # text, on a terminal
            os.close(master)
            assert answer.result().usage.generated_tokens == 1000
        assert process.wait(60) == 0


def test_under_nohup_a_server_outlives_its_terminal_and_a_reader_of_its_log(endless: Path) -> None:
    """A broken pipe, as in `dragoman serve 2>&1 | head`, used to fail every request whose line could not be written."""
    with started(endless / "alpha", IGNORE_HANGUPS, stderr=subprocess.PIPE) as (process, address, _), Client(address) as client:
        process.send_signal(signal.SIGHUP)
        assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
        assert process.poll() is None and process.stderr is not None
        process.stderr.close()
        for _ in range(3):
            assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"


@pytest.mark.parametrize("closed", [(2,), (1, 2)], ids=["error", "output and error"])
def test_a_server_without_standard_streams_serves(endless: Path, closed: tuple[int, ...]) -> None:
    """Some starters of daemons leave them out, as `2>&-` does."""
    before = f"import os\nfor number in {closed}: os.close(number)"
    with started(endless / "alpha", before) as (_, address, _), Client(address) as client:
        assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
