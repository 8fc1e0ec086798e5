"""In-memory models folder, version loader and frontend for one model; they fail where a test says so."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from dragoman.export.bundle import BundleError
from dragoman.server.config import ConfigError
from dragoman.server.models.discovery import FoundModel, FoundVersion
from dragoman.server.models.loaded import LoadedModel, SleepingEngine
from dragoman.server.models.memory import Placement, Room
from dragoman.server.models.model_file import ModelFile
from dragoman.server.models.reconciler import ModelReconciler
from dragoman.server.models.registry import CannotServe, Route
from dragoman.server.models.use import Holding, Outcomes
from dragoman.server.models.version import Cause, Opened, Refused, Version
from dragoman.server.workers.supervisor import EngineCannotStart
from tests.server.conftest import until

MODEL = "en-de"
PATIENCE_SECONDS = 10.0
DAMAGED, WRONG = Refused(Cause.BUNDLE, "damaged"), Refused(Cause.PROOF, "another answer")
FAULTS: dict[str, Exception] = {
    "open": DAMAGED,
    "start": EngineCannotStart("no memory"),
    "prove": WRONG,
    "adopt": BundleError("its files are gone"),
    "publish": CannotServe("front end 0 does not answer"),
}


class StagedEngine:
    """An engine without a process."""

    device = "cpu"
    num_replicas = 1

    def __init__(self, stage: "Stage", label: str, on_death: Callable[[], None], is_observed: Callable[[], bool]) -> None:
        self._stage, self.label = stage, label
        self.die, self.is_observed = on_death, is_observed  # a supervisor starts one that died again at once
        self.settings: Any = SimpleNamespace(max_slots=4, slots_per_request=4)
        self.process_ids: list[int] = []
        self.is_ready = self.is_started = False

    async def start(self, *, is_persistent: bool = False) -> None:
        self.is_started = True
        await self._stage.reach("start", self.label)
        self.is_ready = True

    async def stop(self) -> None:
        self.is_ready = False
        self._stage.told.append(("stop", self.label))


class Stage:
    """A model's folder, version loader, metrics and frontend: by step and label, `faults` are raised and `gates` awaited."""

    def __init__(self, *names: str, file: ModelFile | None = None, size: int = 0) -> None:
        self.told: list[tuple[str, str]] = []  # steps with the version's label, in order
        self.faults: dict[tuple[str, str], Exception] = {}
        self.gates: dict[tuple[str, str], asyncio.Event] = {}
        self.routes: list[Route | None] = []
        self.swaps, self.sleeps, self.wakes = list[str](), list[str](), list[str]()  # outcomes that are counted
        self.refusals: list[tuple[str, float]] = []
        self.freed: list[range] = []
        self.outcomes_of: dict[str, Outcomes] = {}
        self.engines: list[StagedEngine] = []
        self.held: dict[str, Any] = {}
        self.turn = asyncio.Lock()
        self.load_seconds = PATIENCE_SECONDS
        self.file = file or ModelFile()
        self.misfit: ModelFile | None = None  # a file with which nothing can be loaded
        self.is_asked_for = False
        self.size, self.free_bytes = size, 100
        self.sizes: dict[str, int] = {}
        self.versions: list[FoundVersion] = []
        self._stamps = 0
        self.put(*names)
        self.placement = Placement(measure_room=lambda: Room(self.free_bytes, "is free"), wait_seconds=0.05)
        self.metrics: Any = SimpleNamespace(versions=self, remove_model=lambda name: None)
        loader: Any = self
        self.keeper = ModelReconciler(self.found, loader, lambda: self, self.placement)

    @property
    def found(self) -> FoundModel:
        return FoundModel(MODEL, Path("models") / MODEL, tuple(self.versions), self.file)

    def put(self, *names: str) -> None:
        for name in names:
            self._stamps += 1
            self.remove(name)
            self.versions.append(FoundVersion(name, Path("models") / MODEL / name, (self._stamps, 1, 1), MODEL))
        self.versions.sort(key=lambda one: one.name)

    def remove(self, *names: str) -> None:
        self.versions = [one for one in self.versions if one.name not in names]

    def scan(self) -> None:
        self.keeper.update(self.found)

    async def settle(self) -> None:
        """Scan, and wait until nothing is left to do."""
        self.scan()
        async with asyncio.timeout(PATIENCE_SECONDS):
            await self.keeper.settled()

    async def deploy(self, *names: str) -> None:
        self.put(*names)
        await self.settle()

    async def deploy_until(self, step: str, name: str) -> asyncio.Event:
        """Add a version, wait until it reaches a step, and return the event that lets it go on."""
        gate = self.hold(step, name)
        self.put(name)
        self.scan()
        await until(lambda: (step, name) in self.told)
        return gate

    def fail(self, step: str, label: str, error: Exception | None = None) -> None:
        self.faults[step, label] = error or FAULTS[step]

    def hold(self, step: str, label: str) -> asyncio.Event:
        return self.gates.setdefault((step, label), asyncio.Event())

    @contextlib.asynccontextmanager
    async def led(self, *, is_persistent: bool = False) -> "AsyncIterator[Stage]":
        """Start the first versions and reconcile until this is left; no engine is left then."""
        self.keeper.open_first()
        self.keeper.set_first_route()
        self.routes += filter(None, [self.keeper.route])
        tasks = []
        if is_persistent:
            tasks.append(asyncio.create_task(self.keeper.start(is_persistent=True)))
        else:
            await self.keeper.start()
        tasks.append(asyncio.create_task(self.keeper.run()))
        try:
            if not is_persistent:
                await self.keeper.settled()
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.keeper.stop()
        assert not self.running() and not self.turn.locked(), "an engine is left"

    async def ask_for(self) -> None:
        """Have a request wait until the model serves or the request is refused."""
        num_refused = len(self.refusals)
        self.is_asked_for = True
        self.keeper.wake()
        await until(lambda: self.serving is not None or len(self.refusals) > num_refused)
        self.is_asked_for = False
        self.keeper.wake()

    @property
    def route(self) -> Route:
        route = self.routes[-1]
        assert route is not None
        return route

    @property
    def serving(self) -> str | None:
        """The version that answers requests that name none; None while none does, or it is unloaded."""
        route = self.routes[-1]
        is_serving = route is not None and route.default.engine.is_ready and not route.default.is_asleep
        return route.default.label if route is not None and is_serving else None

    def version(self, label: str) -> Version:
        return next(one for one in reversed(self.keeper.loaded.with_files()) if one.label == label)

    @property
    def shown(self) -> dict[str, str]:
        """States by version as metrics show them, with the cause of those that are refused."""
        return {one.version: f"{one.state} {one.cause}".rstrip() for one in self.keeper.readings()}

    def engine(self, label: str) -> StagedEngine:
        return [one for one in self.engines if one.label == label and one.is_started][-1]

    def running(self) -> list[str]:
        return sorted(one.label for one in self.engines if one.is_ready)

    @property
    def is_held(self) -> bool:
        """Whether a step waits for its gate."""
        return any(not gate.is_set() for gate in self.gates.values())

    def steps(self, label: str) -> list[str]:
        return [step for step, one in self.told if one == label]

    async def reach(self, step: str, label: str) -> None:
        self.told.append((step, label))
        if (gate := self.gates.get((step, label))) is not None:
            await gate.wait()
        if (fault := self.faults.get((step, label))) is not None:
            raise fault

    # Version loader.

    def open(self, model: str, found: FoundVersion, file: ModelFile) -> Opened:
        content = f"{found.stamp[0]:012}"
        self.told.append(("open", found.name or content))
        if (fault := self.faults.get(("open", found.name))) is not None:
            raise fault
        manifest = SimpleNamespace(name=model, version=content, precision="fp32")
        bundle: Any = SimpleNamespace(manifest=manifest, directory=found.directory)
        nothing: Any = None
        return Opened(bundle, nothing, nothing)

    def num_replicas(self, bundle: Any, file: ModelFile) -> int:
        return 1

    def measure(self, model: LoadedModel) -> None:
        self.told.append(("measure", model.label))

    def make(
        self,
        opened: Opened,
        file: ModelFile,
        label: str,
        replicas: range,
        *,
        on_death: Callable[[], None] = lambda: None,
        is_observed: Callable[[], bool] = lambda: True,
    ) -> LoadedModel:
        taken = {number for one in self.keeper.loaded.versions if one.loaded is not None for number in one.replicas}
        assert not taken.intersection(replicas)
        engine: Any = StagedEngine(self, label, on_death, is_observed)
        self.engines.append(engine)
        return LoadedModel(opened.bundle, opened.tokenizers, opened.templates, engine, label)

    async def prove(self, model: LoadedModel) -> None:
        await self.reach("prove", model.label)

    def forget(self, model: str, replicas: range) -> None:
        self.freed.append(replicas)

    def remove_model(self, name: str) -> None:
        self.told.append(("gone", ""))

    def swapped(self, model: str, outcome: str) -> None:
        self.swaps.append(outcome)

    def slept(self, model: str, why: str) -> None:
        self.sleeps.append(why)

    def woken(self, model: str, outcome: str) -> None:
        self.wakes.append(outcome)

    async def measure_engines(self, bundle: Any, file: ModelFile, free_bytes: int) -> None: ...

    def needed_bytes(self, bundle: Any, file: ModelFile) -> int:
        return self.sizes.get(bundle.directory.name, self.size)

    def resident_bytes(self, model: LoadedModel) -> int:
        return 0

    def sleeping(self, opened: Opened, file: ModelFile, label: str, device: str) -> LoadedModel:
        if file == self.misfit:
            raise ConfigError("max_slots_per_request: 4 is above max_slots")
        settings: Any = None
        return LoadedModel(opened.bundle, opened.tokenizers, opened.templates, SleepingEngine(MODEL, settings, 1, device), label)

    # Front.

    async def adopt(self, model: LoadedModel) -> None:
        await self.reach("adopt", model.label)

    async def publish(self, name: str, route: Route | None) -> None:
        for label in ["nothing"] if route is None else [*route.versions]:
            await self.reach("publish", label)
        for model in () if route is None else route.versions.values():
            is_started = getattr(model.engine, "is_started", True)
            assert is_started == model.engine.is_ready, "it was started, and does not run"
        self.routes.append(route)

    async def until_released(self, model: LoadedModel) -> None:
        assert not self.routes or self.routes[-1] is None or model not in self.routes[-1].versions.values(), "it is still served"
        await model.use.until_free()

    def outcomes(self, model: LoadedModel) -> Outcomes:
        return self.outcomes_of.get(model.label, Outcomes())

    def holding(self, model: LoadedModel) -> Holding:
        return Holding(model.use.num_held, model.use.last_used, model.use.warm_until)

    def is_awaited(self, name: str) -> bool:
        return self.is_asked_for

    def refuse_waiting(self, name: str, reason: str, retry_after_seconds: float) -> None:
        self.refusals.append((reason, retry_after_seconds))
