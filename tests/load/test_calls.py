"""Single calls against a real gRPC server: each request has one outcome, with the right status and times."""

import asyncio
import time

import grpc
import msgspec
import pytest
from grpc import aio

from dragoman.load.calls import Caller
from dragoman.load.items import Items
from dragoman.load.plan import Injections, Server
from dragoman.load.tally import UNFINISHED
from dragoman.v1 import generation_pb2_grpc

PATIENCE_SECONDS = 60


def call(plan, num_calls: int = 1, beside=None) -> list:
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


@pytest.fixture
def service(fake_server):
    return fake_server.service


@pytest.mark.parametrize("kind", ["unary", "stream", "batch"])
def test_answers_are_counted_with_their_tokens_and_times(fake_server, make_plan, kind: str) -> None:
    outcomes = call(make_plan(fake_server.address, work={"mix": {kind: 1.0}, "batch_size": 3}), 2)
    assert len(outcomes) == (6 if kind == "batch" else 2)
    for outcome in outcomes:
        assert (outcome.group, outcome.code, outcome.is_injected) == (kind, "OK", False)
        assert (outcome.source_tokens, outcome.generated_tokens) == (5, 4)
        assert (outcome.queue_seconds, outcome.server_seconds) == (0.001, 0.002)
        assert 0 < outcome.ended < PATIENCE_SECONDS
        assert (outcome.first_token is not None, len(outcome.gaps)) == ((True, 2) if kind == "stream" else (False, 0))


def test_the_token_is_sent(fake_server, make_plan, service) -> None:
    call(make_plan(fake_server.address))
    call(msgspec.structs.replace(make_plan(), server=Server(fake_server.address, token="secret")))
    assert "authorization" not in service.metadata[0]
    assert service.metadata[1]["authorization"] == "Bearer secret"


@pytest.mark.parametrize("kind", ["unary", "stream", "batch"])
def test_a_failure_is_counted_by_its_status(fake_server, make_plan, service, kind: str) -> None:
    service.failures = [grpc.StatusCode.RESOURCE_EXHAUSTED]
    outcomes = call(make_plan(fake_server.address, work={"mix": {kind: 1.0}, "batch_size": 2}))
    assert {(outcome.code, outcome.is_intended) for outcome in outcomes} == {("RESOURCE_EXHAUSTED", False)}
    assert len(outcomes) == (2 if kind == "batch" else 1)


def test_a_request_of_a_batch_fails_alone(fake_server, make_plan, tmp_path) -> None:
    (tmp_path / "texts").write_text("refuse this\n")
    outcomes = call(make_plan(fake_server.address, work={"mix": {"batch": 1.0}, "batch_size": 2, "texts": str(tmp_path / "texts")}))
    assert [outcome.code for outcome in outcomes] == ["INVALID_ARGUMENT"] * 2


@pytest.mark.parametrize("kind", ["unary", "stream", "batch"])
def test_retries_are_made_where_they_are_asked_for(fake_server, make_plan, service, kind: str) -> None:
    service.failures = [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.RESOURCE_EXHAUSTED]
    outcomes = call(make_plan(fake_server.address, num_retries=3, work={"mix": {kind: 1.0}, "batch_size": 2}))
    assert {(outcome.code, outcome.num_retries) for outcome in outcomes} == {("OK", 2)}


def test_a_batch_that_ends_while_it_is_written_is_tried_again(fake_server, make_plan, service) -> None:
    service.failures = [grpc.StatusCode.UNAVAILABLE] * 5
    outcomes = call(make_plan(fake_server.address, num_retries=5, work={"mix": {"batch": 1.0}, "batch_size": 200}))
    assert {(outcome.code, outcome.num_retries) for outcome in outcomes} == {("OK", 5)}


class HalfClosed:
    """Calls that grpc.aio cancels, because it could not write that there are no more requests."""

    def GenerateBatch(self, requests, timeout, metadata):
        return self

    def add_done_callback(self, callback) -> None:
        pass

    async def __aiter__(self):
        raise asyncio.CancelledError
        yield


@pytest.mark.parametrize(("timeout_seconds", "code"), [(60.0, "UNAVAILABLE"), (0.001, "DEADLINE_EXCEEDED")])
def test_a_batch_whose_end_cannot_be_written_broke(make_plan, timeout_seconds: float, code: str) -> None:
    plan = make_plan(timeout_seconds=timeout_seconds, work={"mix": {"batch": 1.0}, "batch_size": 2})
    outcomes = []
    caller = Caller(plan, [HalfClosed()], outcomes.append, time.monotonic)
    asyncio.run(caller.call(Items(plan).make(0), 0.0))
    assert [outcome.code for outcome in outcomes] == [code] * 2


def test_other_failures_are_not_tried_again(fake_server, make_plan, service) -> None:
    service.failures = [grpc.StatusCode.INTERNAL]
    (outcome,) = call(make_plan(fake_server.address, num_retries=3))
    assert (outcome.code, outcome.num_retries) == ("INTERNAL", 0)


@pytest.mark.parametrize("kind", ["unary", "stream", "batch"])
def test_cancelled_calls_are_provoked_failures_and_reach_the_server(fake_server, make_plan, service, kind: str) -> None:
    service.is_stalled.set()
    injections = Injections(cancel_share=1.0, cancel_seconds=0.2)
    outcomes = call(make_plan(fake_server.address, injections=injections, work={"mix": {kind: 1.0}, "batch_size": 2}))
    assert {(outcome.group, outcome.code, outcome.is_intended) for outcome in outcomes} == {("cancel", "CANCELLED", True)}
    until = time.monotonic() + PATIENCE_SECONDS
    while not service.num_cancelled and time.monotonic() < until:
        time.sleep(0.01)
    assert service.num_cancelled


def test_short_deadlines_are_provoked_failures(fake_server, make_plan, service) -> None:
    service.is_stalled.set()
    (outcome,) = call(make_plan(fake_server.address, injections=Injections(deadline_share=1.0, deadline_seconds=0.1)))
    assert (outcome.group, outcome.code, outcome.is_intended) == ("deadline", "DEADLINE_EXCEEDED", True)


def test_the_deadline_of_a_batch_is_told_from_what_writing_late_makes_of_it(fake_server, make_plan, service) -> None:
    service.is_stalled.set()
    injections = Injections(deadline_share=1.0, deadline_seconds=0.004)
    plan = make_plan(fake_server.address, injections=injections, work={"mix": {"batch": 1.0}, "batch_size": 50})
    outcomes = call(plan, 20)
    assert len(outcomes) == 1000
    assert {(outcome.code, outcome.is_intended) for outcome in outcomes} == {("DEADLINE_EXCEEDED", True)}


def test_a_call_that_takes_too_long_is_a_failure(fake_server, make_plan, service) -> None:
    service.is_stalled.set()
    (outcome,) = call(make_plan(fake_server.address, timeout_seconds=0.1))
    assert (outcome.code, outcome.is_intended) == ("DEADLINE_EXCEEDED", False)


def test_a_malformed_request_that_is_answered_is_a_failure(fake_server, make_plan, service) -> None:
    outcomes = call(make_plan(fake_server.address, injections=Injections(malformed_share=1.0)))
    assert [(outcome.code, outcome.is_intended) for outcome in outcomes] == [("MALFORMED_ACCEPTED", False)]
    service.failures = [grpc.StatusCode.INVALID_ARGUMENT]
    outcomes = call(make_plan(fake_server.address, injections=Injections(malformed_share=1.0)))
    assert [(outcome.code, outcome.is_intended) for outcome in outcomes] == [("INVALID_ARGUMENT", True)]


def test_slow_readers_take_their_time(fake_server, make_plan) -> None:
    (outcome,) = call(make_plan(fake_server.address, injections=Injections(slow_share=1.0, slow_seconds=0.05)))
    assert (outcome.group, outcome.code, outcome.is_injected) == ("slow", "OK", True)
    assert outcome.ended >= 0.2  # four messages


def test_nobody_there_is_a_failure(make_plan) -> None:
    (outcome,) = call(make_plan("127.0.0.1:1"))
    assert outcome.code == "UNAVAILABLE"


@pytest.mark.parametrize("kind", ["unary", "stream", "batch"])
def test_a_call_that_is_given_up_has_its_outcomes(fake_server, make_plan, service, kind: str) -> None:
    service.is_stalled.set()

    async def give_up(task: asyncio.Task) -> None:
        while not service.requests:
            await asyncio.sleep(0.01)
        task.cancel()

    outcomes = call(make_plan(fake_server.address, work={"mix": {kind: 1.0}, "batch_size": 2}), beside=give_up)
    assert [outcome.code for outcome in outcomes] == [UNFINISHED] * (2 if kind == "batch" else 1)
