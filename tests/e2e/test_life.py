"""The life of a server process under load: fairness, cancellation, draining, dying engines."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from client.errors import CallError, Cancelled, Unavailable
from client.retry import RetryPolicy
from client.sync import Client

pytestmark = pytest.mark.e2e

NO_RETRY = RetryPolicy(max_attempts=1)


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"never happened: {what}"
        time.sleep(0.01)


def long_texts(captions: list[str], count: int) -> list[str]:
    """Sources whose answers take a few hundred steps."""
    return [" ".join(captions[(i * 7 + k) % len(captions)] for k in range(16)) for i in range(count)]


def test_a_short_request_overtakes_32_long_ones(serve: Any, bundles: Path, captions: list[str]) -> None:
    with serve(bundles / "en-de") as server, Client(server.address) as client, ThreadPoolExecutor(32) as pool:
        order: list[str] = []

        def long_one(text: str) -> None:
            assert client.generate(text).usage.generated_tokens > 30
            order.append("long")

        futures = [pool.submit(long_one, text) for text in long_texts(captions, 32)]
        wait_until(lambda: server.metric("dragoman_num_requests_running") >= 32 or bool(order), "32 are decoding")
        assert not order
        client.generate("A dog.", max_new_tokens=3)
        order.append("short")
        for future in futures:
            future.result()
        assert order[0] == "short"
        assert server.terminate() == 0


def test_a_cancelled_stream_gives_its_slot_back(serve: Any, bundles: Path, captions: list[str]) -> None:
    with serve(bundles / "en-de", "--max-slots", "1") as server, Client(server.address) as client:
        stream = client.stream(long_texts(captions, 1)[0])
        next(iter(stream))
        stream.cancel()
        with pytest.raises(Cancelled):
            list(stream)
        assert client.generate("A dog.").finish_reason == "eos"
        wait_until(lambda: server.metric("dragoman_slots_in_use") == 0, "no slot is in use")
        assert server.metric("dragoman_requests_failed_total", code="CANCELLED") == 1
        assert server.terminate() == 0


def test_sigterm_answers_what_runs_and_refuses_what_comes(serve: Any, bundles: Path, captions: list[str]) -> None:
    with serve(bundles / "en-de") as server, Client(server.address, retry=NO_RETRY) as client, ThreadPoolExecutor(200) as pool:
        futures = [pool.submit(client.generate, text) for text in long_texts(captions, 200)]

        def num_accepted() -> float:
            return server.metric("dragoman_num_requests_running") + server.metric("dragoman_num_requests_waiting")

        wait_until(lambda: num_accepted() + sum(f.done() for f in futures) == 200, "all 200 have arrived")
        assert not all(future.done() for future in futures)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("draining")
        with pytest.raises(Unavailable):
            client.generate("A dog.")
        assert [future.result().finish_reason for future in futures] == ["eos"] * 200
        assert server.wait() == 0


def test_a_killed_engine_costs_nobody_an_answer(serve: Any, bundles: Path, captions: list[str]) -> None:
    """Its requests end once with UNAVAILABLE, which the client's retry hides; the other model does not notice."""
    texts = long_texts(captions, 40)
    with serve(bundles, "--restart-backoff-initial-seconds", "0.1") as server, Client(server.address) as client:
        victim = next(
            event["engine_pid"] for event in server.events if event["event"] == "engine ready" and event["model"] == "en-de"
        )
        bystander_is_done = threading.Event()
        bystander: list[str] = []

        def keep_asking_the_other() -> None:
            with Client(server.address, retry=NO_RETRY) as other:
                while not bystander_is_done.is_set():
                    bystander.append(other.generate(captions[0], model="en-fr").finish_reason)

        def without_retry(text: str) -> str:
            with Client(server.address, retry=NO_RETRY) as other:
                try:
                    return other.generate(text, model="en-de").finish_reason
                except CallError as error:
                    return type(error).__name__

        with ThreadPoolExecutor(81) as pool:
            side = pool.submit(keep_asking_the_other)
            retried = [pool.submit(client.generate, text, model="en-de") for text in texts]
            bare = [pool.submit(without_retry, text) for text in texts]
            wait_until(lambda: server.metric("dragoman_num_requests_running", model="en-de") >= 40, "en-de is busy")
            os.kill(victim, signal.SIGKILL)
            outcomes = [future.result() for future in bare]
            assert set(outcomes) <= {"eos", "Unavailable"} and "Unavailable" in outcomes
            assert [future.result().finish_reason for future in retried] == ["eos"] * 40
            count = len(bystander)
            wait_until(lambda: len(bystander) > count, "the other model still answers")
            bystander_is_done.set()
            side.result()
        assert set(bystander) == {"eos"}
        assert client.is_ready("en-de") and client.is_ready("en-fr")
        assert server.metric("dragoman_engine_restarts_total", model="en-de") == 1
        assert server.metric("dragoman_engine_restarts_total", model="en-fr") == 0
        assert server.terminate() == 0


def test_a_hung_engine_is_replaced(serve: Any, bundles: Path) -> None:
    flags = ("--restart-backoff-initial-seconds", "0.1", "--watchdog-seconds", "3")
    with serve(bundles / "en-de", *flags) as server, Client(server.address) as client:
        victim = next(event["engine_pid"] for event in server.events if event["event"] == "engine ready")
        os.kill(victim, signal.SIGSTOP)
        assert client.generate("A dog.").finish_reason == "eos", "answered by the successor"
        assert server.metric("dragoman_engine_restarts_total") == 1
        assert server.terminate() == 0


def test_an_engine_ends_with_its_server(serve: Any, bundles: Path) -> None:
    with serve(bundles / "en-de") as server:
        engine = next(event["engine_pid"] for event in server.events if event["event"] == "engine ready")
        server.process.kill()
        server.wait()
        wait_until(lambda: not Path(f"/proc/{engine}").exists() or "Z (zombie)" in _status(engine), "the engine is gone")


def _status(process_id: int) -> str:
    try:
        return Path(f"/proc/{process_id}/status").read_text()
    except OSError:
        return "Z (zombie)"


@pytest.mark.parametrize("engine", ["process", "inline"])
def test_health_follows_the_models(serve: Any, bundles: Path, engine: str) -> None:
    with serve(bundles, "--engine", engine) as server, Client(server.address) as client:
        assert client.is_ready() and client.is_ready("en-de") and client.is_ready("readiness") and client.is_ready("liveness")
        assert [model.name for model in client.models()] == ["en-de", "en-fr"]
        assert client.generate("A dog.", model="en-fr").finish_reason == "eos"
        assert server.terminate() == 0
