"""Loading of a model's versions, one at a time."""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Generic

import structlog

from dragoman.export.bundle import BundleError
from dragoman.server.models.discovery import FoundVersion
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.memory import NotWanted, Placement
from dragoman.server.models.model_file import ModelFile
from dragoman.server.models.registry import Route
from dragoman.server.models.version import Cause, Opened, Refused, State, Version
from dragoman.server.models.workshop import E, Front, Workshop
from dragoman.server.workers.supervisor import EngineCannotStart

# Of what has no files.
NOWHERE = FoundVersion("", Path(), (0, 0, 0))


class ModelVersions(Generic[E]):
    """See above.

    Attributes:
        model: Name of the model.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._versions: list[Version[E]] = []

    def __iter__(self) -> Iterator[Version[E]]:
        """Yield those that are there now, in the order in which they came; others may come and go meanwhile."""
        return iter(list(self._versions))

    def begin(self, found: FoundVersion) -> Version[E]:
        """Return a version that begins its life."""
        version = Version[E](self.model, found)
        self._versions.append(version)
        return version

    def stand_in(self, opened: Opened, loaded: LoadedModel[E]) -> Version[E]:
        """Return what stands for a version that cannot answer now; its engine is never started."""
        version = Version[E](self.model, NOWHERE, State.STANDBY, loaded=loaded)
        version.open(opened)
        self._versions.append(version)
        return version

    def remove(self, version: Version[E]) -> None:
        """Forget a version that has ended; one that is refused stays known."""
        if version in self._versions and version.state is not State.REFUSED:
            self._versions.remove(version)

    def forget_refused(self, there: Iterable[FoundVersion] = ()) -> None:
        """Forget what was refused and has ended, but for files that are there."""
        kept = set(there)
        self._versions = [one for one in self if one.state is not State.REFUSED or one.loaded is not None or one.found in kept]

    def forgive(self, names: Collection[str] | None = None, causes: Collection[Cause] = frozenset(Cause)) -> None:
        """Forget what was refused, of these names or all, for these causes or any.

        One that requests still hold ends as if it had not been refused.
        """
        for version in self:
            if version.state is State.REFUSED and version.cause in causes and (names is None or version.found.name in names):
                if version.loaded is None:
                    self._versions.remove(version)
                else:
                    version.enter(State.RETIRING)

    def forget_asleep(self, wanted: Iterable[FoundVersion]) -> None:
        """Forget those that are asleep, but for some."""
        kept = set(wanted)
        self._versions = [one for one in self if one.state is not State.ASLEEP or one.found in kept]

    def known(self, found: FoundVersion) -> Version[E] | None:
        """Return the version of what was found, in whichever part of its life but the end; None if there is none."""
        return next((one for one in self if one.found == found and one.state is not State.RETIRING), None)

    def loaded(self) -> list[LoadedModel[E]]:
        """Return those that have an engine."""
        return [version.loaded for version in self if version.loaded is not None]

    def free_replicas(self, num_replicas: int) -> range:
        """Return the lowest numbers for engines that no other engine of the model has."""
        taken = {number for version in self if version.loaded is not None for number in version.replicas}
        first = 0
        while taken & set(range(first, first + num_replicas)):
            first += 1
        return range(first, first + num_replicas)


def is_in(version: Version[Any], route: Route[Any] | None) -> bool:
    """Return whether a route leads to a version."""
    return route is not None and any(model is version.loaded for model in route.versions.values())


# Between two looks at an engine that is started again and again.
LOOK_SECONDS = 0.25

log = structlog.get_logger("dragoman.repository")


class Loader(Generic[E]):
    """Loads the versions of one model."""

    def __init__(
        self,
        versions: ModelVersions[E],
        workshop: Workshop[E],
        front: Callable[[], Front[E]],
        on_death: Callable[[Version[E]], None],
        placement: Placement,
    ) -> None:
        """Load nothing yet.

        Args:
            versions: Of the model.
            workshop: See there.
            front: Returns what answers callers.
            on_death: Called when an engine of a version has ended by itself.
            placement: Has other models give way.
        """
        self._placement = placement
        self._versions, self._workshop, self._front_of, self._on_death = versions, workshop, front, on_death

    async def bring_up(
        self,
        version: Version[E],
        file: ModelFile,
        beside: Callable[[], LoadedModel[E] | None],
        make_way: Callable[[Opened, str], Awaitable[None]] | None,
    ) -> bool:
        """Load a version and prove it; return whether it can serve.

        Args:
            version: That was found.
            file: Of the model.
            beside: Returns what serves now.
            make_way: Ends what serves, once the version has been opened; None for what serves to go on.
        """

        async def load() -> None:
            async with self._workshop.turn:
                opened = await self._open(version, file)
                self._workshop.measure(beside())
                if make_way is None:
                    await start(opened)
                    return
            await make_way(opened, version.label)  # nobody else's turn waits for requests that may take as long as they like
            async with self._workshop.turn:
                await start(opened)

        async def start(opened: Opened) -> None:
            await self._ensure_memory(version, opened, file)
            await self._start(version, file, self._workshop.load_seconds)

        return await self._try(version, load())

    async def bring_up_opened(
        self,
        version: Version[E],
        file: ModelFile,
        is_needed: Callable[[Version[E]], bool] | None = None,
        *,
        is_told: bool = True,
    ) -> bool:
        """Load a version that is open, beside all that begin with the server, however long it takes; return whether it can serve.

        Args:
            version: That was opened.
            file: Of the model.
            is_needed: Returns whether its engine is to be started again after it could not be; None for not at all.
            is_told: Whether the log says if it is refused; not where the server ends and says so.
        """

        async def load() -> None:
            assert version.opened is not None
            self._placement.check(self._workshop.reckon(version.opened.bundle, file), is_start=True)
            await self._start(version, file, None, is_needed)

        return await self._try(version, load(), is_told=is_told)

    async def open(self, version: Version[E], file: ModelFile) -> LoadedModel[E] | None:
        """Open a version that is not to be loaded yet, and have front ends know it; return what stands for it, None if refused."""
        try:
            opened = await self._open(version, file)
            sleeping = self._workshop.sleeping(opened, file, version.label, "")
            await self._front_of().adopt(sleeping)
        except Exception as error:
            self.refuse(version, _refused(version, error))
            return None
        return sleeping

    async def _open(self, version: Version[E], file: ModelFile) -> Opened:
        """Read what front ends need of a version.

        Raises:
            Refused: If it cannot be served.
        """
        opened = await asyncio.to_thread(self._workshop.open, version.model, version.found, file)
        version.open(opened)
        return opened

    async def wake(self, version: Version[E], file: ModelFile, is_wanted: Callable[[], bool]) -> None:
        """Load a version that is open, when it is its turn and there is memory, and prove it.

        Args:
            version: That was opened.
            file: Of the model.
            is_wanted: Returns whether it is still to be loaded.

        Raises:
            Refused: If it cannot be; nothing of it runs then.
            NotWanted: If it is not to be any more.
        """
        try:
            async with self._workshop.turn:
                assert version.opened is not None
                version.has_died = False
                await self._placement.make_room(version.model, self._workshop.reckon(version.opened.bundle, file), is_wanted)
                await self._start(version, file, self._workshop.load_seconds)
        except NotWanted:
            raise
        except Exception as error:
            refused = _refused(version, error)
            await self.end(version)
            raise refused from error
        version.enter(State.STANDBY)

    def stand_in(self, opened: Opened, label: str, file: ModelFile) -> Version[E]:
        """Return what stands for a version while it cannot answer."""
        return self._versions.stand_in(opened, self._workshop.load(opened, file, label, range(0)))

    def refuse(self, version: Version[E], refused: Refused) -> None:
        """Say that a version is not to be served; its engine, if it has one, is for others to end."""
        version.refuse(refused)
        if version.loaded is None:
            version.let_go()
        log.error(
            "a version is refused",
            model=version.model,
            version=version.label or None,
            directory=str(version.found.directory),
            cause=refused.cause.value,
            reason=refused.reason,
        )

    async def end(self, version: Version[E]) -> None:
        """End the engine of a version that no request holds."""
        if version.loaded is not None:
            await version.loaded.engine.stop()
            version.loaded = None
            self._workshop.forget(version.model, version.replicas)
        if version.state in (State.RETIRING, State.REFUSED):
            version.let_go()

    async def _try(self, version: Version[E], work: Coroutine[Any, Any, None], *, is_told: bool = True) -> bool:
        try:
            await work
        except Exception as error:
            refused = _refused(version, error)
            if is_told:
                self.refuse(version, refused)
            else:
                version.refuse(refused)
            await self.end(version)
            self._versions.remove(version)  # if it was forgiven meanwhile
            return False
        version.enter(State.STANDBY)
        return True

    async def _ensure_memory(self, version: Version[E], opened: Opened, file: ModelFile) -> None:
        """Do nothing if there is memory for a version, or others make way.

        Raises:
            Refused: If there is not.
        """
        needed_bytes = self._workshop.reckon(opened.bundle, file)
        try:
            await self._placement.make_room(version.model, needed_bytes, lambda: True)
        except Refused as refused:
            raise Refused(refused.cause, f'{refused.reason}; swap.mode = "restart" ends what serves first') from None

    async def _start(
        self, version: Version[E], file: ModelFile, seconds: float | None, is_needed: Callable[[Version[E]], bool] | None = None
    ) -> None:
        """Start a version's engine, prove it, and have front ends be able to reach it."""
        loaded = self._load(version, file)
        version.enter(State.STARTING)
        try:
            async with asyncio.timeout(seconds):
                await _until_started(loaded, None if is_needed is None else partial(is_needed, version))
        except EngineCannotStart as error:
            raise Refused(Cause.START, str(error).removeprefix(f"model {version.model!r}: ")) from error
        except TimeoutError:
            raise Refused(Cause.START, f"it is not ready after {seconds:g} s (load_timeout_seconds)") from None
        version.enter(State.PROVING)
        await self._workshop.prove(loaded)
        await self._front_of().adopt(loaded)

    def _load(self, version: Version[E], file: ModelFile) -> LoadedModel[E]:
        opened = version.opened
        assert opened is not None
        version.reserved_bytes = self._workshop.reckon(opened.bundle, file)
        version.replicas = self._versions.free_replicas(self._workshop.num_replicas(opened.bundle, file))
        version.loaded = self._workshop.load(
            opened,
            file,
            version.label,
            version.replicas,
            on_death=lambda: self._on_death(version),
            is_observed=lambda: version.has_been_proved,
        )
        return version.loaded


async def _until_started(loaded: LoadedModel[E], is_needed: Callable[[], bool] | None) -> None:
    try:
        await loaded.engine.start(is_persistent=is_needed is not None)
    except EngineCannotStart:
        if is_needed is None:
            raise
        while not loaded.engine.is_ready:  # it is tried again, and the log says so each time
            if not is_needed():
                raise
            await asyncio.sleep(LOOK_SECONDS)


def _refused(version: Version[Any], error: Exception) -> Refused:
    """Return why a version is refused; what nobody foresaw is logged."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, BundleError):
        return Refused(Cause.BUNDLE, str(error))
    log.error("a version cannot be loaded", model=version.model, exc_info=error)
    return Refused(Cause.START, f"{type(error).__name__}: {error}")
