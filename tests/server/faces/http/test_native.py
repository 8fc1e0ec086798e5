"""The native API over HTTP says what it says over gRPC."""

import asyncio
import json
from typing import Any

import grpc
import pytest
from google.protobuf import json_format
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.http.native import parse
from dragoman.v1.generation_pb2 import (
    GenerateRequest,
    GenerateResponse,
    ListModelsRequest,
    ListModelsResponse,
    ScoreRequest,
    ScoreResponse,
)
from tests.server.faces.http.conftest import events

REQUESTS = [
    {"text": "a dog"},
    {"text": "a dog", "maxNewTokens": 7, "numBeams": 3, "numReturnSequences": 2, "lengthPenalty": 0.25},
    {"text": "a dog", "max_new_tokens": 7, "top_log_probs": 2},
    {"text": "a dog", "doSample": True, "seed": str(2**64 - 1), "temperature": 0.5, "topK": 3, "topP": 0.5},
    {"text": "a dog", "forcedPrefix": "b", "suppressedTokens": [5, 6], "returnLogProbs": True},
    {"text": "äöü 日本 🐕", "requestId": "r-1", "priority": -3},
]


def without_times(message: GenerateResponse) -> GenerateResponse:
    message.ClearField("timings")
    message.ClearField("request_id")
    return message


@pytest.mark.parametrize("request_", REQUESTS)
def test_answers_are_those_of_grpc(serve_http: Any, request_: dict[str, Any]) -> None:
    async def run() -> None:
        async with serve_http() as world:
            status, told = await world.ask("/v1/generate", request_)
            assert status == 200
            message = json_format.ParseDict(request_, GenerateRequest())
            expected = await world.stub.Generate(message)
            assert world.engine.requests[0].search == world.engine.requests[1].search
            answer = json_format.ParseDict(told, GenerateResponse())
            assert message.request_id in ("", answer.request_id)
            assert without_times(answer) == without_times(expected)

    asyncio.run(run())


def test_every_field_of_an_answer_is_written(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            _, told = await world.ask("/v1/generate", {"text": "a"})
            assert (
                told["isTruncated"] is False
                and told["answers"][0]["logProbs"] == []
                and told["finishReason"] == "FINISH_REASON_EOS"
            )

    asyncio.run(run())


def test_a_stream_has_the_pieces_of_grpc(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            async with world.post("/v1/generate:stream", {"text": "a dog"}) as response:
                assert (response.status, response.content_type) == (200, "text/event-stream")
                told = [(name, piece) async for name, piece in events(response)]
            expected = [piece async for piece in world.stub.GenerateStream(GenerateRequest(text="a dog"))]
            assert [(name, piece["text"], piece["tokens"]) for name, piece in told] == [
                ("", x.text, list(x.tokens)) for x in expected
            ]
            last = json_format.ParseDict(told[-1][1]["result"], GenerateResponse())
            assert without_times(last) == without_times(expected[-1].result)

    asyncio.run(run())


def test_scores_and_models_are_those_of_grpc(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            wanted = ScoreRequest(text="a dog", target="b", return_alignment=True, request_id="r")
            _, told = await world.ask("/v1/score", json_format.MessageToDict(wanted))
            assert json_format.ParseDict(told, ScoreResponse()) == await world.stub.Score(wanted)
            expected = await world.stub.ListModels(ListModelsRequest())
            async with world.session.get(world.url("/v1/models")) as response:
                models = json_format.ParseDict(await response.json(), ListModelsResponse())
            assert models == expected
            async with world.session.get(world.url("/v1/models/en-de")) as response:
                assert json_format.ParseDict(await response.json(), ListModelsResponse().models.add()) == expected.models[0]

    asyncio.run(run())


def test_an_error_after_the_first_piece_is_an_event(serve_http: Any) -> None:
    async def run() -> None:
        async with serve_http() as world:
            world.engine.reason = "step_failed"
            world.engine.incident = "i-1"
            async with world.post("/v1/generate:stream", {"text": "a", "requestId": "r-9"}) as response:
                assert response.status == 200
                *pieces, (name, status) = [event async for event in events(response)]
            assert pieces and name == "error"
            assert (status["code"], status["message"]) == (13, "generation failed; quote incident i-1")
            assert status["details"][0]["requestId"] == "r-9"
            assert world.records() == {("en-de", "INTERNAL"): 1}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (b'"text"', "body"),
        (b'{"text": "\xff"}', "body"),
        (b'{"text": 1}', "body"),
        (b'{"text": NaN}', "body"),
        (b'{"nothing": 1}', "body"),
        (b'{"text": "a", "text": 7}', "body"),
        (b'{"maxNewTokens": -1}', "body"),
        (b'{"maxNewTokens": 1e400}', "body"),
        (b'{"maxNewTokens": ' + b"9" * 10_000 + b"}", "body"),
        (b'{"doSample": "yes"}', "body"),
        (b'{"seed": "-1"}', "body"),
        (b'{"text": "a", "maxNewTokens": 0}', "max_new_tokens"),
        (b'{"text": "a", "topP": "NaN"}', "top_p"),
        (b'{"suppressedTokens": [' + b"1," * 2000 + b"1]}", "suppressedTokens"),
        (b'{"suppressedTokens": [' + b"1," * 300 + b"1]}", "suppressed_tokens"),
        (b"[" * 100_000, "body"),
        (b'{"text": ' + b'{"a":' * 60_000, "body"),
        (b'{"text": "a\\ud800"}', "body"),
    ],
    ids=lambda value: value[:32].decode("latin-1") if isinstance(value, bytes) else None,
)
def test_what_cannot_be_read_is_refused_by_name(serve_http: Any, body: bytes, field: str) -> None:
    async def run() -> None:
        async with serve_http() as world:
            headers = {"Content-Type": "application/json"}
            async with world.session.post(world.url("/v1/generate"), data=body, headers=headers) as response:
                told = await response.json()
            assert (response.status, told["code"]) == (400, 3), told
            assert told["message"].startswith(f"{field}: "), told
            assert len(told["message"]) < 400 and "\n" not in told["message"]
            assert world.records() == {("", "INVALID_ARGUMENT"): 1} or world.records() == {("en-de", "INVALID_ARGUMENT"): 1}
            assert world.engine.requests == []

    asyncio.run(run())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
NAMES = st.sampled_from([name for field in GenerateRequest.DESCRIPTOR.fields for name in (field.name, field.json_name)])


@settings(max_examples=2000, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(NAMES | st.text(max_size=8), JSON, max_size=5))
def test_nothing_but_a_refusal_comes_of_strange_messages(told: dict[str, Any]) -> None:
    message = GenerateRequest()
    try:
        parse(json_dumps(told), message)
    except InvalidRequest as error:
        assert error.message
    else:
        again = GenerateRequest()
        parse(json_format.MessageToJson(message).encode(), again)
        assert again == message or "nan" in str(message)


@settings(max_examples=2000, deadline=None)
@given(st.binary(max_size=64))
def test_nothing_but_a_refusal_comes_of_strange_bytes(body: bytes) -> None:
    try:
        parse(body, GenerateRequest())
    except InvalidRequest as error:
        assert error.message.startswith("body: ")


def json_dumps(told: Any) -> bytes:
    return json.dumps(told).encode(errors="surrogatepass")


def test_every_status_has_its_number(serve_http: Any) -> None:
    """As google.rpc.Code has them."""
    expected = {
        "deadline": (504, grpc.StatusCode.DEADLINE_EXCEEDED),
        "queue_full": (429, grpc.StatusCode.RESOURCE_EXHAUSTED),
        "step_failed": (500, grpc.StatusCode.INTERNAL),
        "draining": (503, grpc.StatusCode.UNAVAILABLE),
        "lost": (503, grpc.StatusCode.UNAVAILABLE),
        "cancelled": (499, grpc.StatusCode.CANCELLED),
    }

    async def run() -> None:
        async with serve_http() as world:
            for reason, (status, code) in expected.items():
                world.engine.reason, world.engine.retry_after_seconds = reason, 1.5
                async with world.post("/v1/generate", {"text": "a"}) as response:
                    told = await response.json()
                assert (response.status, told["code"]) == (status, code.value[0]), reason
                has_hint = any("RetryInfo" in detail["@type"] for detail in told["details"])
                assert has_hint == ("Retry-After" in response.headers)
                if reason in ("queue_full", "lost"):
                    assert response.headers["Retry-After"] == "2"

    asyncio.run(run())
