"""Several front ends on one port: the same answers, limits that hold across them, and what a dead one costs."""

import itertools
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub

from dragoman.client.search import Search
from dragoman.client.sync import Client
from dragoman.v1.generation_pb2 import GenerateRequest, ListModelsRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.server import wait_until

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(sys.platform != "linux", reason="only Linux divides a port's connections")]

ROOT = Path(__file__).resolve().parents[2]
TWO = ("--front-ends", "2", "--restart-backoff-initial-seconds", "0.1")
SERVING, NOT_SERVING = HealthCheckResponse.SERVING, HealthCheckResponse.NOT_SERVING
_NUMBERS = itertools.count()


def front_end_pids(server: Any) -> dict[int, int]:
    """Return the processes of the front ends, by number, as the log names them: the last of each number."""
    return {event["front_end"]: event["pid"] for event in server.events if event["event"] == "front end listens"}


@contextmanager
def connection(server: Any) -> Iterator[grpc.Channel]:
    """Open a connection of its own: channels with the same options share theirs."""
    options = [("test.number", next(_NUMBERS)), ("grpc.enable_retries", 0)]
    with grpc.insecure_channel(server.address, options) as channel:
        yield channel


@contextmanager
def connection_at(server: Any, number: int, token: str = "") -> Iterator[grpc.Channel]:
    """Open a connection that a certain front end has, which its log says."""
    while True:
        with connection(server) as channel:
            name = f"which-{next(_NUMBERS)}"
            metadata = [("x-request-id", name), *(with_token(token) if token else ())]
            GenerationStub(channel).ListModels(ListModelsRequest(), metadata=metadata)
            if server.wait_for("call", request_id=name)["front_end"] == number:
                yield channel
                return


def generate(channel: grpc.Channel, num_tokens: int = 2, **fields: Any) -> Any:
    request = GenerateRequest(model="alpha", text="a dog runs", max_new_tokens=num_tokens)
    return GenerationStub(channel).Generate.future(request, timeout=60, **fields)


def test_answers_are_those_of_one_and_connections_are_spread_and_counted(serve: Any, endless: Path) -> None:
    texts = ["a dog runs", "over the grass", "dog", "grass over a dog"]

    def ask(client: Client) -> list[Any]:
        """Return what does not depend on the time."""
        plain = [client.generate(text, model="alpha", max_new_tokens=20) for text in texts]
        beams = client.generate(texts[0], model="beta", max_new_tokens=12, search=Search(num_beams=4, num_return_sequences=3))
        stream = client.stream(texts[1], model="alpha", max_new_tokens=15)
        pieces = [(piece.text, piece.tokens) for piece in stream]
        scored = client.score(texts[0], texts[1], model="beta")
        return [*(result.answers for result in (*plain, beams)), pieces, scored.score, scored.tokens]

    with serve(endless) as server, Client(server.address) as client:
        expected = ask(client)
        assert server.terminate() == 0
    with serve(endless, *TWO) as server, ExitStack() as stack:
        with Client(server.address) as client:
            assert ask(client) == expected
        clients = [stack.enter_context(connection(server)) for _ in range(40)]
        for call in [generate(channel) for channel in clients]:
            assert call.result().finish_reason
        shares = [server.metric("dragoman_front_end_requests_total", front_end=str(number)) for number in range(2)]
        assert sum(shares) == 40 + 7 and min(shares) > 0
        assert server.metric("dragoman_request_success_total") == 40 + 7
        assert server.metric("dragoman_request_success_total", model="alpha", finish_reason="length") == 40 + 5
        assert server.metric("dragoman_e2e_request_latency_seconds_count", model="alpha") == 40 + 5
        assert server.metric("dragoman_e2e_request_latency_seconds_bucket", model="alpha", le="+Inf") == 40 + 5
        assert server.metric("dragoman_generation_tokens_total", model="alpha") == 40 * 2 + 4 * 20 + 15
        assert server.metric("dragoman_requests_admitted_total", model="alpha") == 40 + 5, "the engine's word, told once"
        assert server.metric("dragoman_model_ready", model="alpha") == 1
        assert server.metric("dragoman_front_end_up") == 2
        assert {event.get("front_end") for event in server.events if event["event"] == "call"} == {0, 1}
        assert server.terminate() == 0


CALLERS = """
[callers.web]
token = "web-token"
[callers.few]
token = "few-token"
max_requests = 3
[callers.slow]
token = "slow-token"
requests_per_second = 0.001
requests_burst = 5
"""


@contextmanager
def serving_callers(serve: Any, models: Path, file: Path) -> Iterator[Any]:
    """Run a server that knows callers, and whose engine may be stopped without being taken for hung."""
    file.write_text(CALLERS)
    with serve(models, *TWO, "--auth-tokens-file", str(file), "--watchdog-seconds", "300") as server:
        yield server
        assert server.terminate() == 0


def with_token(name: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer {name}-token")]


@contextmanager
def stopped_engine(server: Any) -> Iterator[None]:
    """Have no request go on."""
    [pid] = [event["engine_pid"] for event in server.events if event["event"] == "engine ready"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def wait_until_running(server: Any, caller: str, count: int) -> None:
    wait_until(lambda: server.metric("dragoman_caller_requests_running", caller=caller) == count, f"{count} are under way")


def kill_front_end(server: Any, number: int) -> None:
    """Kill one, and wait for the next of its number."""
    os.kill(front_end_pids(server)[number], signal.SIGKILL)
    server.wait_for("front end ended, restarting", front_end=number)
    server.wait_for("front end listens", front_end=number)


def test_a_killed_front_end_costs_its_own_calls_and_comes_back(serve: Any, endless: Path, tmp_path: Path) -> None:
    with (
        serving_callers(serve, endless / "alpha", tmp_path / "callers.toml") as server,
        connection_at(server, 0, "web") as other,
        connection_at(server, 1, "web") as victim,
    ):
        watch = HealthStub(other).Watch(HealthCheckRequest())
        assert next(watch).status == SERVING
        with stopped_engine(server):
            doomed = [generate(victim, 1000, metadata=with_token("web")) for _ in range(80)]
            spared = [generate(other, 100, metadata=with_token("web")) for _ in range(80)]
            wait_until_running(server, "web", 160)  # more than there are slots for: some wait in the one queue
            kill_front_end(server, 1)
            assert {call.exception().code() for call in doomed} == {grpc.StatusCode.UNAVAILABLE}
            wait_until_running(server, "web", 80)
        assert [call.result().usage.generated_tokens for call in spared] == [100] * 80
        wait_until(lambda: server.metric("dragoman_front_end_up") == 2, "it is back")
        assert server.metric("dragoman_front_end_restarts_total", front_end="1") == 1
        assert server.metric("dragoman_front_end_restarts_total", front_end="0") == 0
        with connection_at(server, 1, "web") as successor:
            assert generate(successor, metadata=with_token("web")).result().finish_reason
        wait_until(lambda: server.metric("dragoman_slots_in_use") == 0, "nothing is left in the engine")
        assert server.metric("dragoman_num_requests_waiting") == server.metric("dragoman_num_requests_running") == 0
        assert server.metric("dragoman_engine_restarts_total") == 0
        assert server.metric("dragoman_request_success_total") == 81
        watch.cancel()
        assert watched(watch) == [], "who watched the other one was told nothing"


def watched(watch: Any) -> list[Any]:
    """Return what is left of a stream that was cancelled."""
    left = []
    try:
        left.extend(watch)
    except grpc.RpcError as error:
        assert error.code() is grpc.StatusCode.CANCELLED
    return left


def test_a_callers_limits_hold_across_front_ends(serve: Any, endless: Path, tmp_path: Path) -> None:
    file = tmp_path / "callers.toml"
    with serving_callers(serve, endless / "alpha", file) as server, ExitStack() as stack:
        both = [stack.enter_context(connection_at(server, number, "few")) for number in (0, 1)]
        with stopped_engine(server):
            running = [generate(both[number % 2], metadata=with_token("few")) for number in range(3)]
            wait_until_running(server, "few", 3)
            for channel in both:
                assert generate(channel, metadata=with_token("few")).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            running[0].cancel()
            wait_until_running(server, "few", 2)
            last = generate(both[1], metadata=with_token("few"))
            wait_until_running(server, "few", 3)
            kill_front_end(server, 0)
            wait_until_running(server, "few", 2)
            again = stack.enter_context(connection_at(server, 0, "few"))
            place_of_the_dead = generate(again, metadata=with_token("few"))
            wait_until_running(server, "few", 3)
            assert generate(again, metadata=with_token("few")).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert running[2].code() is grpc.StatusCode.UNAVAILABLE, "it was at the one that died"
        for call in (running[1], last, place_of_the_dead):
            assert call.result().finish_reason
        codes = Counter(generate(both[1], metadata=with_token("slow")).code() for _ in range(3))
        codes.update(generate(again, metadata=with_token("slow")).code() for _ in range(4))
        assert codes == {grpc.StatusCode.OK: 5, grpc.StatusCode.RESOURCE_EXHAUSTED: 2}
        assert server.metric("dragoman_caller_refusals_total", caller="slow", limit="requests_per_second") == 2


def test_files_that_change_are_read_again_in_all(serve: Any, endless: Path, tmp_path: Path) -> None:
    """Also in one that is started while what lies in the file cannot be used."""
    file = tmp_path / "callers.toml"
    with serving_callers(serve, endless / "alpha", file) as server:
        file.write_text(CALLERS.replace("web-token", "new-token"))
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("reloaded", source="callers")
        for number in (0, 1):
            wait_until(lambda number=number: knows(server, number, "new"), f"front end {number} knows the new token")  # type: ignore[misc]
            assert not knows(server, number, "web")
        file.write_text("[callers.web\n")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("cannot be used, what was read before stays in use", source="callers")
        kill_front_end(server, 0)
        assert knows(server, 0, "new") and not knows(server, 0, "web")
        assert server.metric("dragoman_reloads_total", source="callers", result="used") == 1, "told once"
        assert server.metric("dragoman_reload_stale", source="callers") == 1


def knows(server: Any, number: int, token: str) -> bool:
    """Return whether a front end knows a token."""
    with connection_at(server, number, "few") as channel:
        call = GenerationStub(channel).ListModels.future(ListModelsRequest(), metadata=with_token(token), timeout=60)
        code = call.code()
        assert code in (grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED)
        return code is grpc.StatusCode.OK


def test_a_hung_front_end_is_replaced(serve: Any, endless: Path) -> None:
    with serve(endless / "alpha", *TWO, "--watchdog-seconds", "4") as server:
        os.kill(front_end_pids(server)[1], signal.SIGSTOP)
        assert server.wait_for("front end ended, restarting", front_end=1)["reason"].startswith("silent for")
        server.wait_for("front end listens", front_end=1)
        with connection_at(server, 1) as channel:
            assert generate(channel).result().finish_reason
        assert server.terminate() == 0


def test_a_drain_loses_nothing(serve: Any, endless: Path) -> None:
    """More than there are slots for, at both front ends, so that some wait."""
    with serve(endless / "alpha", *TWO) as server, ExitStack() as stack:
        channels = [stack.enter_context(connection_at(server, number)) for number in (0, 1)]
        watches = [HealthStub(channel).Watch(HealthCheckRequest()) for channel in channels]
        assert [next(watch).status for watch in watches] == [SERVING] * 2
        calls = [generate(channels[number % 2], 200) for number in range(100)]

        def num_accepted() -> float:
            under_way = server.metric("dragoman_num_requests_running") + server.metric("dragoman_num_requests_waiting")
            return under_way + sum(call.done() for call in calls)

        wait_until(lambda: num_accepted() >= 100, "all 100 have arrived")
        assert not all(call.done() for call in calls)
        server.process.send_signal(signal.SIGTERM)
        assert [next(watch).status for watch in watches] == [NOT_SERVING] * 2
        for channel in channels:
            assert generate(channel).code() is grpc.StatusCode.UNAVAILABLE
        assert [call.result().usage.generated_tokens for call in calls] == [200] * 100
        assert server.wait() == 0


def test_a_second_signal_ends_all_at_once(serve: Any, endless: Path) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        serve(endless / "alpha", *TWO, environment={"TMPDIR": folder}) as server,
        connection(server) as channel,
    ):
        pids = front_end_pids(server).values()
        assert len(pids) == 2
        calls = [generate(channel, 1000) for _ in range(100)]  # one alone may be over before anybody sees it run
        wait_until(lambda: server.metric("dragoman_num_requests_running") > 0, "they run")
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining", front_end=0)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait() == 130
        assert calls[-1].code() is grpc.StatusCode.UNAVAILABLE
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "front ends are gone")
        wait_until(lambda: list(Path(folder).glob("dragoman-*")) == [], "they have tidied up")


def command(models: Path, *flags: str) -> list[str]:
    ports = [] if "--port" in flags else ["--port", "0"]
    return [
        *(sys.executable, "-m", "dragoman", "serve", "--models", str(models), "--host", "127.0.0.1"),
        *("--metrics-port", "0", *ports, *TWO, *flags),
    ]


def test_a_signal_during_the_start_ends_it_in_order(endless: Path) -> None:
    with subprocess.Popen(command(endless / "alpha"), cwd=ROOT, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "front end listens" in line:  # the other may listen or not, and no engine is ready
                process.send_signal(signal.SIGTERM)
                break
        rest = process.stderr.read()
        assert process.wait(60) == 0, rest
        assert "Traceback" not in rest and '"event":"stopped"' in rest and '"event":"serving"' not in rest


@pytest.mark.parametrize("options", [(), (socket.SO_REUSEADDR, socket.SO_REUSEPORT)], ids=["alone", "shared"])
def test_a_taken_port_is_named(endless: Path, options: tuple[int, ...]) -> None:
    """Also where it is another server's front ends that share it."""
    with socket.socket() as taken:
        for option in options:
            taken.setsockopt(socket.SOL_SOCKET, option, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        result = subprocess.run(command(endless / "alpha", "--port", port), cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 2
    assert f"port: cannot listen on 127.0.0.1:{port}" in result.stderr and "Traceback" not in result.stderr


def test_two_servers_cannot_share_a_port(serve: Any, endless: Path) -> None:
    with serve(endless / "alpha", *TWO) as server:
        port = server.address.rpartition(":")[2]
        for flags in ((), ("--front-ends", "1")):
            arguments = command(endless / "alpha", "--port", port, *flags)
            result = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=120)
            assert result.returncode == 2 and port in result.stderr
        assert server.terminate() == 0


def test_whoever_calls_while_the_server_ends_is_told_to_try_elsewhere(serve: Any, endless: Path) -> None:
    codes: Counter[grpc.StatusCode] = Counter()
    is_over = threading.Event()

    def call_until_nobody_is_there() -> None:
        with connection(server) as channel:
            stub, request = GenerationStub(channel), GenerateRequest(text="a dog runs", max_new_tokens=2)
            while server.process.poll() is None and not is_over.is_set():
                codes.update(call.code() for call in [stub.Generate.future(request) for _ in range(10)])

    with serve(endless / "alpha", *TWO) as server, ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(call_until_nobody_is_there) for _ in range(6)]
        wait_until(lambda: codes[grpc.StatusCode.OK] > 100, "100 are answered")
        assert server.terminate() == 0
        is_over.set()
        for future in futures:
            future.result()
    assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
