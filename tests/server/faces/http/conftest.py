"""A real HTTP server on a free port beside the gRPC one, with a scripted engine behind both."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from aiohttp import ClientResponse, ClientSession
from prometheus_client import CollectorRegistry

from dragoman.server.config import ServerConfig
from dragoman.server.core.access import read_callers
from dragoman.server.core.core import Core
from dragoman.server.core.deadlines import Deadlines
from dragoman.server.core.readiness import Readiness
from dragoman.server.faces.grpc.server import build_server
from dragoman.server.faces.http.server import HttpServer
from dragoman.server.telemetry.metrics import Metrics
from tests.server.faces.grpc.conftest import Served, World
from tests.server.scripted import LoadedModels


@dataclass
class HttpWorld(World):
    """What a test needs of a running server."""

    http: HttpServer
    session: ClientSession

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.http.port}{path}"

    def post(self, path: str, message: Any, **more: Any) -> Any:
        """Send a message as JSON; to be awaited, or entered."""
        return self.session.post(self.url(path), json=message, **more)

    async def ask(self, path: str, message: Any, **more: Any) -> tuple[int, Any]:
        """Return the status and what is answered."""
        async with self.post(path, message, **more) as response:
            return response.status, await response.json()

    async def refused(self, path: str, message: Any, **more: Any) -> tuple[int, str]:
        """Return the status and message of an answer that is an error."""
        status, told = await self.ask(path, message, **more)
        return status, told["message"]


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


ServeHttp = Callable[..., AbstractAsyncContextManager[HttpWorld]]


@pytest.fixture
def serve_http(make_model: Callable[..., Any], tmp_path: Any, logged: Any) -> ServeHttp:
    @asynccontextmanager
    async def serving(*models: Any, tracer: Any = None, operators: Any = None, **settings: Any) -> AsyncIterator[HttpWorld]:
        loaded = LoadedModels(*(models or [make_model()]))
        ports = {"port": 0, "metrics_port": 0, "http_port": 0}
        config = ServerConfig(models=tmp_path, host="127.0.0.1", http_host="127.0.0.1", **ports, **settings)
        registry = CollectorRegistry()
        metrics = Metrics(registry, config.latency_buckets)
        for model in loaded.all():
            metrics.add_model(model.name, model.version, "fp32", "cpu", 8)
        deadlines = Deadlines(config.default_deadline_seconds, config.max_deadline_seconds)
        core = Core(loaded, metrics, tracer, read_callers(config, metrics, deadlines), deadlines, Readiness(config.ready_rule))
        face = build_server(config, core)
        http = HttpServer(config, core, face.tls, operators, face.port)
        await face.start()
        await http.start()
        server = Served(face, core)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel, ClientSession() as session:
                yield HttpWorld(server, channel, loaded, registry, metrics, http, session)
        finally:
            await server.stop()
            await http.stop()

    return serving
