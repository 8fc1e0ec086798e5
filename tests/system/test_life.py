"""The life of a server process under load: fairness, cancellation, draining, dying engines."""

import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest

from dragoman.client.errors import CallError, Cancelled, DeadlineExceeded, Overloaded, Unavailable
from dragoman.client.retry import RetryPolicy
from dragoman.client.sync import Client
from dragoman.v1.generation_pb2 import GenerateRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.server import wait_until

pytestmark = pytest.mark.e2e

NO_RETRY = RetryPolicy(max_attempts=1)
# For what is to be answered in the end, however long a start takes where many processes share the cores.
MANY_RETRIES = RetryPolicy(max_attempts=60, max_backoff_seconds=1.0)


def test_a_short_request_overtakes_32_long_ones(serve: Any, endless: Path) -> None:
    with serve(endless / "alpha") as server, Client(server.address) as client, ExitStack() as stack:
        long = [stack.enter_context(client.stream("a dog runs", max_new_tokens=1000)) for _ in range(32)]
        wait_until(lambda: server.metric("dragoman_num_requests_running") == 32, "32 are decoding")
        assert client.generate("a dog runs", max_new_tokens=3).usage.generated_tokens == 3
        assert server.metric("dragoman_num_requests_running") >= 32, "no long one has ended"
        for stream in long:
            stream.cancel()
        wait_until(lambda: server.metric("dragoman_slots_in_use") == 0, "no slot is in use")
        assert server.terminate() == 0


def test_whoever_calls_while_the_server_ends_is_told_to_try_elsewhere(serve: Any, endless: Path) -> None:
    """Calls that gRPC core had not handed over when the port closed used to end as CANCELLED, which no client retries."""
    codes: Counter[grpc.StatusCode] = Counter()

    def call_until_nobody_is_there(target: str, process: Any) -> None:
        with grpc.insecure_channel(target, [("grpc.enable_retries", 0)]) as channel:
            stub, request = GenerationStub(channel), GenerateRequest(text="a dog runs", max_new_tokens=2)
            while process.poll() is None:
                calls = [stub.Generate.future(request) for _ in range(20)]
                codes.update(call.code() for call in calls)

    with serve(endless / "alpha") as server, ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(call_until_nobody_is_there, server.address, server.process) for _ in range(8)]
        wait_until(lambda: codes[grpc.StatusCode.OK] > 200, "200 are answered")
        assert server.terminate() == 0
        for future in futures:
            future.result()
    assert set(codes) == {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}


def test_a_cancelled_stream_gives_its_slot_back(serve: Any, endless: Path) -> None:
    with serve(endless / "alpha", "--max-slots", "1") as server, Client(server.address) as client:
        stream = client.stream("a dog runs", max_new_tokens=1000)
        next(iter(stream))
        stream.cancel()
        with pytest.raises(Cancelled):
            list(stream)
        assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
        wait_until(lambda: server.metric("dragoman_slots_in_use") == 0, "no slot is in use")
        assert server.metric("dragoman_requests_failed_total", code="CANCELLED") == 1
        assert server.terminate() == 0


def test_a_deadline_gives_its_slot_back(serve: Any, endless: Path) -> None:
    with serve(endless / "alpha", "--max-slots", "1") as server, Client(server.address, retry=NO_RETRY) as client:
        with pytest.raises(DeadlineExceeded):
            client.generate("a dog runs", max_new_tokens=1000, timeout_seconds=0.05)
        assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
        wait_until(lambda: server.metric("dragoman_slots_in_use") == 0, "no slot is in use")
        assert server.terminate() == 0


def test_a_full_queue_refuses_and_the_clients_retry_gets_through(serve: Any, endless: Path) -> None:
    """One slot and one place to wait for 32 callers at once, of whom each would need the slot for a thousand steps."""
    flags = ("--max-slots", "1", "--max-waiting-requests", "1")
    with (
        serve(endless / "alpha", *flags) as server,
        Client(server.address, retry=NO_RETRY) as impatient,
        ThreadPoolExecutor(32) as pool,
    ):

        def ask() -> float | None:
            try:
                assert impatient.generate("a dog runs", max_new_tokens=1000).usage.generated_tokens == 1000
            except Overloaded as refusal:
                return refusal.retry_after_seconds
            return None

        hints = [future.result() for future in [pool.submit(ask) for _ in range(32)]]
        refusals = [hint for hint in hints if hint is not None]
        assert 0 < len(refusals) < 32 and min(refusals) > 0
        assert server.metric("dragoman_requests_failed_total", code="RESOURCE_EXHAUSTED") == len(refusals)
        with Client(server.address, retry=RetryPolicy(max_attempts=1000)) as patient:
            futures = [pool.submit(patient.generate, "a dog runs", max_new_tokens=50) for _ in range(32)]
            assert [future.result().usage.generated_tokens for future in futures] == [50] * 32
        assert server.terminate() == 0


def test_sigterm_answers_what_runs_and_refuses_what_comes(serve: Any, endless: Path) -> None:
    """More than there are slots for, so that some wait."""
    with serve(endless / "alpha") as server, Client(server.address, retry=NO_RETRY) as client, ThreadPoolExecutor(100) as pool:
        futures = [pool.submit(client.generate, "a dog runs", max_new_tokens=200) for _ in range(100)]

        def num_accepted() -> float:
            return server.metric("dragoman_num_requests_running") + server.metric("dragoman_num_requests_waiting")

        wait_until(lambda: num_accepted() + sum(future.done() for future in futures) >= 100, "all 100 have arrived")
        assert not all(future.done() for future in futures)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        with pytest.raises(Unavailable):
            client.generate("a dog runs")
        assert [future.result().usage.generated_tokens for future in futures] == [200] * 100
        assert server.wait() == 0


def test_a_killed_engine_costs_nobody_an_answer(serve: Any, endless: Path) -> None:
    """Its requests end once with UNAVAILABLE, which the client's retry hides; the other model does not notice."""
    patience = RetryPolicy(max_attempts=100)
    with serve(endless, "--restart-backoff-initial-seconds", "0.1") as server, Client(server.address, retry=patience) as client:
        victim = engine_pid(server, "alpha")
        is_over = threading.Event()
        bystander: list[str] = []

        def keep_asking_the_other() -> None:
            with Client(server.address, retry=NO_RETRY) as other:
                while not is_over.is_set():
                    bystander.append(other.generate("a dog runs", model="beta", max_new_tokens=20).finish_reason)

        def ask_once() -> str:
            with Client(server.address, retry=NO_RETRY) as other:
                try:
                    return other.generate("a dog runs", model="alpha", max_new_tokens=1000).finish_reason
                except CallError as error:
                    return type(error).__name__

        with ThreadPoolExecutor(81) as pool:
            side = pool.submit(keep_asking_the_other)
            retried = [pool.submit(client.generate, "a dog runs", model="alpha", max_new_tokens=100) for _ in range(40)]
            bare = [pool.submit(ask_once) for _ in range(40)]
            wait_until(lambda: server.metric("dragoman_num_requests_running", model="alpha") >= 20, "alpha is busy")
            os.kill(victim, signal.SIGKILL)
            outcomes = [future.result() for future in bare]
            assert set(outcomes) <= {"length", "Unavailable"} and "Unavailable" in outcomes
            assert [future.result().usage.generated_tokens for future in retried] == [100] * 40
            count = len(bystander)
            wait_until(lambda: len(bystander) > count, "the other model still answers")
            is_over.set()
            side.result()
        assert set(bystander) == {"length"}
        wait_until(lambda: client.is_ready("alpha"), "the killed engine's successor is ready")  # the others may have been fast
        assert client.is_ready("beta")
        assert server.metric("dragoman_engine_restarts_total", model="alpha") == 1
        assert server.metric("dragoman_engine_restarts_total", model="beta") == 0
        assert server.terminate() == 0


def test_a_pinned_engine_keeps_to_its_core(serve: Any, endless: Path) -> None:
    cores = os.sched_getaffinity(0)
    if len(cores) < 2:
        pytest.skip("there is one core only")
    with serve(endless / "alpha", "--num-threads", "1", "--pin-engines", "true") as server, Client(server.address) as client:
        assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
        assert os.sched_getaffinity(engine_pid(server, "alpha")) == {max(cores)}
        assert os.sched_getaffinity(server.process.pid) == cores
        assert server.terminate() == 0


def test_an_engine_and_its_successor_map_the_same_weights(serve: Any, endless: Path, tmp_path: Path) -> None:
    flags = ("--restart-backoff-initial-seconds", "0.1", "--weights-cache", str(tmp_path))
    with serve(endless / "alpha", *flags) as server, Client(server.address, retry=MANY_RETRIES) as client:
        answer = client.generate("a dog runs", max_new_tokens=2)
        (weights,) = tmp_path.glob("*/alpha-*/weights.data")
        first = engine_pid(server, "alpha")
        assert str(weights) in Path(f"/proc/{first}/maps").read_text()
        os.kill(first, signal.SIGKILL)
        assert client.generate("a dog runs", max_new_tokens=2).text == answer.text
        second = server.wait_for("engine ready")["engine_pid"]
        assert second != first and str(weights) in Path(f"/proc/{second}/maps").read_text()
        assert server.terminate() == 0


def engine_pid(server: Any, model: str) -> int:
    """Return the process id of a model's first engine."""
    events = (event for event in server.events if event["event"] == "engine ready" and event["model"] == model)
    return int(next(events)["engine_pid"])


def test_a_hung_engine_is_replaced(serve: Any, endless: Path) -> None:
    flags = ("--restart-backoff-initial-seconds", "0.1", "--watchdog-seconds", "3")
    with serve(endless / "alpha", *flags) as server, Client(server.address, retry=MANY_RETRIES) as client:
        os.kill(engine_pid(server, "alpha"), signal.SIGSTOP)
        assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length", "answered by the successor"
        assert server.metric("dragoman_engine_restarts_total") == 1
        assert server.terminate() == 0


@pytest.mark.parametrize(
    "is_stopped",
    [False, pytest.param(True, marks=pytest.mark.skipif(sys.platform != "linux", reason="only Linux wakes what is stopped"))],
    ids=["running", "stopped"],
)
def test_an_engine_ends_with_its_server_and_tidies_up(serve: Any, endless: Path, is_stopped: bool) -> None:
    with (
        tempfile.TemporaryDirectory(dir="/tmp") as folder,
        serve(endless / "alpha", environment={"TMPDIR": folder}) as server,
    ):
        assert list(Path(folder).glob("dragoman-*")), "the socket is here"
        engine = engine_pid(server, "alpha")
        if is_stopped:
            os.kill(engine, signal.SIGSTOP)
        server.process.kill()
        server.wait()
        wait_until(lambda: not Path(f"/proc/{engine}").exists() or "Z (zombie)" in _status(engine), "the engine is gone")
        assert list(Path(folder).glob("dragoman-*")) == []


def _status(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return "Z (zombie)"


@pytest.mark.parametrize("engine", ["process", "inline"])
def test_health_follows_the_models(serve: Any, endless: Path, engine: str) -> None:
    with serve(endless, "--engine", engine) as server, Client(server.address) as client:
        assert client.is_ready() and client.is_ready("alpha") and client.is_ready("readiness") and client.is_ready("liveness")
        assert [model.name for model in client.models()] == ["alpha", "beta"]
        assert client.generate("a dog runs", model="beta", max_new_tokens=2).finish_reason == "length"
        assert server.terminate() == 0
