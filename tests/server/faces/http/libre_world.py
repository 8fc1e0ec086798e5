"""A real HTTP server on a free port, with scripted engines behind it, for callers of LibreTranslate's API."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiohttp import ClientSession
from prometheus_client import CollectorRegistry

from dragoman.model.generation import Language, Languages
from dragoman.server.config import ServerConfig
from dragoman.server.core.access import read_callers
from dragoman.server.core.core import Core
from dragoman.server.core.deadlines import Deadlines
from dragoman.server.core.readiness import Readiness
from dragoman.server.faces.http.server import HttpServer
from dragoman.server.telemetry.metrics import Metrics
from tests.server.scripted import LoadedModels

NAMES = {
    "en": ["eng", "english"],
    "de": ["deu", "german"],
    "fr": ["fra", "french"],
    "zho_Hant": ["zh_hant", "zh_tw", "chinese_traditional"],
}
TEXT = "Fußball 🐕 日本"  # what scripted engines answer


def languages(sources: str, targets: str, token: int | None = None) -> Languages:
    prefix = [] if token is None else [token]
    source, target = (
        [Language(code=code, names=NAMES.get(code, []), source_prefix=prefix) for code in side.split()]
        for side in (sources, targets)
    )
    return Languages(source=source, target=target)


@dataclass
class LibreWorld:
    """What a test needs of a running server."""

    core: Core
    http: HttpServer
    session: ClientSession
    models: dict[str, Any]
    registry: CollectorRegistry

    def url(self, path: str) -> str:
        return f"http://127.0.0.1:{self.http.port}{path}"

    async def post(self, path: str = "/translate", **arguments: Any) -> tuple[int, Any]:
        """Send a request; return the status and what is answered."""
        async with self.session.post(self.url(path), **arguments) as response:
            return response.status, await response.json()

    async def get(self, path: str, **arguments: Any) -> tuple[int, Any]:
        async with self.session.get(self.url(path), **arguments) as response:
            return response.status, await response.json()

    async def refused(self, path: str = "/translate", **arguments: Any) -> tuple[int, str]:
        """Return the status and what went wrong; nothing else may be in the answer."""
        status, told = await self.post(path, **arguments)
        assert list(told) == ["error"], told
        return status, told["error"]

    def counted(self) -> dict[str, float]:
        """Return how many requests were counted, by how they ended."""
        counts: dict[str, float] = {}
        for metric in self.registry.collect():
            for sample in metric.samples:
                if sample.name in ("dragoman_request_success_total", "dragoman_requests_failed_total") and sample.value:
                    how = sample.labels.get("code") or sample.labels["finish_reason"]
                    counts[how] = counts.get(how, 0) + sample.value
        return counts


def pair_models(make_model: Callable[..., Any]) -> list[Any]:
    """Return two models of one pair each, one of several, and one that tells nothing."""
    return [
        make_model("captions"),
        make_model("en-de", languages=languages("en", "de")),
        make_model("en-fr", languages=languages("en", "fr")),
        make_model("many", languages=languages("de fr", "fr de zho_Hant", 340)),
    ]


@asynccontextmanager
async def serving(folder: Path, *models: Any, callers: str = "", **settings: Any) -> AsyncIterator[LibreWorld]:
    """Serve models; `callers` is the content of a file of callers."""
    if callers:
        (folder / "callers.toml").write_text(callers)
        settings["auth_tokens_file"] = folder / "callers.toml"
    config = ServerConfig(models=folder, http_host="127.0.0.1", http_port=0, port=0, metrics_port=0, **settings)
    registry = CollectorRegistry()
    metrics = Metrics(registry, config.latency_buckets)
    for model in models:
        metrics.add_model(model.name, model.version, "fp32", "cpu", 8)
    deadlines = Deadlines(config.default_deadline_seconds, config.max_deadline_seconds)
    known = read_callers(config, metrics, deadlines)
    core = Core(LoadedModels(*models), metrics, None, known, deadlines, Readiness(config.ready_rule))
    http = HttpServer(config, core)
    await http.start()
    try:
        async with ClientSession() as session:
            yield LibreWorld(core, http, session, {model.name: model for model in models}, registry)
    finally:
        await core.end_calls()
        await http.stop()
