"""Versions served by a frontend worker, as ordered by the parent's `Routes`."""

import asyncio
import contextlib
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import structlog

from dragoman.model.errors import InputError
from dragoman.server.dispatch.calls import Calls
from dragoman.server.dispatch.remote import RemoteDispatcher
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.registry import ModelRegistry, Route
from dragoman.server.models.use import Outcomes
from dragoman.server.system import trim_memory_soon
from dragoman.server.workers.files import open_copy
from dragoman.server.workers.messages import FromWorker, ModelRoute, Released, Routes, RoutesTaken, UsageReport, VersionAddress

# Bound, since a model that was ready in the message may no longer be.
ATTACH_SECONDS = 5.0

log = structlog.get_logger("dragoman.workers")


class ServedVersions:
    """Versions that this worker can reach; messages are processed in order and confirmed to the parent."""

    def __init__(
        self,
        repository: ModelRegistry,
        attach: Callable[[str, VersionAddress], Calls],
        *,
        prepare: Callable[[LoadedModel], None],
        on_change: Callable[[], None],
        send: Callable[[FromWorker], None],
    ) -> None:
        """Start without versions; `attach` returns an unopened dispatcher client, `prepare` is called in a thread."""
        self._repository, self._attach = repository, attach
        self._prepare, self._on_change, self._send = prepare, on_change, send
        self._models: dict[str, LoadedModel] = {}
        self._reported: dict[str, Outcomes] = {}
        self._reported_moves: dict[str, int] = {}
        self._turn = asyncio.Lock()
        self._releasing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, routes: Routes) -> None:
        """Serve the versions of the first message; raise `BundleError` if the copy of a bundle cannot be read."""
        await self._adopt(routes)
        self._publish(routes)

    def take(self, routes: Routes) -> None:
        """Attach to new versions, route requests to them, and release versions that are not kept."""
        self._spawn(self._take(routes))

    def report_usage(self) -> None:
        """Send the use of versions since the last report."""
        used: dict[str, Outcomes] = {}
        held: dict[str, tuple[int, float]] = {}
        for endpoint, model in self._models.items():
            outcomes = model.use.outcomes
            new = outcomes.since(self._reported.get(endpoint, Outcomes()))
            if new.num_answered or new.num_failed:
                used[endpoint] = new
                self._reported[endpoint] = outcomes
            if model.use.num_moves != self._reported_moves.get(endpoint, 0):
                held[endpoint] = (model.use.num_held, model.use.warm_until)
                self._reported_moves[endpoint] = model.use.num_moves
        if used or held:
            self._send(UsageReport(used, held))

    async def _take(self, routes: Routes) -> None:
        async with self._turn:
            try:
                await self._adopt(routes)
            except Exception as error:
                is_expected = isinstance(error, InputError)
                log.error("new routes cannot be taken", reason=str(error), exc_info=None if is_expected else error)
                self._send(RoutesTaken(routes.serial, str(error) or type(error).__name__))
                for endpoint in routes.endpoints - self._models.keys():  # the parent counts them as held here
                    self._send(Released(endpoint))
                return
            self._publish(routes)
            self._on_change()
            self._send(RoutesTaken(routes.serial))
            for endpoint in self._models.keys() - routes.endpoints - set(routes.kept) - self._releasing:
                self._releasing.add(endpoint)
                self._spawn(self._release(endpoint, self._models[endpoint]))

    async def _adopt(self, routes: Routes) -> None:
        """Read and attach to new versions; raise `BundleError`, and keep none, if one cannot be read."""
        new = [(route.name, one) for route in routes.models for one in route.versions if one.endpoint not in self._models]
        models = [await asyncio.to_thread(self._load, *one) for one in new]
        for model in models:
            await asyncio.to_thread(self._prepare, model)
        for (_, version), model in zip(new, models, strict=True):
            if isinstance(model.engine, RemoteDispatcher):
                model.engine.open()
            self._models[version.endpoint] = model
        await self._until_attached([version for _, version in new])

    async def _until_attached(self, versions: list[VersionAddress]) -> None:
        models = [self._models[version.endpoint] for version in versions if version.is_ready]
        engines = [model.engine for model in models if isinstance(model.engine, RemoteDispatcher)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTACH_SECONDS):
                await asyncio.gather(*(engine.until_ready() for engine in engines))

    async def _release(self, endpoint: str, model: LoadedModel) -> None:
        """Detach from a version once no request holds it."""
        await model.use.until_free()
        self.report_usage()
        del self._models[endpoint]
        self._reported.pop(endpoint, None)
        self._reported_moves.pop(endpoint, None)
        if isinstance(model.engine, RemoteDispatcher):
            model.engine.close()
        self._releasing.discard(endpoint)
        self._send(Released(endpoint))
        trim_memory_soon()

    def _publish(self, routes: Routes) -> None:
        names = {route.name for route in routes.models}
        for model in list(self._repository.all()):
            if model.name not in names:
                self._repository.publish(model.name, None)
        for route in routes.models:
            self._repository.publish(route.name, self._route(route))

    def _route(self, route: ModelRoute) -> Route:
        versions = {version.label: self._models[version.endpoint] for version in route.versions}
        return Route(self._models[route.default], versions, route.shares, route.labels, route.sticky, route.is_stand_in)

    def _load(self, name: str, version: VersionAddress) -> LoadedModel:
        """Return an unattached version, without reading a known bundle again; raise `BundleError`."""
        engine, directory = self._attach(name, version), Path(version.bundle)
        for model in list(self._models.values()):
            if model.bundle.directory == directory:
                return LoadedModel(model.bundle, model.tokenizers, model.templates, engine, version.label, traits=version.traits)
        return LoadedModel.of(open_copy(directory), engine, version.label, version.traits)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
