"""HTTP/JSON of the real server: what gRPC answers, to the bit, whoever asks how; and who leaves is gone."""

import asyncio
import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, ClientTimeout
from google.protobuf import json_format

from dragoman.v1.generation_pb2 import GenerateRequest, GenerateResponse, GenerateStreamResponse, ScoreRequest, ScoreResponse
from dragoman.v1.generation_pb2_grpc import GenerationStub

pytestmark = pytest.mark.e2e

OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 0.6},
    {"do_sample": True, "seed": 7, "num_return_sequences": 2, "top_k": 20},
    {"forced_prefix": "Ein", "return_log_probs": True},
    {"return_alternatives": True, "num_return_sequences": 3, "top_log_probs": 2},
    {"max_new_tokens": 4, "min_new_tokens": 2, "repetition_penalty": 1.2, "no_repeat_ngram_size": 2},
]


def requests(captions: list[str]) -> list[GenerateRequest]:
    """Return every option for some texts, and plain requests for all."""
    plain = [GenerateRequest(model="en-de", text=text) for text in captions]
    return plain + [GenerateRequest(model="en-de", text=text, **options) for options in OPTIONS for text in captions[::12]]


def clean(response: GenerateResponse) -> GenerateResponse:
    response.ClearField("timings")
    response.ClearField("request_id")
    return response


def test_every_face_gives_the_same_bits_to_all_at_once(shared_server: Any, captions: list[str]) -> None:
    wanted = requests(captions)

    async def run() -> None:
        limit = asyncio.Semaphore(32)
        async with (
            grpc.aio.insecure_channel(shared_server.address) as channel,
            ClientSession(shared_server.http_address) as session,
        ):
            stub = GenerationStub(channel)

            async def by_grpc(request: GenerateRequest) -> GenerateResponse:
                async with limit:
                    return clean(await stub.Generate(request))

            async def by_http(request: GenerateRequest) -> GenerateResponse:
                async with limit, session.post("/v1/generate", json=json_format.MessageToDict(request)) as response:
                    assert response.status == 200, await response.text()
                    return clean(json_format.ParseDict(await response.json(), GenerateResponse()))

            async def by_stream(request: GenerateRequest) -> GenerateResponse:
                async with limit, session.post("/v1/generate:stream", json=json_format.MessageToDict(request)) as response:
                    assert response.status == 200, await response.text()
                    lines = [line[6:] async for line in response.content if line.startswith(b"data: ")]
                pieces = [json_format.Parse(line, GenerateStreamResponse()) for line in lines]
                assert "".join(piece.text for piece in pieces) == pieces[-1].result.text
                return clean(pieces[-1].result)

            answers = await asyncio.gather(*(by(request) for request in wanted for by in (by_grpc, by_http, by_stream)))
        for i, request in enumerate(wanted):
            native, http, streamed = answers[3 * i : 3 * i + 3]
            assert native == http == streamed, request

    asyncio.run(run())


def test_scores_have_the_same_bits(shared_server: Any, captions: list[str]) -> None:
    async def run() -> None:
        async with (
            grpc.aio.insecure_channel(shared_server.address) as channel,
            ClientSession(shared_server.http_address) as session,
        ):
            for text in captions[::40]:
                request = ScoreRequest(
                    model="en-de", text=text, target="Ein Mann.", return_alignment=True, return_word_alignment=True
                )
                expected = await GenerationStub(channel).Score(request)
                async with session.post("/v1/score", json=json_format.MessageToDict(request)) as response:
                    found = json_format.ParseDict(await response.json(), ScoreResponse())
                found.request_id = expected.request_id
                assert found == expected

    asyncio.run(run())


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl_translates_and_streams(shared_server: Any) -> None:
    def curl(path: str, *flags: str) -> str:
        message = json.dumps({"model": "en-de", "text": "A dog runs through the snow."})
        command = ["curl", "-s", *flags, "-H", "Content-Type: application/json", "-d", message, shared_server.http_address + path]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout

    whole = json.loads(curl("/v1/generate"))
    events = [json.loads(line.removeprefix("data: ")) for line in curl("/v1/generate:stream", "-N").splitlines() if line]
    assert whole["text"] == "".join(event["text"] for event in events) == events[-1]["result"]["text"]
    assert whole["text"].startswith("Ein Hund")


NATIVE = {"model": "alpha", "text": "a dog", "maxNewTokens": 900}
SHORT = {"text_input": "a dog", "max_new_tokens": 900}
LONG = {
    "inputs": [{"name": "text_input", "datatype": "BYTES", "shape": [1], "data": ["a dog"]}],
    "parameters": {"max_new_tokens": 900},
}


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("/v1/generate", NATIVE),
        ("/v1/generate:stream", NATIVE),
        ("/v2/models/alpha/infer", LONG),
        ("/v2/models/alpha/generate", SHORT),
        ("/v2/models/alpha/generate_stream", SHORT),
    ],
)
def test_who_leaves_frees_the_slot_within_two_steps(
    serve: Callable[..., Any], endless: Path, path: str, message: dict[str, Any]
) -> None:
    """As much as is generated for somebody who is gone is no more than two steps, and what was on its way."""
    with serve(endless, "--max-slots", "1") as server:
        body = json.dumps(message).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        host, _, port = server.http_address.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port))) as connection:
            connection.sendall(head.encode() + body)
            deadline = time.monotonic() + 30
            while not server.metric("dragoman_slots_in_use", model="alpha"):
                assert time.monotonic() < deadline
                time.sleep(0.005)
        left = server.wait_for("call", method=f"POST {path}".replace("models/alpha", "models/{model}"))
        assert left["code"] == "CANCELLED"
        assert left["generated_tokens"] < 900 or not left["generated_tokens"]
        started = time.monotonic()
        with grpc.insecure_channel(server.address) as channel:  # the only slot is free
            GenerationStub(channel).Generate(GenerateRequest(model="alpha", text="a", max_new_tokens=1), timeout=20)
        assert time.monotonic() - started < 20
        assert server.terminate() == 0


def test_two_front_ends_answer_on_one_port(serve: Callable[..., Any], bundles: Path) -> None:
    async def ask(address: str) -> set[str]:
        texts = set()
        for _ in range(20):
            async with (
                ClientSession(address, timeout=ClientTimeout(60)) as session,
                session.post("/v1/generate", json={"model": "en-de", "text": "A dog runs through the snow."}) as response,
            ):
                texts.add((await response.json())["text"])
        return texts

    with serve(bundles, "--front-ends", "2") as server:
        assert len(asyncio.run(ask(server.http_address))) == 1
        fronts = {event["front_end"] for event in server.events if event["event"] == "front end listens"}
        assert fronts == {0, 1}
        assert server.terminate() == 0


def test_http_can_be_turned_off(serve: Callable[..., Any], endless: Path) -> None:
    with serve(endless, "--http", "false") as server:
        assert "http_port" not in next(event for event in server.events if event["event"] == "serving")
        assert server.terminate() == 0
