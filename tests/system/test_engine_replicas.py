"""One model in two engines, in the real process: the same answers, and one queue's promises, also when an engine dies."""

import os
import signal
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.errors import CallError, Overloaded, Unavailable
from dragoman.client.request import Request
from dragoman.client.retry import RetryPolicy
from dragoman.client.search import Search
from dragoman.client.sync import Client
from tests.system.harness.server import wait_until

pytestmark = pytest.mark.e2e

NO_RETRY = RetryPolicy(max_attempts=1)
TWO = ("--replicas", "2", "--num-threads", "1")


def until_both_are_up(server: Any) -> None:
    wait_until(lambda: server.metric("dragoman_engine_up") == 2, "both engines are up")


def engine_pids(server: Any) -> dict[int, int]:
    """Return the process ids of the engines that were ready last, by replica."""
    return {event["replica"]: event["engine_pid"] for event in server.events if event["event"] == "engine ready"}


def num_waiting(server: Any) -> float:
    """Return what waits at the desk; what stopped engines have they do not tell."""
    return server.metric("dragoman_num_requests_waiting")


@contextmanager
def stopped_engines(server: Any) -> Iterator[None]:
    """Have no request go on, so that there is time for many to come."""
    pids = engine_pids(server).values()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def all_at_once(ask: Callable[[int], Any], count: int) -> list[Any]:
    """Return the outcomes of that many calls from a thread each; an error is one."""

    def safely(index: int) -> Any:
        try:
            return ask(index)
        except CallError as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(safely, range(count)))


SEARCHES = (
    Search(),
    Search(num_beams=4),
    Search(num_beams=3, num_return_sequences=3),
    Search(do_sample=True, seed=7, num_return_sequences=2),
    Search(repetition_penalty=1.3),
)


def test_two_engines_answer_bit_for_bit_as_one(serve: Any, bundles: Path) -> None:
    texts = ["A dog runs through the snow.", "Two men play football in the park.", "A girl.", "People are waiting for a train."]
    requests = [
        Request(f"{text} {'And again. ' * (i % 4)}".strip(), search=SEARCHES[i % len(SEARCHES)], max_new_tokens=40)
        for i, text in enumerate(texts * 30)
    ]

    def ask(*flags: str) -> list[Any]:
        with serve(bundles / "en-de", "--max-slots", "8", *flags) as server, Client(server.address) as client:
            if flags == TWO:
                until_both_are_up(server)
            outcomes = sorted(client.generate_batch(requests), key=lambda outcome: outcome.index)
            scores = [client.score("A dog.", target).tokens for target in ("Ein Hund.", "Zwei Hunde.", "Eine Katze.")]
            if flags == TWO:
                rows = [server.metric("dragoman_engine_rows_total", replica=str(replica)) for replica in (0, 1)]
                assert min(rows) > 0.2 * max(rows), "both had something to do"
                assert sum(rows) == server.metric("dragoman_step_batch_size_sum")
            assert server.terminate() == 0
        answers = [outcome.result.answers for outcome in outcomes if outcome.result is not None]
        assert len(answers) == len(requests)
        return [*answers, *scores]

    assert ask("--num-threads", "1", "--replicas", "1") == ask(*TWO)


def test_a_killed_engine_costs_its_own_requests_only_and_comes_back(serve: Any, endless: Path) -> None:
    flags = ("--restart-backoff-initial-seconds", "0.1", "--max-slots", "4")
    with serve(endless / "alpha", *TWO, *flags) as server, Client(server.address, retry=NO_RETRY) as client:
        until_both_are_up(server)
        before = engine_pids(server)
        expected = client.generate("a dog runs", max_new_tokens=300).text

        def kill() -> None:
            wait_until(lambda: server.metric("dragoman_engine_slots_in_use", replica="1") > 0, "the engine is busy")
            os.kill(before[1], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        outcomes = all_at_once(lambda _: client.generate("a dog runs", max_new_tokens=300).text, 60)
        killer.join()
        lost = [outcome for outcome in outcomes if outcome != expected]
        assert 0 < len(lost) <= 4 + 2, "what one engine has at the most"
        assert all(isinstance(error, Unavailable) and error.retry_after_seconds for error in lost)
        assert client.is_ready()
        assert not any(event["event"] == "call" and event["code"] == "INTERNAL" for event in server.events)
        until_both_are_up(server)
        after = engine_pids(server)
        assert after[0] == before[0] and after[1] != before[1]
        restarts = [server.metric("dragoman_engine_restarts_total", replica=replica) for replica in "01"]
        assert restarts == [0, 1]
        assert set(all_at_once(lambda _: client.generate("a dog runs", max_new_tokens=300).text, 20)) == {expected}
        assert server.terminate() == 0


def test_a_drain_under_load_loses_nothing(serve: Any, endless: Path) -> None:
    with serve(endless / "alpha", *TWO, "--max-slots", "2") as server, Client(server.address, retry=NO_RETRY) as client:
        until_both_are_up(server)

        def end_it() -> None:
            wait_until(lambda: server.metric("dragoman_num_requests_waiting") >= 20, "much waits")
            server.process.send_signal(signal.SIGTERM)

        killer = threading.Thread(target=end_it)
        killer.start()
        counts = all_at_once(lambda _: client.generate("a dog runs", max_new_tokens=100).usage.generated_tokens, 40)
        killer.join()
        assert counts == [100] * 40
        assert server.wait() == 0


def test_a_full_queue_refuses_with_a_time_to_come_again(serve: Any, endless: Path) -> None:
    flags = ("--max-slots", "2", "--max-waiting-requests", "6")
    with serve(endless / "alpha", *TWO, *flags) as server, Client(server.address, retry=NO_RETRY) as client:
        until_both_are_up(server)
        outcomes = all_at_once(lambda _: client.generate("a dog runs", max_new_tokens=400).usage.generated_tokens, 60)
        refused = [outcome for outcome in outcomes if outcome != 400]
        assert len(outcomes) - len(refused) >= 2 * 2 + 6
        assert refused and all(isinstance(error, Overloaded) and error.retry_after_seconds for error in refused)
        assert server.metric("dragoman_requests_rejected_total", reason="queue_full") == len(refused)
        patient = RetryPolicy(max_attempts=1000)
        with Client(server.address, retry=patient) as other:
            assert all_at_once(lambda _: other.generate("a dog runs", max_new_tokens=50).usage.generated_tokens, 60) == [50] * 60
        assert server.terminate() == 0


def test_a_caller_with_little_does_not_wait_behind_one_with_much(serve: Any, endless: Path, tmp_path: Path) -> None:
    callers = tmp_path / "callers"
    callers.write_text("much:one-token-of-much\nlittle:one-token-of-little\n")
    flags = ("--max-slots", "2", "--auth-tokens-file", str(callers))
    with (
        serve(endless / "alpha", *TWO, *flags) as server,
        Client(server.address, token="one-token-of-much") as much,
        Client(server.address, token="one-token-of-little") as little,
        ThreadPoolExecutor(110) as pool,
    ):
        until_both_are_up(server)
        order: list[Client] = []

        def ask(client: Client) -> None:
            assert client.generate("a dog runs", max_new_tokens=50).usage.generated_tokens == 50
            order.append(client)

        with stopped_engines(server):
            tasks = [pool.submit(ask, much) for _ in range(100)]
            wait_until(lambda: num_waiting(server) >= 80, "much waits")
            tasks += [pool.submit(ask, little) for _ in range(3)]
            wait_until(lambda: server.metric("dragoman_caller_requests_running", caller="little") == 3, "little has come")
        for task in tasks:
            task.result()
        last = max(number for number, client in enumerate(order) if client is little)
        assert last < 70
        assert server.terminate() == 0


def test_priority_overtakes_what_waits_for_either_engine(serve: Any, endless: Path) -> None:
    with serve(endless / "alpha", *TWO, "--max-slots", "1") as server, Client(server.address) as client:
        until_both_are_up(server)
        order: list[int] = []

        def ask(priority: int) -> None:
            client.generate("a dog runs", max_new_tokens=200, priority=priority)
            order.append(priority)

        with ThreadPoolExecutor(40) as pool:
            with stopped_engines(server):
                tasks = [pool.submit(ask, 0) for _ in range(30)]
                wait_until(lambda: num_waiting(server) >= 24, "much waits")
                tasks += [pool.submit(ask, 10) for _ in range(2)]
                wait_until(lambda: num_waiting(server) >= 26, "all have come")
            for task in tasks:
                task.result()
        behind = Counter(order[order.index(10) :])[0]
        assert behind >= 15
        assert server.terminate() == 0
