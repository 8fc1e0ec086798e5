"""Promises to callers of a server under load, whatever its processes are: order, limits, cancellation, fairness."""

import itertools
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest

from dragoman.client.errors import CallError, DeadlineExceeded, Overloaded
from dragoman.client.sync import Client
from tests.system.harness.callers import NO_RETRY, PATIENT, connection, generate
from tests.system.harness.server import Event, Server, serving, stopped, wait_until

pytestmark = pytest.mark.e2e

SLOTS, MAX_WAITING = 4, 48
CALLERS = """
[callers.much]
token = "much"
[callers.little]
token = "little"
[callers.few]
token = "few"
max_requests = 3
[callers.slow]
token = "slow"
requests_per_second = 0.001
requests_burst = 5
[callers.brief]
token = "brief"
max_deadline_seconds = 0.2
"""


@pytest.fixture(scope="module")
def server(topology: tuple[str, ...], endless: Path) -> Iterator[Server]:
    """A server with few slots that knows callers, and whose engines may be stopped without being taken for hung."""
    limits = ("--max-slots", str(SLOTS), "--max-waiting-requests", str(MAX_WAITING))
    flags = ("--num-threads", "1", *limits, "--watchdog-seconds", "300")
    with serving(endless / "alpha", *topology, *flags, callers=CALLERS) as server:
        server.wait_until_whole()
        yield server
        server.wait_until_idle()
        assert server.metric("dragoman_engine_restarts_total") == server.metric("dragoman_front_end_restarts_total") == 0
        assert server.problems() == []


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.address, token="much", retry=NO_RETRY) as client:
        yield client


def running(server: Server, caller: str) -> float:
    return server.metric("dragoman_caller_requests_running", caller=caller)


def test_a_short_request_overtakes_long_ones(server: Server, client: Client) -> None:
    """Continuous batching: a request that comes takes a free slot at once and leaves the batch when it has its tokens."""
    num_long = server.num_engines * SLOTS - 1
    with ExitStack() as stack:
        long = [stack.enter_context(client.stream("a dog runs", max_new_tokens=1000)) for _ in range(num_long)]
        wait_until(lambda: server.metric("dragoman_num_requests_running") == num_long, "the long ones are decoding")
        assert client.generate("a dog runs", max_new_tokens=3).usage.generated_tokens == 3
        assert server.metric("dragoman_num_requests_running") >= num_long, "no long one has ended"
        for stream in long:
            stream.cancel()
    server.wait_until_idle()


def test_the_servers_deadline_ends_a_request_that_waits_and_one_that_runs(server: Server, client: Client) -> None:
    with Client(server.address, token="brief", retry=NO_RETRY) as brief, ExitStack() as stack:
        with pytest.raises(DeadlineExceeded, match=r"server's deadline \(max_deadline_seconds of 0.2 seconds\) passed after"):
            brief.generate("a dog runs", max_new_tokens=1000)
        server.wait_until_idle()
        long = [stack.enter_context(client.stream("a dog runs", max_new_tokens=1000)) for _ in range(server.num_engines * SLOTS)]
        wait_until(lambda: server.metric("dragoman_num_requests_running") == len(long), "all slots are in use")
        with stopped(*server.engines()), pytest.raises(DeadlineExceeded, match="max_deadline_seconds"):
            brief.generate("a dog runs", max_new_tokens=2)
        wait_until(lambda: running(server, "brief") == 0, "it does not wait any more")
        for stream in long:
            stream.cancel()
    server.wait_until_idle()


def test_a_full_queue_refuses_with_a_retry_hint_and_retries_are_answered(server: Server, client: Client) -> None:
    before = server.metric("dragoman_requests_rejected_total", reason="queue_full")

    def ask(_: int) -> CallError | int:
        try:
            return client.generate("a dog runs", max_new_tokens=400).usage.generated_tokens
        except CallError as error:
            return error

    with ThreadPoolExecutor(100) as pool:
        outcomes = list(pool.map(ask, range(100)))
        refused = [outcome for outcome in outcomes if outcome != 400]
        assert len(outcomes) - len(refused) >= server.num_engines * SLOTS + MAX_WAITING
        assert refused and all(isinstance(error, Overloaded) and error.retry_after_seconds for error in refused)
        assert server.metric("dragoman_requests_rejected_total", reason="queue_full") - before == len(refused)
        with Client(server.address, token="much", retry=PATIENT) as patient:
            answers = pool.map(lambda _: patient.generate("a dog runs", max_new_tokens=20).usage.generated_tokens, range(100))
            assert set(answers) == {20}


@pytest.mark.parametrize("is_priority", [False, True], ids=["another caller", "a higher priority"])
def test_a_few_requests_do_not_wait_behind_many(server: Server, client: Client, is_priority: bool) -> None:
    """A caller with little does not wait behind one with much, nor does a request of a higher priority behind others."""
    order: list[str] = []
    num_many, num_few = 40, 3
    late = {"priority": 10} if is_priority else {}

    def ask(asking: Client, name: str, **options: int) -> None:
        assert asking.generate("a dog runs", max_new_tokens=100, **options).usage.generated_tokens == 100
        order.append(name)

    few = "much" if is_priority else "little"
    with Client(server.address, token=few) as other, ThreadPoolExecutor(num_many + num_few) as pool:
        with stopped(*server.engines()):
            tasks = [pool.submit(ask, client, "many") for _ in range(num_many)]
            wait_until(lambda: running(server, "much") == num_many, "all of many have come")
            tasks += [pool.submit(ask, other, "few", **late) for _ in range(num_few)]
            wait_until(lambda: running(server, few) == num_few + num_many * is_priority, "the few have come")
        for task in tasks:
            task.result()
    last = max(number for number, name in enumerate(order) if name == "few")
    assert last <= 3 * server.num_engines * SLOTS + num_few


def test_a_callers_limits_hold_on_all_connections_together(server: Server) -> None:
    with ExitStack() as stack:
        both = [stack.enter_context(connection(server, number, "few")) for number in (0, 1)]
        with stopped(*server.engines()):
            calls = [generate(both[number % 2], token="few") for number in range(3)]
            wait_until(lambda: running(server, "few") == 3, "3 are under way")
            for channel in both:
                assert generate(channel, token="few").code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            calls[0].cancel()
            wait_until(lambda: running(server, "few") == 2, "2 are under way")
            calls.append(generate(both[1], token="few"))
            wait_until(lambda: running(server, "few") == 3, "3 are under way")
        assert [call.result().usage.generated_tokens for call in calls[1:]] == [2] * 3
        codes = Counter(generate(channel, token="slow").code() for channel, _ in zip(itertools.cycle(both), range(7), strict=False))
        assert codes == {grpc.StatusCode.OK: 5, grpc.StatusCode.RESOURCE_EXHAUSTED: 2}
        assert server.metric("dragoman_caller_refusals_total", caller="slow", limit="requests_per_second") == 2
        assert server.metric("dragoman_caller_refusals_total", caller="few", limit="max_requests") == 2


def test_requests_are_spread_over_all_processes_and_counted_once(server: Server) -> None:
    def counts() -> dict[str, float]:
        labels = {"model": "alpha"}
        return {
            "answers": server.metric("dragoman_request_success_total", **labels, finish_reason="length"),
            "latencies": server.metric("dragoman_e2e_request_latency_seconds_count", **labels),
            "all latencies": server.metric("dragoman_e2e_request_latency_seconds_bucket", **labels, le="+Inf"),
            "admitted": server.metric("dragoman_requests_admitted_total", **labels),
            "tokens": server.metric("dragoman_generation_tokens_total", **labels) / 30,
        }

    before = counts()
    rows = [server.metric("dragoman_engine_rows_total", replica=str(number)) for number in range(server.num_engines)]
    with ExitStack() as stack:
        channels = [stack.enter_context(connection(server)) for _ in range(40)]
        for call in [generate(channel, 30, token="little") for channel in channels]:
            assert call.result().usage.generated_tokens == 30
    assert {name: count - before[name] for name, count in counts().items()} == dict.fromkeys(before, 40)
    more = [server.metric("dragoman_engine_rows_total", replica=str(number)) - count for number, count in enumerate(rows)]
    assert min(more) > 0.2 * max(more), "every engine had something to do"
    if server.num_frontends > 1:
        assert {call.get("front_end") for call in server.logged(Event.CALL)} == {0, 1}
    assert server.metric("dragoman_model_ready", model="alpha") == 1
