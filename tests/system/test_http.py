"""HTTP/JSON of the real server, beside what `test_faces.py` asks of every face."""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from aiohttp import ClientSession, ClientTimeout
from google.protobuf import json_format

from dragoman.v1.generation_pb2 import ScoreRequest, ScoreResponse
from dragoman.v1.generation_pb2_grpc import GenerationStub

pytestmark = pytest.mark.e2e


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
