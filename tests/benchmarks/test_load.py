"""Arrivals and how calls are accounted for, with calls that never leave the test."""

import asyncio
import statistics
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import msgspec
import pytest

from benchmarks.harness import load as load_module
from benchmarks.harness.load import UNFINISHED, Load, arrivals, send_in_turns, send_openly
from dragoman.v1 import generation_pb2, generation_pb2_grpc

LOAD = Load("", ["a", "b", "c"], 1, 0.5, rate=100.0)


def test_arrivals_are_a_poisson_process() -> None:
    times = list(arrivals(50.0, 200.0, seed=1))
    gaps = [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]
    assert times == sorted(times) and times[-1] < 200.0
    assert statistics.mean(gaps) == pytest.approx(1 / 50, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(1 / 50, rel=0.05)  # an exponential's deviation is its mean


def test_arrivals_repeat_with_their_seed_only() -> None:
    assert list(arrivals(50.0, 2.0, 1)) == list(arrivals(50.0, 2.0, 1)) != list(arrivals(50.0, 2.0, 2))


def test_open_load_does_not_wait_for_answers() -> None:
    """Nothing is answered until everything has been sent."""
    due = list(arrivals(100.0, 0.5, seed=0))

    async def main() -> list[load_module.Outcome]:
        num_sent, everything_sent = 0, asyncio.Event()

        async def call(text: str) -> str:
            nonlocal num_sent
            num_sent += 1
            if num_sent == len(due):
                everything_sent.set()
            await everything_sent.wait()
            return "OK"

        return await send_openly(call, LOAD)

    outcomes = asyncio.run(main())
    assert [outcome.due for outcome in outcomes] == due
    assert all(outcome.due <= outcome.sent <= outcome.ended and outcome.code == "OK" for outcome in outcomes)
    assert min(outcome.ended for outcome in outcomes) >= due[-1]


def test_a_call_that_never_ends_is_accounted_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "GRACE_SECONDS", 0.05)

    async def call(text: str) -> str:
        if text == "b":
            await asyncio.Event().wait()
        return "RESOURCE_EXHAUSTED"

    outcomes = asyncio.run(send_openly(call, LOAD))
    codes = [outcome.code for outcome in outcomes]
    assert len(codes) == len(list(arrivals(100.0, 0.5, seed=0)))
    assert set(codes) == {"RESOURCE_EXHAUSTED", UNFINISHED}
    assert all(outcome.ended >= 0.05 for outcome in outcomes if outcome.code == UNFINISHED)


def test_closed_load_keeps_its_callers_busy_and_no_more() -> None:
    num_running = max_running = 0

    async def call(text: str) -> str:
        nonlocal num_running, max_running
        num_running += 1
        max_running = max(max_running, num_running)
        await asyncio.sleep(0.01)
        num_running -= 1
        return "OK"

    load = msgspec.structs.replace(LOAD, rate=None, concurrency=3, seconds=1.0)
    outcomes = asyncio.run(send_in_turns(call, load))
    assert max_running == 3
    assert len(outcomes) >= 6
    assert all(outcome.sent < 1.0 for outcome in outcomes)


class Refusing(generation_pb2_grpc.GenerationServicer):
    """Refuses the text `b`, and remembers what was asked."""

    def __init__(self) -> None:
        self.requests: list[generation_pb2.GenerateRequest] = []

    def Generate(self, request: generation_pb2.GenerateRequest, context: grpc.ServicerContext) -> generation_pb2.GenerateResponse:
        self.requests.append(request)
        if request.text == "b":
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return generation_pb2.GenerateResponse()


@pytest.fixture
def refusing() -> Iterator[tuple[str, Refusing]]:
    servicer = Refusing()
    server = grpc.server(ThreadPoolExecutor(4))
    generation_pb2_grpc.add_GenerationServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}", servicer
    server.stop(None).wait()


@pytest.mark.parametrize(("rate", "concurrency"), [(100.0, 0), (None, 2)])
def test_a_process_of_its_own_sends_and_reports(refusing, rate: float | None, concurrency: int) -> None:
    address, servicer = refusing
    record = load_module.run(Load(address, ["a", "b"], 4, 0.3, rate, concurrency))
    sent = [request.text for request in servicer.requests]
    codes = [outcome.code for outcome in record.outcomes]
    assert sent and codes.count("OK") == sent.count("a") and codes.count("RESOURCE_EXHAUSTED") == sent.count("b")
    assert {request.num_beams for request in servicer.requests} == {4}
    assert record.cpu_seconds > 0 and record.wall_seconds >= record.outcomes[-1].ended - record.outcomes[0].sent


def test_a_server_that_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load_module, "CONNECT_SECONDS", 0.1)
    with pytest.raises(TimeoutError):
        asyncio.run(load_module.send(Load("127.0.0.1:1", ["a"], 1, 0.1, rate=1.0)))
