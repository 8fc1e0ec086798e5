"""Models as a frontend worker has them: bundle files handed over, and attachment to dispatchers."""

import asyncio
import contextlib
import hashlib
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
from dragoman.server.dispatch.remote import RemoteDispatcher
from dragoman.server.models.loaded import LoadedModel, SleepingEngine
from dragoman.server.models.registry import Repository, Route
from dragoman.server.models.use import Outcomes
from dragoman.server.workers.messages import FromWorker, ModelRoute, Released, Routes, RoutesTaken, UsageReport, VersionAddress
from dragoman.server.workers.processors import give_back_blocks_soon

# Settings whose files workers get as content.
SETTINGS = ("tls_certificate", "tls_key", "tls_client_ca", "auth_tokens_file", "admin_tokens_file")
MAX_FILE_BYTES = 16 * 2**20


def read_files(config: ServerConfig, settings: tuple[str, ...]) -> dict[str, bytes]:
    """Return the contents of the files that some settings name, by setting.

    Raises:
        OSError: If one cannot be read.
    """
    paths = {name: getattr(config, name) for name in settings}
    return {name: read_bounded(path, MAX_FILE_BYTES) for name, path in paths.items() if path is not None}


class HandedFiles:
    """Contents that can be opened by a path, in this process alone.

    Attributes:
        paths: By setting.
    """

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        """Keep contents, by setting."""
        self._descriptors = {name: os.memfd_create(f"dragoman-{name}") for name in contents}
        self.paths = {name: Path(f"/proc/self/fd/{descriptor}") for name, descriptor in self._descriptors.items()}
        self.replace(contents)

    def replace(self, contents: Mapping[str, bytes]) -> None:
        """Replace contents; paths stay the same."""
        for name, content in contents.items():
            descriptor = self._descriptors[name]
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)


class HandedBundles:
    """Reference-counted copies, one a bundle; thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Keep copies below an empty folder of this server."""
        self._folder = folder
        self._num_users: dict[str, int] = {}
        self._lock = threading.Lock()

    def folder_of(self, bundle: Bundle) -> Path:
        """Return the folder of a bundle's copy."""
        return self._folder / bundle.digest

    def add(self, bundle: Bundle) -> None:
        """Copy a bundle, unless there is a copy; call `remove` as often as `add`.

        Raises:
            BundleError: If the files have changed since the bundle was opened, or cannot be copied.
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
        """Delete a copy that was added as often as removed."""
        with self._lock:
            self._num_users[bundle.digest] -= 1
            if not self._num_users[bundle.digest]:
                del self._num_users[bundle.digest]
                shutil.rmtree(self.folder_of(bundle), ignore_errors=True)


def open_handed(folder: Path) -> Bundle:
    """Open a copy. Raises `BundleError` if it does not match its manifest."""
    content = read_manifest_bytes(folder / MANIFEST_FILE)
    bundle = Bundle(folder, parse_manifest(content, folder / MANIFEST_FILE), hashlib.sha256(content).hexdigest())
    bundle.check_tokenizers()
    return bundle


def _copy(bundle: Bundle, to: Path) -> None:
    """Copy the manifest and the files of the tokenisers."""
    paths = [path for path in bundle.manifest.files if path.startswith(f"{TOKENIZER_DIRECTORY}/")]
    for path in (MANIFEST_FILE, *paths):
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.directory / path, to / path)


# A model that was ready a moment ago may not be any more.
ATTACH_SECONDS = 5.0

log = structlog.get_logger("dragoman.fronts")

FrontEngine = RemoteDispatcher | SleepingEngine


class ServedVersions:
    """Versions that this worker reaches. Messages are carried out in order, and confirmed to the parent."""

    def __init__(
        self,
        repository: Repository,
        attach: Callable[[str, VersionAddress], FrontEngine],
        *,
        prepare: Callable[[LoadedModel], None],
        on_change: Callable[[], None],
        send: Callable[[FromWorker], None],
    ) -> None:
        """Start with nothing served.

        Args:
            repository: Routes of this worker, kept here.
            attach: Returns the client of a model's dispatcher, not open yet.
            prepare: Prepares a model for requests; called on a thread of its own.
            on_change: Called when other versions are served.
            send: Sends a message to the parent.
        """
        self._repository, self._attach = repository, attach
        self._prepare, self._on_change, self._send = prepare, on_change, send
        self._models: dict[str, LoadedModel] = {}
        self._reported: dict[str, Outcomes] = {}
        self._reported_moves: dict[str, int] = {}
        self._turn = asyncio.Lock()
        self._releasing: set[str] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def read(self, routes: Routes) -> None:
        """Read the versions of the start; nothing is attached yet.

        Raises:
            BundleError: If the copy of a bundle cannot be read.
        """
        for route in routes.models:
            for version in route.versions:
                self._models[version.endpoint] = self._load(route.name, version)
        self._publish(routes)

    async def begin(self, routes: Routes) -> None:
        """Attach to the versions of the start, and wait for those that are ready."""
        for model in self._models.values():
            _open(model)
        await self._until_attached([version for route in routes.models for version in route.versions])

    def take(self, routes: Routes) -> None:
        """Attach to the versions that are new, route requests to them, and release those that are not kept."""
        self._spawn(self._take(routes))

    def report_usage(self) -> None:
        """Send what requests have done with versions since the last report."""
        used: dict[str, tuple[int, int, float]] = {}
        held: dict[str, tuple[int, float]] = {}
        for endpoint, model in self._models.items():
            outcomes = model.use.outcomes
            new = outcomes.since(self._reported.get(endpoint, Outcomes()))
            if new.num_answered or new.num_failed:
                used[endpoint] = (new.num_answered, new.num_failed, new.seconds)
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
                log.error("models cannot be served as told", reason=str(error), exc_info=None if is_expected else error)
                self._send(RoutesTaken(routes.serial, str(error) or type(error).__name__))
                for endpoint in routes.endpoints - self._models.keys():  # the parent believes that they are held here
                    self._send(Released(endpoint))
                return
            self._publish(routes)
            self._on_change()
            self._send(RoutesTaken(routes.serial))
            for endpoint in self._models.keys() - routes.endpoints - set(routes.kept) - self._releasing:
                self._releasing.add(endpoint)
                self._spawn(self._release(endpoint, self._models[endpoint]))

    async def _adopt(self, routes: Routes) -> None:
        """Read and attach to the versions that are new here; none is kept if one cannot be read (`BundleError`)."""
        new = [(route.name, one) for route in routes.models for one in route.versions if one.endpoint not in self._models]
        models = [await asyncio.to_thread(self._load, *one) for one in new]
        for (_, version), model in zip(new, models, strict=True):
            await asyncio.to_thread(self._prepare, model)
            _open(model)
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
        give_back_blocks_soon()

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
        """Return a version, not attached yet; a bundle that is here already is not read again. Raises `BundleError`."""
        engine, directory = self._attach(name, version), Path(version.bundle)
        for model in list(self._models.values()):
            if model.bundle.directory == directory:
                return LoadedModel(model.bundle, model.tokenizers, model.frames, engine, version.label, traits=version.traits)
        return LoadedModel.of(open_handed(directory), engine, version.label, version.traits)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _open(model: LoadedModel) -> None:
    """Attach to a model's dispatcher, unless the model is asleep."""
    if isinstance(model.engine, RemoteDispatcher):
        model.engine.open()
