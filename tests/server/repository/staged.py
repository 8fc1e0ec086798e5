"""A stage for a model's versions: engines, a workshop and a front in memory, which fail where a test says so and write down all."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dragoman.server.repository.found import FoundModel, FoundVersion
from dragoman.server.repository.loaded import LoadedModel
from dragoman.server.repository.model_file import ModelFile
from dragoman.server.repository.model_keeper import ModelKeeper
from dragoman.server.repository.models import Route
from dragoman.server.repository.placement import Placement
from dragoman.server.repository.use import Holding, Outcomes
from dragoman.server.repository.versions import Cause, Opened, Refused, State, Version

MODEL = "en-de"
PATIENCE_SECONDS = 10.0


def play(stage: "Stage", scene: Callable[[], Awaitable[None]]) -> None:
    """Lead a stage's versions while something happens."""

    async def run() -> None:
        async with stage.led():
            await scene()
        assert not stage.running(), "no engine outlasts its keeper"
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


class StagedEngine:
    """An engine that starts as it is told to."""

    device = "cpu"
    num_replicas = 1

    def __init__(self, stage: "Stage", label: str, on_death: Callable[[], None], is_observed: Callable[[], bool]) -> None:
        self._stage, self.label = stage, label
        self.on_death, self.is_observed = on_death, is_observed
        self.settings: Any = SimpleNamespace(max_slots=4, slots_per_request=4)
        self.process_ids: list[int] = []
        self.is_ready = False
        self.is_started = False

    async def start(self, *, is_persistent: bool = False) -> None:
        self.is_started = True
        await self._stage.reach("start", self.label)
        self.is_ready = True

    async def stop(self) -> None:
        self.is_ready = False
        self._stage.tell("stop", self.label)

    def die(self) -> None:
        """End by itself, and be started again at once, as a supervisor does it."""
        self.on_death()


class StagedPlacement(Placement):
    """Memory of which there is as much as a stage says, for the version that has been reckoned."""

    def __init__(self, stage: "Stage") -> None:
        super().__init__()
        self._stage = stage

    async def make_room(self, name: str, needed_bytes: int, is_wanted: Callable[[], bool]) -> None:
        await self._stage.reach("memory", self._stage.reckoned)


class Stage:
    """The workshop and the front of one model, see `server.repository.workshop`, and its folder.

    Attributes:
        told: What has happened, in order: steps with the version's label.
        faults: What is raised at a step of a version, by both.
        gates: What is waited for at a step of a version, by both.
        routes: What was published, in order.
        swaps: Outcomes that were counted.
        freed: Numbers of engines that are gone for good.
        reckoned: The version whose memory was reckoned last.
        outcomes_of: What became of the requests of a version, by its label.
    """

    def __init__(self, *names: str, file: ModelFile | None = None) -> None:
        self.told: list[tuple[str, str]] = []
        self.faults: dict[tuple[str, str], Exception] = {}
        self.gates: dict[tuple[str, str], asyncio.Event] = {}
        self.routes: list[Route[Any] | None] = []
        self.swaps: list[str] = []
        self.reckoned = ""
        self.freed: list[range] = []
        self.outcomes_of: dict[str, Outcomes] = {}
        self.engines: list[StagedEngine] = []
        self.turn = asyncio.Lock()
        self.load_seconds = PATIENCE_SECONDS
        self.file = file or ModelFile()
        self._stamps = 0
        self.versions: list[FoundVersion] = []
        self.put(*names)
        self.placement: Placement = StagedPlacement(self)
        self.keeper: ModelKeeper[Any] = ModelKeeper(self.found, self, lambda: self, self.placement)

    # The folder.

    @property
    def found(self) -> FoundModel:
        return FoundModel(MODEL, Path("models") / MODEL, tuple(self.versions), self.file)

    def put(self, *names: str) -> None:
        """Put down versions, in the place of those of the same names."""
        for name in names:
            self._stamps += 1
            self.versions = [one for one in self.versions if one.name != name]
            self.versions.append(FoundVersion(name, Path("models") / MODEL / name, (self._stamps, 1, 1), MODEL))
        self.versions.sort(key=lambda one: one.name)

    def remove(self, *names: str) -> None:
        self.versions = [one for one in self.versions if one.name not in names]

    def look(self) -> None:
        """Have the keeper find what lies there."""
        self.keeper.find(self.found)

    async def settle(self) -> None:
        """Look, and wait until all is done."""
        self.look()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.keeper.settled()

    async def until(self, is_so: Callable[[], object]) -> None:
        """Wait until something is so."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not is_so():
                await asyncio.sleep(0.001)

    def fail(self, step: str, label: str, error: Exception) -> None:
        self.faults[step, label] = error

    def hold(self, step: str, label: str) -> asyncio.Event:
        """Have a step of a version wait for what is returned."""
        return self.gates.setdefault((step, label), asyncio.Event())

    @contextlib.asynccontextmanager
    async def led(self) -> AsyncIterator[None]:
        """Open and start the first versions, and lead them until this is left; no task is left then."""
        self.keeper.open_first()
        self.keeper.hold_first()
        if self.keeper.route is not None:
            self.routes.append(self.keeper.route)
        await self.keeper.start()
        running = asyncio.create_task(self.keeper.run())
        try:
            await self.keeper.settled()
            yield
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await self.keeper.stop()

    # What is read of it.

    @property
    def serving(self) -> str | None:
        """The version that answers requests that name none; None while nobody does."""
        route = self.routes[-1]
        return route.default.label if route is not None and route.default.engine.is_ready else None

    def version(self, label: str) -> Version[Any]:
        return next(
            one for one in reversed(list(self.keeper.versions)) if one.label == label and one is not self.keeper._switch.absent
        )

    def state(self, label: str) -> State | None:
        """The part of its life that a version is in; None if it is not known any more."""
        labels = [one.label for one in self.keeper.known()]
        return self.version(label).state if label in labels else None

    def engine(self, label: str) -> StagedEngine:
        return [one for one in self.engines if one.label == label and one.is_started][-1]

    def running(self) -> list[str]:
        """The versions whose engines run."""
        return [one.label for one in self.engines if one.is_ready]

    def steps(self, label: str) -> list[str]:
        return [step for step, one in self.told if one == label]

    def tell(self, step: str, label: str) -> None:
        self.told.append((step, label))

    async def reach(self, step: str, label: str) -> None:
        self.tell(step, label)
        if (gate := self.gates.get((step, label))) is not None:
            await gate.wait()
        if (fault := self.faults.get((step, label))) is not None:
            raise fault

    # The workshop.

    def open(self, model: str, found: FoundVersion, file: ModelFile) -> Opened:
        content = f"{found.stamp[0]:012}"
        self.tell("open", found.name or content)
        if found not in self.versions:
            raise Refused(Cause.BUNDLE, "its files are gone")
        if (fault := self.faults.get(("open", found.name))) is not None:
            raise fault
        manifest = SimpleNamespace(name=model, version=content, precision="fp32")
        bundle: Any = SimpleNamespace(manifest=manifest, directory=found.directory)
        nothing: Any = None
        return Opened(bundle, nothing, nothing)

    def num_replicas(self, bundle: Any, file: ModelFile) -> int:
        return 1

    def measure(self, model: LoadedModel[Any] | None) -> None:
        self.tell("measure", "" if model is None else model.label)

    def load(
        self,
        opened: Opened,
        file: ModelFile,
        label: str,
        replicas: range,
        *,
        on_death: Callable[[], None] = lambda: None,
        is_observed: Callable[[], bool] = lambda: True,
    ) -> LoadedModel[Any]:
        assert not replicas or not any(set(replicas) & set(one.replicas) for one in self.keeper.versions if one.loaded is not None)
        engine: Any = StagedEngine(self, label, on_death, is_observed)
        self.engines.append(engine)
        return LoadedModel(opened.bundle, opened.tokenizers, opened.frames, engine, label)

    async def prove(self, model: LoadedModel[Any]) -> None:
        await self.reach("prove", model.label)

    def forget(self, model: str, replicas: range) -> None:
        self.freed.append(replicas)

    def published(self, name: str, route: Route[Any] | None) -> None:
        self.tell("published", "" if route is None else route.default.label)

    def gone(self, name: str) -> None:
        self.tell("gone", "")

    def swapped(self, model: str, outcome: str) -> None:
        self.swaps.append(outcome)

    # The front.

    async def adopt(self, model: LoadedModel[Any]) -> None:
        await self.reach("adopt", model.label)

    async def publish(self, name: str, route: Route[Any] | None) -> None:
        labels = [] if route is None else [*route.versions]
        for label in labels or [""]:
            await self.reach("publish", label)
        for model in () if route is None else route.versions.values():
            assert model.engine.is_started == model.engine.is_ready, "it was started, and does not run"
        self.routes.append(route)

    async def until_released(self, model: LoadedModel[Any]) -> None:
        assert not self.routes or self.routes[-1] is None or model not in self.routes[-1].versions.values(), "it is still served"
        await model.use.until_free()

    def outcomes(self, model: LoadedModel[Any]) -> Outcomes:
        return self.outcomes_of.get(model.label, Outcomes())

    # The sleep of the model: this one is always loaded.

    def reckon(self, bundle: Any, file: ModelFile) -> int:
        self.reckoned = bundle.directory.name
        return 0

    def resident_bytes(self, model: LoadedModel[Any]) -> int:
        return 0

    def sleeping(self, opened: Opened, file: ModelFile, label: str, device: str) -> LoadedModel[Any]:
        raise NotImplementedError

    def slept(self, model: str, why: str) -> None:
        raise NotImplementedError

    def woken(self, model: str, outcome: str) -> None:
        raise NotImplementedError

    def holding(self, model: LoadedModel[Any]) -> Holding:
        return Holding(model.use.num_held, model.use.last_used, model.use.warm_until)

    def is_awaited(self, name: str) -> bool:
        return False

    def refuse_waiting(self, name: str, reason: str, retry_after_seconds: float) -> None:
        raise NotImplementedError
