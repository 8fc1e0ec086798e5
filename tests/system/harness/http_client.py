"""The native API over HTTP, whole and as server-sent events."""

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import ClientResponse, ClientSession, ClientTimeout, TCPConnector
from google.protobuf import json_format

from dragoman.v1.generation_pb2 import GenerateResponse, GenerateStreamResponse
from tests.system.harness.grpc_client import CODES, answer_of, request_of
from tests.system.harness.protocol import Answer, Connection, Method, Query, Refused


def session_of(server: Any, token: str = "") -> ClientSession:
    """Return a session with as many connections as it needs."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    limits: dict[str, Any] = {"connector": TCPConnector(limit=0), "timeout": ClientTimeout(300), "read_bufsize": 2**22}
    return ClientSession(server.http_address, headers=headers, **limits)


class HttpClient:
    """A connection over HTTP."""

    def __init__(self, session: ClientSession, token: str = "") -> None:
        self._session, self._token = session, token

    @classmethod
    @asynccontextmanager
    async def connect(cls, server: Any, token: str = "") -> Connection:
        async with session_of(server, token) as session:
            yield cls(session, token)

    def supports(self, method: str, options: Mapping[str, Any]) -> bool:
        return True

    @asynccontextmanager
    async def post(self, path: str, query: Query | None = None, **arguments: Any) -> AsyncIterator[ClientResponse]:
        """Send a message; raise `Refused` if its answer is an error."""
        headers = dict(query.headers) if query else {}
        if query is not None and query.request_id:
            headers["X-Request-Id"] = query.request_id
        if query is not None and query.timeout_seconds is not None:
            headers["Grpc-Timeout"] = f"{round(query.timeout_seconds * 1e6)}u"
        async with self._session.post(path, headers=headers | arguments.pop("headers", {}), **arguments) as response:
            if response.status != 200:
                error = await response.json()
                retry = response.headers.get("Retry-After")
                raise Refused(str(response.status), self.message_of(error), None if retry is None else float(retry))
            yield response

    def message_of(self, error: Mapping[str, Any]) -> str:
        """Return the reason in an error's body, after checking the body's form."""
        assert list(error) == ["error"]
        return str(error["error"])


async def events(response: ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    """Yield server-sent events as they come: name and data."""
    name = ""
    async for line in response.content:
        kind, _, value = line.decode().rstrip("\n").partition(": ")
        if kind == "event":
            name = value
        elif kind == "data":
            yield name, json.loads(value)
            name = ""


class NativeHttp(HttpClient):
    """A client of it."""

    name = "HTTP/JSON"

    def __init__(self, session: ClientSession, token: str = "") -> None:
        super().__init__(session, token)
        self.methods: Mapping[str, Method] = {"generate": Method(self._generate), "generate:stream": Method(self._stream)}

    def project(self, answer: Answer) -> Answer:
        return answer

    def message_of(self, error: Mapping[str, Any]) -> str:
        assert CODES[error["code"]] != "OK"
        return str(error["message"])

    async def call_unimplemented(self) -> None:
        async with self.post("/v1/nothing", json={}):
            pass

    async def _generate(self, query: Query) -> list[Answer]:
        async with self.post("/v1/generate", query, json=json_format.MessageToDict(request_of(query, 0))) as response:
            return [answer_of(json_format.Parse(await response.read(), GenerateResponse()))]

    async def _stream(self, query: Query) -> list[Answer]:
        async with self.post("/v1/generate:stream", query, json=json_format.MessageToDict(request_of(query, 0))) as response:
            found = [event async for event in events(response)]
        assert not any(name for name, _ in found), found[-1]
        pieces = [json_format.ParseDict(piece, GenerateStreamResponse()) for _, piece in found]
        assert "".join(piece.text for piece in pieces) == pieces[-1].result.text
        return [answer_of(pieces[-1].result)]
