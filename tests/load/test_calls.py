"""Single calls to a real gRPC server: each request has one outcome, with the right status and times."""

import asyncio
import time
from typing import Any

import grpc
import pytest
from grpc import aio

from dragoman.load.calls import Caller
from dragoman.load.items import Items
from dragoman.load.plan import Injections, Plan
from dragoman.load.tally import Outcome
from dragoman.v1 import generation_pb2_grpc
from tests.load.harness import PATIENCE_SECONDS, Scripted, make_plan, wait_until

KINDS = pytest.mark.parametrize("kind", ["unary", "stream", "batch"])
SIZES = {"unary": 1, "stream": 1, "batch": 2}


def call(plan: Plan, num_calls: int = 1, beside: Any = None) -> list[Outcome]:
    """Make calls one after another and return the outcomes."""
    outcomes = []

    async def main() -> None:
        async with aio.insecure_channel(plan.server.target) as channel:
            start = time.monotonic()
            caller = Caller(plan, [generation_pb2_grpc.GenerationStub(channel)], outcomes.append, lambda: time.monotonic() - start)
            for number in range(num_calls):
                task = asyncio.create_task(caller.call(Items(plan).make(number), 0.0))
                if beside is not None:
                    await beside(task)
                await asyncio.wait_for(asyncio.wait([task]), PATIENCE_SECONDS)

    asyncio.run(main())
    return outcomes


def call_kind(server: Scripted, kind: str, **fields: Any) -> list[tuple[str, str, bool, int]]:
    """Make one call, of two requests in a batch; return group, status, whether it was intended, and retries of each request."""
    outcomes = call(make_plan(server.address, work={"mix": {kind: 1.0}, "batch_size": 2}, **fields))
    return [(outcome.group, outcome.code, outcome.is_intended, outcome.num_retries) for outcome in outcomes]


@KINDS
def test_an_answer_has_its_tokens_and_times(server: Scripted, kind: str) -> None:
    outcomes = call(make_plan(server.address, work={"mix": {kind: 1.0}, "batch_size": 3}), 2)
    assert len(outcomes) == (6 if kind == "batch" else 2)
    for outcome in outcomes:
        assert (outcome.group, outcome.code, outcome.is_injected) == (kind, "OK", False)
        assert (outcome.source_tokens, outcome.generated_tokens) == (5, 4)
        assert (outcome.queue_seconds, outcome.server_seconds) == (0.001, 0.002)
        assert 0 < outcome.ended < PATIENCE_SECONDS
        assert (outcome.first_token is not None, len(outcome.gaps)) == ((True, 2) if kind == "stream" else (False, 0))


def test_the_token_is_sent(server: Scripted) -> None:
    call(make_plan(server.address))
    call(make_plan(server.address, "secret"))
    assert [metadata.get("authorization") for metadata in server.metadata] == [None, "Bearer secret"]


@KINDS
@pytest.mark.parametrize(
    ("failures", "num_retries", "code", "made"),
    [
        (["RESOURCE_EXHAUSTED"], 0, "RESOURCE_EXHAUSTED", 0),
        (["UNAVAILABLE", "RESOURCE_EXHAUSTED"], 3, "OK", 2),
        (["UNAVAILABLE"] * 2, 1, "UNAVAILABLE", 1),
        (["INTERNAL"], 3, "INTERNAL", 0),
    ],
)
def test_failures_keep_their_status_and_some_are_retried(
    server: Scripted, kind: str, failures: list[str], num_retries: int, code: str, made: int
) -> None:
    server.failures = [grpc.StatusCode[name] for name in failures]
    assert call_kind(server, kind, num_retries=num_retries) == [(kind, code, False, made)] * SIZES[kind]


def test_a_request_of_a_batch_fails_alone(server: Scripted, tmp_path) -> None:
    (tmp_path / "texts").write_text("refuse this\n")
    outcomes = call(make_plan(server.address, work={"mix": {"batch": 1.0}, "batch_size": 2, "texts": str(tmp_path / "texts")}))
    assert [outcome.code for outcome in outcomes] == ["INVALID_ARGUMENT"] * 2


def test_a_batch_that_ends_while_it_is_written_is_retried(server: Scripted) -> None:
    server.failures = [grpc.StatusCode.UNAVAILABLE] * 5
    outcomes = call(make_plan(server.address, num_retries=5, work={"mix": {"batch": 1.0}, "batch_size": 200}))
    assert {(outcome.code, outcome.num_retries) for outcome in outcomes} == {("OK", 5)}


class HalfClosed:
    """A call that grpc.aio cancels because it could not write that there are no more requests."""

    def GenerateBatch(self, requests, timeout, metadata):
        return self

    def add_done_callback(self, callback) -> None:
        pass

    async def __aiter__(self):
        raise asyncio.CancelledError
        yield


@pytest.mark.parametrize(("timeout_seconds", "code"), [(60.0, "UNAVAILABLE"), (0.001, "DEADLINE_EXCEEDED")])
def test_a_batch_whose_end_cannot_be_written_has_the_status_of_its_cause(timeout_seconds: float, code: str) -> None:
    plan = make_plan(timeout_seconds=timeout_seconds, work={"mix": {"batch": 1.0}, "batch_size": 2})
    outcomes = []
    asyncio.run(Caller(plan, [HalfClosed()], outcomes.append, time.monotonic).call(Items(plan).make(0), 0.0))
    assert [outcome.code for outcome in outcomes] == [code] * 2


@KINDS
def test_injected_cancellation_is_intended_and_reaches_the_server(server: Scripted, kind: str) -> None:
    server.stall.set()
    injections = Injections(cancel_share=1.0, cancel_seconds=0.1)
    assert call_kind(server, kind, injections=injections) == [("cancel", "CANCELLED", True, 0)] * SIZES[kind]
    wait_until(lambda: server.num_cancelled)


def test_only_injected_deadlines_are_intended(server: Scripted) -> None:
    server.stall.set()
    short = Injections(deadline_share=1.0, deadline_seconds=0.1)
    assert call_kind(server, "unary", injections=short) == [("deadline", "DEADLINE_EXCEEDED", True, 0)]
    assert call_kind(server, "unary", timeout_seconds=0.1) == [("unary", "DEADLINE_EXCEEDED", False, 0)]


def test_the_deadline_of_a_batch_is_told_from_a_late_write(server: Scripted) -> None:
    server.stall.set()
    injections = Injections(deadline_share=1.0, deadline_seconds=0.004)
    outcomes = call(make_plan(server.address, injections=injections, work={"mix": {"batch": 1.0}, "batch_size": 50}), 20)
    assert len(outcomes) == 1000
    assert {(outcome.code, outcome.is_intended) for outcome in outcomes} == {("DEADLINE_EXCEEDED", True)}


def test_an_answer_to_a_malformed_request_is_a_failure(server: Scripted) -> None:
    injections = Injections(malformed_share=1.0)
    assert call_kind(server, "unary", injections=injections) == [("malformed", "MALFORMED_ACCEPTED", False, 0)]
    server.failures = [grpc.StatusCode.INVALID_ARGUMENT]
    assert call_kind(server, "unary", injections=injections) == [("malformed", "INVALID_ARGUMENT", True, 0)]


def test_slow_readers_wait_after_each_message(server: Scripted) -> None:
    (outcome,) = call(make_plan(server.address, injections=Injections(slow_share=1.0, slow_seconds=0.05)))
    assert (outcome.group, outcome.code, outcome.is_injected) == ("slow", "OK", True)
    assert outcome.ended >= 0.2  # four messages


def test_a_server_that_is_not_there_is_a_failure() -> None:
    assert [outcome.code for outcome in call(make_plan())] == ["UNAVAILABLE"]


@KINDS
def test_a_call_whose_task_is_cancelled_has_its_outcomes(server: Scripted, kind: str) -> None:
    server.stall.set()

    async def cancel(task: asyncio.Task) -> None:
        while not server.requests:
            await asyncio.sleep(0.01)
        task.cancel()

    outcomes = call(make_plan(server.address, work={"mix": {kind: 1.0}, "batch_size": 2}), beside=cancel)
    assert [outcome.code for outcome in outcomes] == ["UNFINISHED"] * SIZES[kind]
