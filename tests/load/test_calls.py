"""Single calls to a real gRPC server: each request has one outcome, with the right status and times."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from dragoman.load.calls import Caller
from dragoman.load.items import Items
from dragoman.load.plan import Injections, Plan
from dragoman.load.tally import Outcome
from dragoman.v1 import generation_pb2_grpc
from tests.client.fake_server import PATIENCE_SECONDS, failing, in_turn
from tests.load.conftest import LoadService, make_plan
from tests.system.harness.server import wait_until

KINDS = pytest.mark.parametrize("kind", ["unary", "stream", "batch"])
SIZES = {"unary": 1, "stream": 1, "batch": 2}


def plan_of(kind: str, server: LoadService, **fields: Any) -> Plan:
    return make_plan(server.address, work={"mix": {kind: 1.0}, "batch_size": 2}, **fields)


def call(plan: Plan, beside: Any = None) -> list[Outcome]:
    """Make one call and return the outcomes."""
    outcomes = []

    async def main() -> None:
        async with aio.insecure_channel(plan.server.target) as channel:
            start = time.monotonic()
            caller = Caller(plan, generation_pb2_grpc.GenerationStub(channel), outcomes.append, lambda: time.monotonic() - start)
            task = asyncio.create_task(caller.call(Items(plan).make(0), 0.0))
            if beside is not None:
                await beside(task)
            await asyncio.wait_for(asyncio.wait([task]), PATIENCE_SECONDS)

    asyncio.run(main())
    return outcomes


@KINDS
def test_an_answer_has_its_tokens_and_times(server: LoadService, kind: str) -> None:
    outcomes = call(plan_of(kind, server))
    assert len(outcomes) == SIZES[kind]
    for outcome in outcomes:
        assert (outcome.group, outcome.code, outcome.is_injected) == (kind, "OK", False)
        assert (outcome.source_tokens, outcome.generated_tokens) == (5, 4)
        assert (outcome.queue_seconds, outcome.server_seconds) == (0.001, 0.002)
        assert 0 < outcome.ended < PATIENCE_SECONDS
        assert (outcome.first_token is not None, len(outcome.gaps)) == ((True, 1) if kind == "stream" else (False, 0))


def injected(**fields: float) -> dict[str, Any]:
    return {"injections": Injections(**fields)}


# Fields of the plan, statuses of the next calls (or None: the server stalls), and group (or None: the kind), status, whether the
# failure is intended, and retries of each request.
ENDINGS = {
    "refused": ({}, ["RESOURCE_EXHAUSTED"], (None, "RESOURCE_EXHAUSTED", False, 0)),
    "retried": ({"num_retries": 3}, ["UNAVAILABLE", "RESOURCE_EXHAUSTED"], (None, "OK", False, 2)),
    "retried too seldom": ({"num_retries": 1}, ["UNAVAILABLE"] * 2, (None, "UNAVAILABLE", False, 1)),
    "not retried": ({"num_retries": 3}, ["INTERNAL"], (None, "INTERNAL", False, 0)),
    "timed out": ({"timeout_seconds": 0.1}, None, (None, "DEADLINE_EXCEEDED", False, 0)),
    "short": (injected(deadline_share=1.0, deadline_seconds=0.1), None, ("deadline", "DEADLINE_EXCEEDED", True, 0)),
    "cancelled": (injected(cancel_share=1.0, cancel_seconds=0.1), None, ("cancel", "CANCELLED", True, 0)),
    "malformed, answered": (injected(malformed_share=1.0), [], ("malformed", "MALFORMED_ACCEPTED", False, 0)),
    "malformed, refused": (injected(malformed_share=1.0), ["INVALID_ARGUMENT"], ("malformed", "INVALID_ARGUMENT", True, 0)),
}


@KINDS
@pytest.mark.parametrize(("fields", "failures", "expected"), ENDINGS.values(), ids=ENDINGS)
def test_each_request_has_the_status_of_its_call(
    server: LoadService, kind: str, fields: dict[str, Any], failures: list[str] | None, expected: tuple
) -> None:
    group, *ending = expected
    if failures is None:
        server.stall.set()
    elif kind == "batch" and group != "malformed":
        server.breaks.extend((0, failing(name)) for name in failures)
    else:
        server.script.extend(map(failing, failures))
    outcomes = call(plan_of(kind, server, **fields))
    found = [[outcome.group, outcome.code, outcome.is_intended, outcome.num_retries] for outcome in outcomes]
    assert found == [[group or kind, *ending]] * (1 if group == "malformed" else SIZES[kind])
    if group == "cancel":
        wait_until(lambda: server.num_cancelled > 0, "cancellation")


def test_a_request_of_a_batch_fails_or_is_retried_alone(server: LoadService, tmp_path: Path) -> None:
    (tmp_path / "texts").write_text("refused\n")
    for status, num_retries, expected in (
        ("INVALID_ARGUMENT", 2, {("OK", 0), ("INVALID_ARGUMENT", 0)}),
        ("UNAVAILABLE", 0, {("OK", 0), ("UNAVAILABLE", 0)}),
        ("UNAVAILABLE", 2, {("OK", 0), ("OK", 1)}),
    ):
        server.behaviours["refused"] = in_turn(failing(status))
        work = {"mix": {"batch": 1.0}, "batch_size": 2, "texts": str(tmp_path / "texts")}
        outcomes = call(make_plan(server.address, work=work, num_retries=num_retries))
        assert {(outcome.code, outcome.num_retries) for outcome in outcomes} == expected


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
    asyncio.run(Caller(plan, HalfClosed(), outcomes.append, time.monotonic).call(Items(plan).make(0), 0.0))
    assert [outcome.code for outcome in outcomes] == [code] * 2


def test_slow_readers_wait_after_each_message(server: LoadService) -> None:
    (outcome,) = call(make_plan(server.address, injections=Injections(slow_share=1.0, slow_seconds=0.1)))
    assert (outcome.group, outcome.code, outcome.is_injected) == ("slow", "OK", True)
    assert outcome.ended >= 0.2  # two messages


@KINDS
def test_a_call_whose_task_is_cancelled_has_its_outcomes(server: LoadService, kind: str) -> None:
    server.stall.set()

    async def cancel(task: asyncio.Task) -> None:
        while not server.requests:
            await asyncio.sleep(0.01)
        task.cancel()

    outcomes = call(plan_of(kind, server), beside=cancel)
    assert [outcome.code for outcome in outcomes] == ["UNFINISHED"] * SIZES[kind]
