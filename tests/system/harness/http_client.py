"""The native API over HTTP, whole and as server-sent events."""

from collections.abc import Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from aiohttp import ClientResponse, ClientSession, ClientTimeout, TCPConnector
from google.protobuf import json_format
from google.rpc.status_pb2 import Status
from grpc import StatusCode

from dragoman.v1.generation_pb2 import GenerateResponse, GenerateStreamResponse
from tests.system.harness.grpc_client import answer_of, request_of
from tests.system.harness.protocol import Answer, Method, Opened, Query, Refused

NAMES = {code.value[0]: code.name for code in StatusCode}


def session_of(server: Any, headers: Mapping[str, str]) -> ClientSession:
    """Return what has as many connections as it needs."""
    return ClientSession(
        server.http_address, headers=headers, connector=TCPConnector(limit=0), timeout=ClientTimeout(300), read_bufsize=2**22
    )


def retry_of(response: ClientResponse) -> float | None:
    said = response.headers.get("Retry-After")
    return None if said is None else float(said)


class NativeHttp:
    """A caller of it."""

    name = "HTTP/JSON"

    def __init__(self, session: ClientSession) -> None:
        self._session = session
        self.methods: Mapping[str, Method] = {"generate": Method(self._generate), "generate:stream": Method(self._stream)}

    @classmethod
    @asynccontextmanager
    async def connect(cls, server: Any, token: str = "") -> Opened:
        async with session_of(server, {"Authorization": f"Bearer {token}"} if token else {}) as session:
            yield cls(session)

    def supports(self, way: str, options: Mapping[str, Any]) -> bool:
        return True

    def project(self, answer: Answer) -> Answer:
        return answer

    async def call_unimplemented(self) -> None:
        async with self._session.post("/v1/nothing", json={}) as response:
            await check(response)

    async def _generate(self, asked: Query) -> list[Answer]:
        message = json_format.MessageToDict(request_of(asked, 0))
        async with self._session.post("/v1/generate", json=message) as response:
            await check(response)
            return [answer_of(json_format.Parse(await response.read(), GenerateResponse()))]

    async def _stream(self, asked: Query) -> list[Answer]:
        message = json_format.MessageToDict(request_of(asked, 0))
        async with self._session.post("/v1/generate:stream", json=message) as response:
            await check(response)
            lines = [line async for line in response.content if line.strip()]
        assert b"event: error\n" not in lines, lines[-1]
        pieces = [json_format.Parse(line.removeprefix(b"data: "), GenerateStreamResponse()) for line in lines]
        assert "".join(piece.text for piece in pieces) == pieces[-1].result.text
        return [answer_of(pieces[-1].result)]


async def check(response: ClientResponse) -> None:
    """Do nothing if all is well.

    Raises:
        Refused: If it is not; the status in the body has to go with that of HTTP.
    """
    if response.status == 200:
        return
    told = msgspec.json.decode(await response.read())
    status = json_format.ParseDict({"code": told["code"], "message": told["message"]}, Status())
    assert status.code and NAMES[status.code] != "OK"
    raise Refused(str(response.status), status.message, retry_of(response))
