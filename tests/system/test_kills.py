"""Two engines behind two front ends, and processes of all kinds killed: who tries again is answered, and the end is clean."""

import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.retry import RetryPolicy
from dragoman.client.sync import Client
from tests.system.harness.server import wait_until
from tests.system.test_engine_replicas import engine_pids, until_both_are_up
from tests.system.test_front_ends import front_end_pids

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(sys.platform != "linux", reason="only Linux divides a port's connections")]

TWO_OF_EACH = ("--front-ends", "2", "--replicas", "2", "--num-threads", "1", "--restart-backoff-initial-seconds", "0.1")
PATIENT = RetryPolicy(max_attempts=1000)


@contextmanager
def callers(server: Any, counts: list[int]) -> Iterator[None]:
    """Have callers ask and try again, all the time; each keeps the lengths of its answers."""
    is_over = threading.Event()

    def ask(number: int) -> None:
        with Client(server.address, retry=PATIENT) as client:
            while not is_over.is_set():
                num_tokens = 2 + (number + len(counts)) % 40
                counts.append(client.generate("a dog runs", max_new_tokens=num_tokens).usage.generated_tokens - num_tokens)

    with ThreadPoolExecutor(12) as pool:
        futures = [pool.submit(ask, number) for number in range(12)]
        try:
            yield
        finally:
            is_over.set()
            for future in futures:
                future.result()


def kill(*pids: int) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def test_who_tries_again_is_answered_whatever_is_killed(serve: Any, endless: Path) -> None:
    counts: list[int] = []
    with serve(endless / "alpha", *TWO_OF_EACH, "--max-slots", "4", "--max-waiting-requests", "8") as server:
        until_both_are_up(server)
        with callers(server, counts):

            def until_more_are_answered() -> None:
                before = len(counts)
                wait_until(lambda: len(counts) > before + 50, "more are answered")

            until_more_are_answered()
            kill(*engine_pids(server).values())
            until_more_are_answered()
            kill(front_end_pids(server)[0])
            server.wait_for("front end listens", front_end=0)
            until_both_are_up(server)
            kill(engine_pids(server)[1], front_end_pids(server)[1])
            until_more_are_answered()
            server.wait_for("front end listens", front_end=1)
            until_both_are_up(server)
            kill(*front_end_pids(server).values(), *engine_pids(server).values())
            until_more_are_answered()
        assert set(counts) == {0}
        until_both_are_up(server)
        wait_until(lambda: server.metric("dragoman_front_end_up") == 2, "both front ends are up")
        wait_until(lambda: server.metric("dragoman_slots_in_use") == 0, "nothing is left in the engines")
        assert server.metric("dragoman_num_requests_waiting") == server.metric("dragoman_num_requests_running") == 0
        assert server.metric("dragoman_request_success_total") <= len(counts)
        assert server.terminate() == 0


@pytest.mark.parametrize("is_everything", [False, True], ids=["a front end", "all"])
def test_a_drain_while_what_was_killed_starts_again_ends_in_order(
    serve: Any, endless: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_everything: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with serve(endless / "alpha", *TWO_OF_EACH, "--drain-seconds", "30") as server:
        until_both_are_up(server)
        kill(front_end_pids(server)[1], *(engine_pids(server).values() if is_everything else ()))
        server.wait_for("front end ended, restarting", front_end=1)
        assert server.terminate() == 0
        assert not any("Traceback" in event["event"] for event in server.events)
    weights = tmp_path / f"dragoman-{os.getuid()}"  # kept for the next start
    assert set(tmp_path.glob("dragoman-*")) <= {weights} and not any(path.is_socket() for path in tmp_path.rglob("*"))
