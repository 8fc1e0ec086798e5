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
from tests.e2e.faces.native_grpc import request_of, told_of
from tests.e2e.faces.told import Asked, Opened, Refused, Told, Way

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
        self.ways: Mapping[str, Way] = {"generate": Way(self._generate), "generate:stream": Way(self._stream)}

    @classmethod
    @asynccontextmanager
    async def opened(cls, server: Any, token: str = "") -> Opened:
        async with session_of(server, {"Authorization": f"Bearer {token}"} if token else {}) as session:
            yield cls(session)

    def says(self, way: str, options: Mapping[str, Any]) -> bool:
        return True

    def carried(self, told: Told) -> Told:
        return told

    async def ask_for_what_is_not_offered(self) -> None:
        async with self._session.post("/v1/nothing", json={}) as response:
            await check(response)

    async def _generate(self, asked: Asked) -> list[Told]:
        message = json_format.MessageToDict(request_of(asked, 0))
        async with self._session.post("/v1/generate", json=message) as response:
            await check(response)
            return [told_of(json_format.Parse(await response.read(), GenerateResponse()))]

    async def _stream(self, asked: Asked) -> list[Told]:
        message = json_format.MessageToDict(request_of(asked, 0))
        async with self._session.post("/v1/generate:stream", json=message) as response:
            await check(response)
            lines = [line async for line in response.content if line.strip()]
        assert b"event: error\n" not in lines, lines[-1]
        pieces = [json_format.Parse(line.removeprefix(b"data: "), GenerateStreamResponse()) for line in lines]
        assert "".join(piece.text for piece in pieces) == pieces[-1].result.text
        return [told_of(pieces[-1].result)]


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
