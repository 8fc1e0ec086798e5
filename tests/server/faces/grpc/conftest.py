"""A real gRPC server on a free port, with a scripted engine behind it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.config import ServerConfig
from dragoman.server.core.access import read_callers
from dragoman.server.core.core import Core
from dragoman.server.core.deadlines import Deadlines
from dragoman.server.core.readiness import Readiness
from dragoman.server.faces.grpc.server import GrpcServer, build_server
from dragoman.server.telemetry.metrics import Metrics
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.server.scripted import LoadedModels, ScriptedEngine


class Served:
    """A server with its core, as `server.main` puts them together."""

    def __init__(self, face: GrpcServer, core: Core) -> None:
        self.face, self.core, self.port = face, core, face.port

    @property
    def is_ready(self) -> bool:
        return self.core.is_ready

    @property
    def num_running(self) -> int:
        return self.core.num_running

    async def update_health(self) -> None:
        self.face.update_health()

    async def drain(self, seconds: float) -> bool:
        return await self.core.drain(seconds, self.face.tell_health)

    async def stop(self) -> None:
        await self.core.end_calls()
        await self.face.stop()


@dataclass
class World:
    """What a test needs of a running server."""

    server: Served
    channel: grpc.aio.Channel
    models: LoadedModels
    registry: CollectorRegistry
    metrics: Metrics
    stub: Any = field(init=False)

    def __post_init__(self) -> None:
        self.stub = GenerationStub(self.channel)

    @property
    def model(self) -> Any:
        return self.models.all()[0]

    @property
    def engine(self) -> ScriptedEngine:
        return self.model.engine

    def count(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(f"dragoman_{name}", labels) or 0.0

    def records(self) -> dict[tuple[str, str], float]:
        """Every request that was counted, by model and outcome."""
        return {
            (sample.labels["model"], sample.labels.get("code") or sample.labels["finish_reason"]): sample.value
            for metric in self.registry.collect()
            for sample in metric.samples
            if sample.name in ("dragoman_request_success_total", "dragoman_requests_failed_total") and sample.value
        }


async def eventually(condition: Callable[[], bool]) -> None:
    """Return once a condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


Serve = Callable[..., AbstractAsyncContextManager[World]]


@pytest.fixture
def serve(make_model: Callable[..., Any], tmp_path: Any, logged: Any) -> Serve:
    @asynccontextmanager
    async def serving(*models: Any, tracer: Any = None, **settings: Any) -> AsyncIterator[World]:
        loaded = LoadedModels(*(models or [make_model()]))
        config = ServerConfig(models=tmp_path, host="127.0.0.1", port=0, metrics_port=0, **settings)
        registry = CollectorRegistry()
        metrics = Metrics(registry, config.latency_buckets)
        for model in loaded.all():
            metrics.add_model(model.name, model.version, "fp32", "cpu", 8)
        deadlines = Deadlines(config.default_deadline_seconds, config.max_deadline_seconds)
        core = Core(loaded, metrics, tracer, read_callers(config, metrics, deadlines), deadlines, Readiness(config.ready_rule))
        face = build_server(config, core)
        await face.start()
        server = Served(face, core)
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
                yield World(server, channel, loaded, registry, metrics)
        finally:
            await server.stop()

    return serving
