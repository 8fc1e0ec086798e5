"""One call over every protocol: request ids, access log, counts by outcome, tokens of callers, deadlines, malformed messages."""

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from google.rpc.error_details_pb2 import RequestInfo
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_status import rpc_status

from dragoman.v1.generation_pb2 import GenerateBulkRequest, GenerateRequest, ListModelsRequest, ScoreRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.system.harness.callers import bearer
from tests.system.harness.grpc_client import failure
from tests.system.harness.openinference import infer_body
from tests.system.harness.protocol import ProtocolClient
from tests.system.harness.protocols import each_protocol, eventually, query, refusal
from tests.system.harness.server import Event, Server, serving, wait_until

pytestmark = pytest.mark.e2e

TOKEN, SECRET = "web-token", "nobody else may read this"
BEARER = bearer(TOKEN)
REQUEST = GenerateRequest(model="alpha", text="a")
CALLERS = f"""
[callers.web]
token = "{TOKEN}"
[callers.gone]
token = "gone"
expires = 2001-01-01T00:00:00Z
[callers.late]
token = "late"
default_deadline_seconds = 0.1
"""
RATE = 100
"""Messages of a connection in a second, and in a burst."""


@pytest.fixture(scope="module")
def server(translators: Path) -> Iterator[Server]:
    limits = ("--max-messages-per-second", str(RATE), "--max-text-characters", "1500")
    flags = ("--max-slots", "4", "--max-waiting-requests", "12", *limits)
    with serving(translators, *flags, callers=CALLERS) as started:
        yield started
        assert started.terminate() == 0
        assert not started.problems()
        assert TOKEN not in str(started.events) and SECRET not in str(started.events), "the log has no token and no text"


def lines(server: Server, request_id: str) -> list[dict[str, Any]]:
    return [line for line in server.logged(Event.CALL) if line.get("request_id") == request_id]


@each_protocol
async def test_a_call_has_its_id_and_caller_in_the_log_and_is_counted(server: Server, protocol: type[ProtocolClient]) -> None:
    def counts() -> tuple[float, float]:
        return server.metric("dragoman_request_success_total", model="alpha"), server.metric("dragoman_generation_tokens_total")

    async with protocol.connect(server, TOKEN) as client:
        for name, method in client.methods.items():
            request_id, before = f"{protocol.name} {name}", counts()
            [answer, *_] = await method.call(query(method, SECRET, headers={"x-request-id": request_id}))
            await eventually(lambda request_id=request_id: bool(lines(server, request_id)), "the log has its id")  # type: ignore[misc]
            [line] = lines(server, request_id)
            assert (line["code"], line["caller"], line["level"]) == ("OK", "web", "info") and line["seconds"] >= 0
            assert line["generated_tokens"] == 6 * method.num_texts and line["source_tokens"] > 0
            assert answer.counts is None or line["source_tokens"] == answer.counts[0] * method.num_texts
            assert counts() == (before[0] + method.num_texts, before[1] + 6 * method.num_texts)


@each_protocol
async def test_a_refused_call_is_counted_by_its_cause_and_unfit_ids_are_refused(
    server: Server, protocol: type[ProtocolClient]
) -> None:
    def count(cause: str) -> float:
        return server.metric("dragoman_requests_rejected_total", reason=cause)

    async with protocol.connect(server, TOKEN) as client:
        for method in client.methods.values():
            for model, text, cause in (("alpha", "x " * 1000, "invalid"), ("nobody", "a", "unknown_model")):
                before = count(cause)
                await refusal(method.call(query(method, text, model=model)))
                if protocol.name != "LibreTranslate" or cause == "invalid":
                    await eventually(lambda cause=cause, before=before: count(cause) > before, f"{cause} is counted")  # type: ignore[misc]
            error = await refusal(method.call(query(method, headers={"x-request-id": "x" * 129})))
            assert "x-request-id: 129 characters; at most 128 are allowed" in error.message
            if protocol.name in ("gRPC", "OIP gRPC") and method.num_texts == 1:
                for request_id in ("a\tb", "x" * 129):
                    error = await refusal(method.call(query(method, request_id=request_id)))
                    assert error.message.startswith(("request_id: ", "id: "))


def test_ids_of_the_message_come_before_those_beside_it_and_are_returned_and_logged(server: Server, stub: Any) -> None:
    theirs = [*BEARER, ("x-request-id", "theirs")]
    ids = [stub.Generate(GenerateRequest(model="alpha", text="a", request_id="mine"), metadata=theirs).request_id]
    ids += [stub.Generate(REQUEST, metadata=metadata).request_id for metadata in (theirs, BEARER, BEARER)]
    assert ids[:2] == ["mine", "theirs"] and len(set(ids)) == 4 and all(ids)
    assert stub.Score(ScoreRequest(model="alpha", text="a", request_id="s"), metadata=BEARER).request_id == "s"
    for path, body, request_id in (
        ("/v1/generate", {"model": "alpha", "text": "a", "requestId": "b-1"}, "b-1"),
        ("/v1/generate", {"model": "alpha", "text": "a"}, "h-1"),
        ("/v2/models/alpha/infer", infer_body("a", id="o-1"), "o-1"),
        ("/v2/models/alpha/generate", {"text_input": "a", "id": "o-2"}, "o-2"),
    ):
        headers = {"Authorization": f"Bearer {TOKEN}", "X-Request-Id": "h-1"}
        response = requests.post(f"{server.http_address}{path}", json=body, headers=headers, timeout=60)
        answer = response.json()
        assert response.headers["X-Request-Id"] == request_id == answer.get("requestId", answer.get("id"))
    for send in (stub.Generate, stub.GenerateStream):
        with pytest.raises(grpc.RpcError) as caught:
            list(send(GenerateRequest(), metadata=BEARER))
        [detail], info = rpc_status.from_call(caught.value).details, RequestInfo()
        assert detail.Unpack(info)
        wait_until(lambda request_id=info.request_id: bool(lines(server, request_id)), "the log has the id")
        assert lines(server, info.request_id)[0]["code"] == caught.value.code().name


def test_every_call_but_probes_and_documents_needs_a_token(server: Server, channel: grpc.Channel) -> None:
    services = {
        "dragoman.v1.Generation": "Generate GenerateStream GenerateBatch GenerateBulk Score ListModels GetModel",
        "inference.GRPCInferenceService": "ModelInfer ModelStreamInfer ModelMetadata ServerMetadata RepositoryIndex",
        "grpc.reflection.v1alpha.ServerReflection": "ServerReflectionInfo",
        "no.such.Service": "Method",
    }
    before = server.metric("dragoman_requests_rejected_total", reason="unauthenticated")
    for service, methods in services.items():
        for method in methods.split():
            send = channel.stream_stream(f"/{service}/{method}")
            for metadata in ((), bearer("wrong"), (("authorization", f"Basic {TOKEN}"),)):
                code, _ = failure(lambda send=send, metadata=metadata: send(iter([b""]), metadata=metadata))
                assert code == "UNAUTHENTICATED", (service, method)
    assert HealthStub(channel).Check(HealthCheckRequest()).status == HealthCheckResponse.SERVING
    assert server.metric("dragoman_requests_rejected_total", reason="unauthenticated") > before
    _, reason = failure(lambda: GenerationStub(channel).Generate(REQUEST, metadata=bearer("gone")))
    assert reason == "authorization: caller 'gone' expired at 2001-01-01T00:00:00Z"

    def send_http(method: str, path: str, token: str = "") -> requests.Response:
        body, headers = None if method == "GET" else {}, {"Authorization": token} if token else {}
        return requests.request(method, f"{server.http_address}{path}", json=body, headers=headers, timeout=60)

    public = ["/openapi.json", "/docs", "/", "/languages", "/health"]
    public += ["/v2/health/live", "/v2/health/ready", "/v2/models/alpha/ready"]
    assert {path: send_http("GET", path).status_code for path in public} == dict.fromkeys(public, 200)
    assert send_http("GET", "/v2/models/nobody/ready").status_code == 503
    closed = [("GET", path) for path in ("/v1/models", "/v2", "/v2/models/alpha", "/console/engine", "/console/models")]
    closed += [("POST", path) for path in ("/v1/generate", "/v1/score", "/v2/models/alpha/infer", "/v2/repository/index")]
    for method, path in closed:
        for token in ("", "Bearer wrong", f"Basic {TOKEN}"):
            response = send_http(method, path, token)
            assert (response.status_code, response.headers["WWW-Authenticate"]) == (401, "Bearer"), path


def test_a_call_whose_message_never_comes_is_refused_or_counted(server: Server, channel: grpc.Channel) -> None:
    def never() -> Iterator[bytes]:
        with suppress(AssertionError):
            wait_until(lambda: False, "never", 10)
        yield from ()

    def count() -> float:
        return server.metric("dragoman_requests_failed_total", model="", code="DEADLINE_EXCEEDED")

    for method in ("Generate", "GenerateStream", "Score"):
        send, before = channel.stream_stream(f"/dragoman.v1.Generation/{method}"), count()
        assert failure(lambda send=send: send(never(), timeout=20))[0] == "UNAUTHENTICATED"
        assert failure(lambda send=send: send(never(), metadata=BEARER, timeout=0.3))[0] == "DEADLINE_EXCEEDED"
        late = failure(lambda send=send: send(never(), metadata=bearer("late")))
        reason = "the server's deadline (default_deadline_seconds of 0.1 seconds) passed before the request came"
        assert late == ("DEADLINE_EXCEEDED", reason)
        wait_until(lambda before=before: count() == before + 2, "the calls are counted")


def test_messages_of_a_connection_are_taken_up_at_their_rate(server: Server) -> None:
    count = 3 * RATE // 2
    messages = [GenerateRequest(model="alpha", text="a", max_new_tokens=1, request_id=str(i)) for i in range(count)]
    kinds: list[Callable[[grpc.Channel], Any]] = [
        lambda channel: [HealthStub(channel).Check.future(HealthCheckRequest()) for _ in messages],
        lambda channel: [GenerationStub(channel).ListModels.future(ListModelsRequest(), metadata=BEARER) for _ in messages],
        lambda channel: [GenerationStub(channel).Generate.future(REQUEST) for _ in messages],
        lambda channel: [GenerationStub(channel).GenerateBatch(iter(messages), metadata=BEARER)],
    ]
    for kind in kinds:
        with grpc.insecure_channel(server.address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            began = time.monotonic()
            calls = kind(channel)
            assert len(calls) == count or len(list(calls[0])) == count
            assert {call.code().name for call in calls} <= {"OK", "UNAUTHENTICATED"}
            assert 0.8 * (count - RATE) / RATE < time.monotonic() - began < 10


def test_bulk_answers_that_are_large_together_come_in_several_messages(stub: Any) -> None:
    """Those of requests that end in the same step, and together are larger than 64 KiB."""
    fields = {"model": "alpha", "text": "a", "top_log_probs": 20, "max_new_tokens": 120}
    message = GenerateBulkRequest(requests=[GenerateRequest(request_id=str(i), **fields) for i in range(8)])
    responses = list(stub.GenerateBulk(iter([message]), metadata=BEARER))
    assert sum(response.ByteSize() for response in responses) > 2 * 64 * 2**10
    for response in responses:
        assert len(response.answers) == 1 or sum(answer.ByteSize() for answer in response.answers) <= 64 * 2**10
    assert sorted(answer.request_id for response in responses for answer in response.answers) == list("01234567")


def test_a_storm_of_refusals_writes_some_lines_and_the_number_of_the_others(server: Server, stub: Any) -> None:
    before, count = server.metric("dragoman_requests_failed_total", code="NOT_FOUND"), 300
    for _ in range(count):
        assert failure(lambda: stub.Generate(GenerateRequest(model="storm", text="a"), metadata=BEARER))[0] == "NOT_FOUND"
    assert server.metric("dragoman_requests_failed_total", code="NOT_FOUND") == before + count
    stub.Generate(GenerateRequest(model="alpha", text="a", request_id="after the storm"), metadata=BEARER)
    wait_until(lambda: bool(lines(server, "after the storm")), "successes are always written")
    written = [line for line in server.logged(Event.CALL) if line["code"] == "NOT_FOUND"]
    assert 0 < len(written) < count
    wait_until(lambda: bool(server.logged(Event.CALLS_NOT_LOGGED)), "the number of the others is written")
