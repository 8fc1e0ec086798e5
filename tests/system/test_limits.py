"""Limits of callers over every protocol: rates, tokens, concurrency, slots, priorities, models, deadlines; each is named."""

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from dragoman.v1.generation_pb2 import GenerateRequest, GetModelRequest, ListModelsRequest, ScoreRequest
from tests.system.harness.callers import bearer
from tests.system.harness.grpc_client import NativeGrpc, failure
from tests.system.harness.http_client import DeepL, LibreTranslate
from tests.system.harness.protocol import ProtocolClient
from tests.system.harness.protocols import PROTOCOLS, each_protocol, query, refusal
from tests.system.harness.server import Event, Server, serving, stopped, wait_until

pytestmark = pytest.mark.e2e

LIMITED = ("RESOURCE_EXHAUSTED", "429")
# Callers of one limit each; every protocol has its own, for buckets are shared by all connections of a caller.
LIMITS = {
    "rate": "requests_per_second = 0.01",
    "tokens": "tokens_per_second = 0.01\ntokens_burst = 5",
    "requests": "max_requests = 1",
    "waiting": "max_waiting = 1",
    "slots": "max_slots = 2",
    "priority": "max_priority = 0",
    "models": 'models = ["beta"]',
    "free": "",
}


def caller(limit: str, protocol: type[ProtocolClient]) -> str:
    return f"{limit}-{PROTOCOLS.index(protocol)}"


@pytest.fixture(scope="module")
def server(translators: Path) -> Iterator[Server]:
    entries = []
    for limit, protocol in itertools.product(LIMITS, PROTOCOLS):
        entries.append(f'[callers.{caller(limit, protocol)}]\ntoken = "{caller(limit, protocol)}"\n{LIMITS[limit]}\n')
    with serving(translators, "--max-slots", "8", callers="".join(entries)) as started:
        yield started
        assert not started.problems()


def refusals(server: Server, name: str, limit: str) -> float:
    return server.metric("dragoman_caller_refusals_total", caller=name, limit=limit)


@each_protocol
@pytest.mark.parametrize(("limit", "field"), [("rate", "requests_per_second"), ("tokens", "tokens_per_second")])
async def test_a_used_up_rate_is_refused_with_its_name_and_a_retry_hint(
    server: Server, protocol: type[ProtocolClient], limit: str, field: str
) -> None:
    name = caller(limit, protocol)
    async with protocol.connect(server, name) as client:
        first, *methods = client.methods.values()
        await first.call(query(first))
        for method in (first, *methods):
            error = await refusal(method.call(query(method)))
            assert error.status in LIMITED and f"{field}: 0.01 are allowed" in error.message, error
            assert f"limit of caller {name}" in error.message
            assert error.retry_after_seconds is not None and error.retry_after_seconds > 30
    assert refusals(server, name, field) >= 1
    assert server.metric("dragoman_caller_tokens_total", caller=name, kind="generated") == 6
    assert server.metric("dragoman_caller_tokens_total", caller=name, kind="source") > 2


@each_protocol
async def test_requests_under_way_are_bounded_and_leaving_frees_their_place(server: Server, protocol: type[ProtocolClient]) -> None:
    """Texts of one message wait for each other; requests of the native streams are refused one by one."""
    name = caller("requests", protocol)
    async with protocol.connect(server, name) as client, protocol.connect(server, name) as other:
        for method in client.methods.values():
            if protocol is not NativeGrpc or method.num_texts == 1:
                assert len(await method.call(query(method))) == method.num_texts
        first = next(iter(other.methods.values()))
        with stopped(*server.engines("alpha")):
            running = asyncio.create_task(first.call(query(first)))  # type: ignore[arg-type]
            await asyncio.to_thread(server.wait_for_metric, 1, "dragoman_caller_requests_running", caller=name)
            for method in client.methods.values():
                if method.num_texts == 1 or protocol is NativeGrpc:
                    error = await refusal(method.call(query(method)))
                    assert error.status in LIMITED and "max_requests: 1 are under way" in error.message
                    assert error.retry_after_seconds == 1
            running.cancel()
            await asyncio.to_thread(server.wait_for_metric, 0, "dragoman_caller_requests_running", caller=name)
        assert await first.call(query(first))


@each_protocol
async def test_slots_priorities_and_models_of_a_caller_are_bounded_by_name(server: Server, protocol: type[ProtocolClient]) -> None:
    too_many = "num_beams: 3 slots are needed; max_slots of caller"
    if protocol is LibreTranslate:
        too_many = "alternatives: 2 is more than 1"
    for limit, options, message in (
        ("slots", {"num_beams": 3, "num_return_sequences": 3}, too_many),
        ("priority", {"priority": 1}, "priority: 1 is above 0, max_priority of caller"),
    ):
        async with protocol.connect(server, caller(limit, protocol)) as client:
            for key, method in client.methods.items():
                if client.supports(key, options):
                    error = await refusal(method.call(query(method, options=options)))
                    assert error.status in ("INVALID_ARGUMENT", "400") and message in error.message
                    fewer = {name: value - 1 for name, value in options.items()}
                    assert await method.call(query(method, options=fewer))
    async with protocol.connect(server, caller("models", protocol)) as client:
        for method in client.methods.values():
            hidden, unknown = [await refusal(method.call(query(method, model=name))) for name in ("alpha", "gamma")]
            assert hidden.status == unknown.status and (protocol in (LibreTranslate, DeepL) or "beta" in hidden.message)
            assert hidden.message == unknown.message.replace("gamma", "alpha"), "of hidden models nothing is told"
            assert await method.call(query(method, model="beta", languages=("en", "fr")))


def test_callers_see_the_models_they_may_use(server: Server, stub: Any) -> None:
    for name, models in {"models-0": ["beta"], "free-0": ["alpha", "beta"]}.items():
        assert [model.name for model in stub.ListModels(ListModelsRequest(), metadata=bearer(name)).models] == models
        for path in ("/v1/models", "/v2/models"):
            headers = {"Authorization": f"Bearer {name}"}
            listed = requests.get(server.http_address + path, headers=headers, timeout=60).json()["models"]
            assert [model if isinstance(model, str) else model["name"] for model in listed] == models
    pair = ScoreRequest(model="beta", text="a", priority=1)
    assert failure(lambda: stub.GetModel(GetModelRequest(model="alpha"), metadata=bearer("models-0")))[0] == "NOT_FOUND"
    assert failure(lambda: stub.Score(pair, metadata=bearer("priority-0")))[0] == "INVALID_ARGUMENT"


def test_tokens_of_scores_and_of_streams_that_are_left_are_used_up(server: Server, stub: Any) -> None:
    def used(kind: str) -> float:
        return server.metric("dragoman_caller_tokens_total", caller="free-0", kind=kind)

    before = used("source")
    pair = stub.Score(ScoreRequest(model="alpha", text="a dog", target="runs"), metadata=bearer("free-0"))
    assert used("source") == before + pair.usage.source_tokens + len(pair.tokens)
    before, request = used("generated"), GenerateRequest(model="alpha", text="a", max_new_tokens=900, request_id="left")
    call = stub.GenerateStream(request, metadata=bearer("free-0"))
    tokens = sum(len(next(call).tokens) for _ in range(5))
    call.cancel()
    wait_until(lambda: any(line.get("request_id") == "left" for line in server.logged(Event.CALL)), "the stream has ended")
    assert used("generated") >= before + tokens


def test_waiting_requests_of_a_caller_are_bounded(server: Server, stub: Any) -> None:
    others, request = bearer("free-0"), GenerateRequest(model="alpha", text="a", num_beams=8, max_new_tokens=900)
    first = stub.Generate.future(request, metadata=others)
    server.wait_for_metric(8, "dragoman_slots_in_use")
    calls: list[Any] = []
    for num_refused in (2, 5):  # the second time the frontend knows it without the engine
        calls += [stub.Generate.future(request, metadata=bearer("waiting-0")) for _ in range(4)]
        wait_until(lambda num=num_refused: refusals(server, "waiting-0", "max_waiting") >= num, "all but some are refused")
    errors = [error for call in calls if call.done() and (error := call.exception()) is not None]
    for call in (first, *calls):
        call.cancel()
    message = "max_waiting: too many requests are waiting; it is a limit of caller waiting-0"
    assert {(error.code().name, error.details()) for error in errors} == {("RESOURCE_EXHAUSTED", message)}
