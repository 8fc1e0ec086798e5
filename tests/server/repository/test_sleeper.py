"""The sleep of one model's versions, on the stage where they are led: what is loaded when, what is served, what is told."""

import asyncio
import time
from typing import Any

import pytest

from dragoman.export.bundle import BundleError
from dragoman.server.config import ConfigError
from dragoman.server.repository import model_keeper, placement, sleep
from dragoman.server.repository.loaded import LoadedModel
from dragoman.server.repository.memory import Room
from dragoman.server.repository.model_file import ModelFile, ModelSettings, Versions
from dragoman.server.repository.model_keeper import ModelKeeper
from dragoman.server.repository.placement import Placement, Stay
from dragoman.server.repository.sleeping_engine import SleepingEngine
from dragoman.server.repository.status import status_of
from dragoman.server.repository.use import Holding
from dragoman.server.repository.versions import Cause, Opened, Refused, State
from dragoman.server.supervisor import EngineCannotStart
from tests.server.repository.staged import MODEL, Stage, play

HOUR = ModelSettings(keep_loaded="1h")


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_keeper, "WATCH_SECONDS", 0.002)
    monkeypatch.setattr(placement, "LOOK_SECONDS", 0.001)
    monkeypatch.setattr(placement, "MIN_STAY_SECONDS", 0.0)


class SleepyStage(Stage):
    """A stage of a model that sleeps.

    Attributes:
        is_asked_for: Whether requests wait for the model.
        refusals: What they were told.
        sleeps: Causes that were counted.
        wakes: Outcomes that were counted.
        free_bytes: Of the machine.
        misfit: A file that no version can be loaded with.
        num_looks: Times that was asked how requests use a version.
    """

    def __init__(self, *names: str, file: ModelFile | None = None) -> None:
        super().__init__(*names, file=file or ModelFile(settings=HOUR))
        self.is_asked_for = False
        self.refusals: list[tuple[str, float]] = []
        self.sleeps: list[str] = []
        self.wakes: list[str] = []
        self.free_bytes = 100
        self.misfit: ModelFile | None = None
        self.num_looks = 0
        self.placement = Placement(lambda: [self.keeper], measure_room=lambda: Room(self.free_bytes, "is free"), wait_seconds=0.05)
        self.keeper = ModelKeeper(self.found, self, lambda: self, self.placement)

    async def ask_for(self) -> None:
        """Have a request wait, until the model serves or it is told why not."""
        num_refused = len(self.refusals)
        self.is_asked_for = True
        self.keeper.wake()
        await self.until(lambda: self.serving_version is not None or len(self.refusals) > num_refused)
        self.is_asked_for = False
        self.keeper.wake()

    @property
    def serving_version(self) -> str | None:
        """The version that answers; None while none does or it sleeps."""
        route = self.routes[-1]
        return None if route is None or route.default.is_asleep or not route.default.engine.is_ready else route.default.label

    def reckon(self, bundle: Any, file: ModelFile) -> int:
        return 60

    def sleeping(self, opened: Opened, file: ModelFile, label: str, device: str) -> LoadedModel[Any]:
        if file == self.misfit:
            raise ConfigError("max_slots_per_request: 4 is above max_slots")
        settings: Any = None
        return LoadedModel(opened.bundle, opened.tokenizers, opened.frames, SleepingEngine(MODEL, settings, 1, device), label)

    def slept(self, model: str, why: str) -> None:
        self.sleeps.append(why)

    def woken(self, model: str, outcome: str) -> None:
        self.wakes.append(outcome)

    async def publish(self, name: str, route: Any) -> None:
        for label in ["published"] if route is None else [*route.versions]:
            await self.reach("publish", label)
        self.routes.append(route)

    def holding(self, model: LoadedModel[Any]) -> Holding:
        self.num_looks += 1
        return super().holding(model)

    def is_awaited(self, name: str) -> bool:
        return self.is_asked_for

    def refuse_waiting(self, name: str, reason: str, retry_after_seconds: float) -> None:
        self.refusals.append((reason, retry_after_seconds))


def shown(stage: SleepyStage) -> set[tuple[str, str]]:
    return {(one.version, one.state) for one in stage.keeper.readings()}


def test_nothing_is_loaded_at_the_start_and_the_model_is_described_as_ready() -> None:
    stage = SleepyStage("1", "2")

    async def scene() -> None:
        [route] = {id(route): route for route in stage.routes}.values()
        assert route is not None and route.default.is_asleep and route.default.engine.is_ready
        assert route.default.label == "2" and stage.steps("2") == ["open"]
        assert stage.running() == [] and shown(stage) == {("2", "asleep")}

    play(stage, scene)


def test_it_is_loaded_and_proved_when_it_is_awaited_and_put_to_sleep_when_it_is_asked() -> None:
    stage = SleepyStage("1")

    async def scene() -> None:
        await stage.ask_for()
        assert (stage.serving_version, stage.running(), stage.wakes) == ("1", ["1"], ["loaded"])
        assert [step for step in stage.steps("1") if step in ("open", "start", "prove")] == ["open", "start", "prove"]
        await stage.settle()
        assert shown(stage) == {("1", "serving")} and stage.swaps == []
        stage.keeper.give_way()
        await stage.until(lambda: not stage.running())
        assert stage.serving_version is None and stage.sleeps == ["memory"]
        await stage.ask_for()
        assert stage.serving_version == "1" and stage.steps("1").count("prove") == 2, "it is proved each time"
        assert stage.steps("1").count("open") == 1

    play(stage, scene)


def test_whose_turn_is_next_finds_one_that_is_loaded_and_that_nobody_has_been_told_of_yet() -> None:
    """Its memory is taken, and will be free again: whoever needs it has to wait, and must not be told that there is none."""
    stage = SleepyStage("1")

    async def look_in_turn() -> Stay | None:
        async with stage.turn:
            return stage.keeper.stay()

    async def scene() -> None:
        assert await look_in_turn() is None
        gate = stage.hold("adopt", "1")
        asking = asyncio.create_task(stage.ask_for())
        await stage.until(lambda: stage.running() == ["1"] and stage.turn.locked())
        looking = asyncio.create_task(look_in_turn())
        await asyncio.sleep(0)
        gate.set()
        stay = await looking
        assert stay is not None and stay.is_busy
        await asking
        await stage.settle()
        stay = await look_in_turn()
        assert stay is not None and not stay.is_busy

    play(stage, scene)


def test_it_falls_asleep_by_itself_when_nobody_has_come_for_its_time() -> None:
    stage = SleepyStage("1", file=ModelFile(settings=ModelSettings(keep_loaded="20ms")))

    async def scene() -> None:
        await stage.ask_for()
        await stage.until(lambda: stage.sleeps == ["idle"] and not stage.running())
        assert shown(stage) >= {("1", "asleep")}

    play(stage, scene)


def test_requests_that_hold_it_finish_before_its_engine_ends_and_new_ones_find_it_asleep() -> None:
    stage = SleepyStage("1")

    async def scene() -> None:
        await stage.ask_for()
        await stage.settle()
        route = stage.routes[-1]
        assert route is not None
        route.default.use.take()
        stage.keeper.give_way()
        await stage.until(lambda: stage.sleeps)
        assert stage.serving_version is None and stage.running() == ["1"] and stage.keeper.is_leaving
        assert stage.keeper.memory_bytes() == 60, "until it has ended"
        route.default.use.leave(1.0, None)
        await stage.until(lambda: not stage.running())
        await stage.until(lambda: not stage.keeper.is_leaving)
        assert stage.keeper.memory_bytes() == 0

    play(stage, scene)


def test_it_is_not_loaded_when_nobody_waits_any_more_at_its_turn() -> None:
    stage = SleepyStage("1")

    async def scene() -> None:
        async with stage.turn:
            stage.is_asked_for = True
            stage.keeper.wake()
            await stage.until(lambda: stage.keeper._loading is not None)
            stage.is_asked_for = False
        await stage.settle()
        assert stage.state("1") is State.ASLEEP and stage.steps("1") == ["open"] and stage.wakes == []

    play(stage, scene)


def test_a_lack_of_memory_is_told_to_who_waits_and_tried_again_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "MIN_RETRY_SECONDS", 0.05)
    stage = SleepyStage("1")

    async def scene() -> None:
        stage.free_bytes = 0
        await stage.ask_for()
        reason, seconds = stage.refusals[0]
        assert reason == "there is no memory for it now" and 0 < seconds <= 0.05
        told = "the model cannot be woken: it may take 0 MiB, and 0 MiB is free"
        assert status_of(stage.keeper).problems == (told,), "how much is for operators"
        assert stage.state("1") is State.ASLEEP and stage.wakes == ["failed"]
        await stage.ask_for()
        assert stage.refusals[-1][0] == reason and stage.wakes == ["failed"], "told at once, and not tried"
        stage.free_bytes = 100
        await asyncio.sleep(0.05)
        await stage.ask_for()
        assert stage.serving_version == "1" and status_of(stage.keeper).problems == ()

    play(stage, scene)


def test_one_that_has_been_up_and_cannot_be_started_now_may_be_later() -> None:
    stage = SleepyStage("1")

    async def scene() -> None:
        await stage.ask_for()
        await stage.settle()
        stage.keeper.give_way()
        await stage.until(lambda: not stage.running())
        stage.fail("start", "1", EngineCannotStart("no room for a process"))
        await stage.ask_for()
        assert stage.refusals[-1][0] == "its engine cannot be started now" and stage.state("1") is State.ASLEEP
        assert status_of(stage.keeper).problems == ("the model cannot be woken: no room for a process",)
        assert stage.wakes == ["loaded", "failed"]

    play(stage, scene)


def test_a_version_that_does_not_prove_makes_way_for_the_next_while_the_caller_waits() -> None:
    stage = SleepyStage("1", "2")
    stage.fail("prove", "2", Refused(Cause.PROOF, "another answer"))

    async def scene() -> None:
        await stage.ask_for()
        assert (stage.serving_version, stage.running(), stage.state("2")) == ("1", ["1"], State.REFUSED)
        assert stage.wakes == ["refused", "loaded"]

    play(stage, scene)


def test_a_model_of_which_nothing_can_be_woken_is_not_ready() -> None:
    stage = SleepyStage("1")
    stage.fail("prove", "1", Refused(Cause.PROOF, "another answer"))

    async def scene() -> None:
        stage.is_asked_for = True
        stage.keeper.wake()
        await stage.until(lambda: stage.routes[-1] is not None and not stage.routes[-1].default.is_asleep)
        route = stage.routes[-1]
        assert route is not None and not route.default.engine.is_ready
        assert stage.version("1").reason == "another answer" and stage.wakes == ["refused"]

    play(stage, scene)


def test_a_new_version_of_a_sleeping_model_is_opened_and_proved_when_it_wakes() -> None:
    stage = SleepyStage("1")

    async def scene() -> None:
        stage.put("2")
        await stage.settle()
        route = stage.routes[-1]
        assert route is not None and route.default.label == "2" and route.default.is_asleep
        assert stage.steps("2")[0] == "open" and "start" not in stage.steps("2")
        await stage.until(lambda: shown(stage) == {("2", "asleep")})
        await stage.ask_for()
        assert stage.serving_version == "2" and "start" not in stage.steps("1")

    play(stage, scene)


def test_a_new_version_of_a_sleeping_model_of_which_the_files_are_gone_meanwhile_is_refused() -> None:
    stage = SleepyStage("1")
    stage.fail("adopt", "2", BundleError("bundle.json: No such file or directory"))

    async def scene() -> None:
        stage.put("2")
        await stage.settle()
        assert stage.state("2") is State.REFUSED and "No such file" in stage.version("2").reason
        await stage.ask_for()
        assert stage.serving == "1"

    play(stage, scene)


def test_a_new_version_of_a_model_that_is_awake_takes_its_place_as_always() -> None:
    stage = SleepyStage("1")

    async def scene() -> None:
        await stage.ask_for()
        stage.put("2")
        await stage.settle()
        assert stage.serving_version == "2" and stage.state("2") is State.TRIAL and stage.state("1") is State.STANDBY
        stay = stage.keeper.stay()
        assert stay is not None and stay.is_busy, "not while it is on probation"

    play(stage, scene)


def test_all_versions_of_a_model_sleep_and_wake_together_with_their_labels_and_shares() -> None:
    file = ModelFile(versions=Versions(latest=2), labels={"old": "1"}, weights={"1": 0.25}, settings=HOUR)
    stage = SleepyStage("1", "2", file=file)

    async def scene() -> None:
        asleep = stage.routes[-1]
        await stage.ask_for()
        awake = stage.routes[-1]
        assert asleep is not None and awake is not None
        assert sorted(stage.running()) == ["1", "2"] == sorted(awake.versions)
        assert (asleep.shares, asleep.labels) == (awake.shares, awake.labels) == ({"1": 0.25, "2": 0.75}, {"old": "1"})

    play(stage, scene)


def test_a_sleeping_model_goes_when_its_folder_does() -> None:
    stage = SleepyStage("1")

    async def scene() -> None:
        stage.keeper.lose()
        await stage.until(lambda: stage.keeper.is_gone)
        assert stage.routes[-1] is None and stage.wakes == []

    play(stage, scene)


def test_one_that_is_to_be_always_loaded_from_now_on_wakes_by_itself() -> None:
    stage = SleepyStage("1")

    async def scene() -> None:
        stage.file = ModelFile(settings=ModelSettings(keep_loaded="always"))
        stage.look()
        await stage.until(lambda: stage.serving_version == "1")
        assert stage.keeper.stay() is None, "it gives way to nobody"

    play(stage, scene)


def test_the_time_since_the_last_request_counts_from_its_end() -> None:
    stage = SleepyStage("1", file=ModelFile(settings=ModelSettings(keep_loaded="40ms")))

    async def scene() -> None:
        await stage.ask_for()
        route = stage.routes[-1]
        assert route is not None
        route.default.use.take()
        await asyncio.sleep(0.1)
        assert stage.sleeps == []
        route.default.use.leave(0.1, None)
        left = time.monotonic()
        await stage.until(lambda: stage.sleeps)
        assert time.monotonic() - left >= 0.04

    play(stage, scene)


def test_one_that_its_file_would_not_let_wake_stays_awake_until_the_file_is_good() -> None:
    stage = SleepyStage("1")
    unfit = ModelFile(settings=ModelSettings(keep_loaded="20ms", max_slots=1))

    async def scene() -> None:
        stage.misfit = unfit
        await stage.ask_for()
        stage.file = unfit
        await stage.settle()
        await asyncio.sleep(0.1)
        assert (shown(stage), stage.serving_version, stage.sleeps) == ({("1", "serving")}, "1", [])
        stage.file = ModelFile(settings=ModelSettings(keep_loaded="20ms"))
        stage.look()
        await stage.until(lambda: stage.sleeps == ["idle"] and not stage.running())

    play(stage, scene)


def test_nobody_looks_again_and_again_while_a_version_loads() -> None:
    stage = SleepyStage("1", file=ModelFile(settings=ModelSettings(keep_loaded="20ms")))

    async def scene() -> None:
        await stage.ask_for()
        gate = stage.hold("start", "2")
        stage.put("2")
        stage.look()
        await stage.until(lambda: "start" in stage.steps("2"))
        await asyncio.sleep(0.05)
        num_looks = stage.num_looks
        await asyncio.sleep(0.1)
        assert stage.num_looks == num_looks
        gate.set()
        await stage.settle()

    play(stage, scene)


def test_nobody_looks_again_and_again_while_one_that_is_awake_is_awaited() -> None:
    stage = SleepyStage("1", file=ModelFile(settings=ModelSettings(keep_loaded="20ms")))

    async def scene() -> None:
        await stage.ask_for()
        stage.is_asked_for = True
        await asyncio.sleep(0.05)
        num_looks = stage.num_looks
        await asyncio.sleep(0.1)
        assert stage.num_looks <= num_looks + 1 and stage.serving_version == "1"
        stage.is_asked_for = False
        stage.keeper.wake()
        await stage.until(lambda: not stage.running())

    play(stage, scene)
