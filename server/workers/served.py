"""Models as a frontend worker has them: bundle files handed over, and attachment to dispatchers."""

import asyncio
import contextlib
import hashlib
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import structlog

from dragoman.export.bundle import MANIFEST_FILE, TOKENIZER_DIRECTORY, Bundle, BundleError
from dragoman.export.manifest_file import parse_manifest, read_manifest_bytes
from dragoman.model.errors import InputError
from dragoman.model.files import read_bounded
from dragoman.server.config import ServerConfig
from dragoman.server.dispatch.attached_engine import AttachedEngine
from dragoman.server.engine.link import ZmqLink
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.models.loaded import LoadedModel, SleepingEngine
from dragoman.server.models.registry import Repository, Route
from dragoman.server.models.use import Outcomes
from dragoman.server.workers.messages import Desk, FromFrontEnd, Released, Serve, Served, Serving, Used
from dragoman.server.workers.processors import give_back_blocks_soon

# Settings whose files are handed on.
SETTINGS = ("tls_certificate", "tls_key", "tls_client_ca", "auth_tokens_file", "admin_tokens_file")
MAX_FILE_BYTES = 16 * 2**20


def read_files(config: ServerConfig, settings: tuple[str, ...]) -> dict[str, bytes]:
    """Return what is in the files that some settings name, by setting.

    Raises:
        OSError: If one cannot be read.
    """
    paths = {name: getattr(config, name) for name in settings}
    return {name: read_bounded(path, MAX_FILE_BYTES) for name, path in paths.items() if path is not None}


class HandedFiles:
    """Content that can be opened by a path, in this process alone.

    Attributes:
        paths: By setting.
    """

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        """Keep contents, by setting."""
        self._descriptors = {name: os.memfd_create(f"dragoman-{name}") for name in contents}
        self.paths = {name: Path(f"/proc/self/fd/{descriptor}") for name, descriptor in self._descriptors.items()}
        self.replace(contents)

    def replace(self, contents: Mapping[str, bytes]) -> None:
        """Have other content at the same paths."""
        for name, content in contents.items():
            descriptor = self._descriptors[name]
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)


class HandedBundles:
    """Copies of manifests and tokenisers: one of each bundle, for as long as somebody needs it. May be used by several threads."""

    def __init__(self, folder: Path) -> None:
        """Copy nothing yet.

        Args:
            folder: An empty one, that only this server writes to.
        """
        self._folder = folder
        self._num_users: dict[str, int] = {}
        self._lock = threading.Lock()

    def folder_of(self, bundle: Bundle) -> Path:
        """Return where the copy is, or would be."""
        return self._folder / bundle.digest

    def add(self, bundle: Bundle) -> None:
        """Copy what front ends read of a bundle, if that has not been done; `remove` it as often as it was added.

        Raises:
            BundleError: If the files are not those that were opened any more, or cannot be copied.
        """
        with self._lock:
            if not self._num_users.get(bundle.digest):
                folder = self.folder_of(bundle)
                try:
                    _copy(bundle, folder)
                    open_handed(folder).refuse_other(bundle.digest)
                except BaseException as error:
                    shutil.rmtree(folder, ignore_errors=True)
                    if isinstance(error, OSError):
                        raise BundleError(f"{error.filename or bundle.directory}: {error.strerror}") from error
                    raise
            self._num_users[bundle.digest] = self._num_users.get(bundle.digest, 0) + 1

    def remove(self, bundle: Bundle) -> None:
        """Delete a copy, if nobody else needs it."""
        with self._lock:
            self._num_users[bundle.digest] -= 1
            if not self._num_users[bundle.digest]:
                del self._num_users[bundle.digest]
                shutil.rmtree(self.folder_of(bundle), ignore_errors=True)


def open_handed(folder: Path) -> Bundle:
    """Open a copy: a bundle of which there are the manifest and the tokenisers.

    Raises:
        BundleError: If they are not what the manifest says.
    """
    content = read_manifest_bytes(folder / MANIFEST_FILE)
    bundle = Bundle(folder, parse_manifest(content, folder / MANIFEST_FILE), hashlib.sha256(content).hexdigest())
    bundle.check_tokenizers()
    return bundle


def _copy(bundle: Bundle, to: Path) -> None:
    """Copy the manifest and the files of the tokenisers.

    Raises:
        OSError: If they cannot be.
    """
    paths = [path for path in bundle.manifest.files if path.startswith(f"{TOKENIZER_DIRECTORY}/")]
    for path in (MANIFEST_FILE, *paths):
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.directory / path, to / path)


class SleepingDesk:
    """See above.

    Attributes:
        endpoint: Where nothing listens.
    """

    def __init__(self, endpoint: str) -> None:
        """Do not listen."""
        self.endpoint = endpoint

    def detach(self, name: str) -> None:
        """Do nothing: no front end is attached."""

    def close(self) -> None:
        """Do nothing: nothing is open."""


# A model that was ready a moment ago may not be any more.
ATTACH_SECONDS = 5.0

log = structlog.get_logger("dragoman.fronts")


class FarEngine(AttachedEngine):
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
            how: See `AttachedEngine`.
        """
        numbers = itertools.count(1)
        super().__init__(name, lambda: ZmqLink(desk.endpoint, f"{identity}/{next(numbers)}".encode()), **how)
        self.settings: EngineSettings = desk.settings
        self.num_replicas = desk.num_replicas


FrontEngine = FarEngine | SleepingEngine


class ServedVersions:
    """See above. What is told is done in order, and told back when it is done."""

    def __init__(
        self,
        repository: Repository,
        attach: Callable[[str, Desk], FrontEngine],
        *,
        prepare: Callable[[LoadedModel], None],
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
        self._models: dict[str, LoadedModel] = {}
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

    async def _release(self, endpoint: str, model: LoadedModel) -> None:
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

    def _load(self, name: str, desk: Desk) -> LoadedModel:
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


def route_of(served: Served, models: Mapping[str, LoadedModel]) -> Route:
    """Return how a model's requests are answered, by the versions that are here."""
    versions = {desk.label: models[desk.endpoint] for desk in served.desks}
    return Route(models[served.default], versions, served.shares, served.labels, served.sticky, served.is_stand_in)
