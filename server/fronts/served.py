"""What a front end's process has of the models that are served: each version is read, attached to and given up as it is told."""

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import structlog

from dragoman.model.errors import InputError
from dragoman.server.allocator import give_back_blocks_soon
from dragoman.server.dispatch.remote import RemoteDispatcher
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.fronts.handed_bundles import open_handed
from dragoman.server.fronts.messages import Desk, FromFrontEnd, Released, Serve, Served, Serving, Used
from dragoman.server.repository.loaded import LoadedModel
from dragoman.server.repository.models import Repository, Route
from dragoman.server.repository.sleeping_engine import SleepingEngine
from dragoman.server.repository.use import Outcomes

# A model that was ready a moment ago may not be any more.
ATTACH_SECONDS = 5.0

log = structlog.get_logger("dragoman.fronts")


class FarEngine(RemoteDispatcher):
    """A model's engine, behind a desk in the process that started this one.

    Attributes:
        settings: As the engines have them, but for what is theirs alone.
        num_replicas: Engines behind the desk.
    """

    def __init__(self, name: str, desk: Desk, identity: str, **how: Any) -> None:
        """Describe the attachment.

        Args:
            name: Of the model.
            desk: Where it is.
            identity: Of this process at desks.
            how: See `RemoteDispatcher`.
        """
        numbers = itertools.count(1)
        super().__init__(name, desk.endpoint, lambda: f"{identity}/{next(numbers)}".encode(), **how)
        self.settings: EngineSettings = desk.settings
        self.num_replicas = desk.num_replicas


FrontEngine = FarEngine | SleepingEngine


class ServedVersions:
    """See above. What is told is done in order, and told back when it is done."""

    def __init__(
        self,
        repository: Repository[FrontEngine],
        attach: Callable[[str, Desk], FrontEngine],
        *,
        prepare: Callable[[LoadedModel[FrontEngine]], None],
        on_change: Callable[[], None],
        say: Callable[[FromFrontEnd], None],
    ) -> None:
        """Start with nothing served.

        Args:
            repository: What is served here; is kept as it is told.
            attach: Returns the attachment to a model's desk, not begun.
            prepare: Works out what requests for a model need, on a thread of its own.
            on_change: Called when other models are served, or other versions of them.
            say: Tells the process that started this one.
        """
        self._repository, self._attach = repository, attach
        self._prepare, self._on_change, self._say = prepare, on_change, say
        self._models: dict[str, LoadedModel[FrontEngine]] = {}
        self._told: dict[str, Outcomes] = {}
        self._told_moves: dict[str, int] = {}
        self._releasing: set[str] = set()
        self._turn = asyncio.Lock()
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self, serve: Serve) -> None:
        """Take what is served from the very start; nothing is attached yet.

        Raises:
            BundleError: If what was copied of a bundle cannot be read.
        """
        for served in serve.models:
            for desk in served.desks:
                self._models[desk.endpoint] = self._load(served.name, desk)
        self._publish(serve)

    async def begin(self, serve: Serve) -> None:
        """Attach to what was read, and wait for what is ready: who comes to a front end that is started again is to find it so."""
        for model in self._models.values():
            model.engine.begin()
        await self._until_attached([desk for served in serve.models for desk in served.desks if desk.is_ready])

    def take(self, serve: Serve) -> None:
        """Serve other versions from now on, once they are attached to."""
        self._spawn(self._take(serve))

    def tell_used(self) -> None:
        """Tell what became of requests since the last time."""
        used: dict[str, tuple[int, int, float]] = {}
        held: dict[str, tuple[int, float]] = {}
        for endpoint, model in self._models.items():
            outcomes = model.use.outcomes
            new = outcomes.since(self._told.get(endpoint, Outcomes()))
            if new.num_answered or new.num_failed:
                used[endpoint] = (new.num_answered, new.num_failed, new.seconds)
                self._told[endpoint] = outcomes
            if model.use.num_moves != self._told_moves.get(endpoint, 0):
                held[endpoint] = (model.use.num_held, model.use.warm_until)
                self._told_moves[endpoint] = model.use.num_moves
        if used or held:
            self._say(Used(used, held))

    async def _take(self, serve: Serve) -> None:
        async with self._turn:
            try:
                await self._adopt(serve)
            except Exception as error:
                is_expected = isinstance(error, InputError)
                log.error("models cannot be served as told", reason=str(error), exc_info=None if is_expected else error)
                self._say(Serving(serve.serial, str(error) or type(error).__name__))
                for endpoint in _wanted(serve) - self._models.keys():  # who told us takes it that we hold what we are told of
                    self._say(Released(endpoint))
                return
            self._publish(serve)
            self._on_change()
            self._say(Serving(serve.serial))
            for endpoint in self._models.keys() - _wanted(serve) - set(serve.kept) - self._releasing:
                self._releasing.add(endpoint)
                self._spawn(self._release(endpoint, self._models[endpoint]))

    async def _adopt(self, serve: Serve) -> None:
        """Read and attach to the versions that are new here.

        Raises:
            BundleError: If what was copied of a bundle cannot be read; none of the new ones is kept then.
        """
        new = {desk.endpoint: (served.name, desk) for served in serve.models for desk in served.desks}
        new = {endpoint: one for endpoint, one in new.items() if endpoint not in self._models}
        models = {endpoint: await asyncio.to_thread(self._load, *one) for endpoint, one in new.items()}
        for endpoint, model in models.items():
            await asyncio.to_thread(self._prepare, model)
            self._models[endpoint] = model
            model.engine.begin()
        await self._until_attached([desk for _, desk in new.values() if desk.is_ready])

    async def _until_attached(self, desks: list[Desk]) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ATTACH_SECONDS):
                await asyncio.gather(*(self._models[desk.endpoint].engine.until_ready() for desk in desks))

    async def _release(self, endpoint: str, model: LoadedModel[FrontEngine]) -> None:
        """Give up a version, once no request holds it."""
        await model.use.until_free()
        self.tell_used()
        del self._models[endpoint]
        self._told.pop(endpoint, None)
        self._told_moves.pop(endpoint, None)
        await model.engine.stop()
        self._releasing.discard(endpoint)
        self._say(Released(endpoint))
        give_back_blocks_soon()

    def _publish(self, serve: Serve) -> None:
        names = {served.name for served in serve.models}
        for model in list(self._repository.all()):
            if model.name not in names:
                self._repository.publish(model.name, None)
        for served in serve.models:
            self._repository.publish(served.name, route_of(served, self._models))

    def _load(self, name: str, desk: Desk) -> LoadedModel[FrontEngine]:
        """Return a version, not attached yet; of one that is here already nothing is read again.

        Raises:
            BundleError: If what was copied of its bundle cannot be read.
        """
        engine, directory = self._attach(name, desk), Path(desk.bundle)
        for model in list(self._models.values()):
            if model.bundle.directory == directory:
                return LoadedModel(model.bundle, model.tokenizers, model.frames, engine, desk.label, traits=desk.traits)
        return LoadedModel.of(open_handed(directory), engine, desk.label, desk.traits)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _wanted(serve: Serve) -> set[str]:
    return {desk.endpoint for served in serve.models for desk in served.desks}


def route_of(served: Served, models: Mapping[str, LoadedModel[FrontEngine]]) -> Route[FrontEngine]:
    """Return how a model's requests are answered, by the versions that are here."""
    versions = {desk.label: models[desk.endpoint] for desk in served.desks}
    return Route(models[served.default], versions, served.shares, served.labels, served.sticky, served.is_stand_in)
