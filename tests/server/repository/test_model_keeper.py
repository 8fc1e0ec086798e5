"""The life of a model's versions, on a stage that fails where it is told to: those that serve go on, whatever others do."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import structlog.testing

from dragoman.export.bundle import BundleError
from dragoman.server.config import ConfigError
from dragoman.server.errors import NotReady, UnknownVersion
from dragoman.server.repository import loader, model_keeper, switch, trial
from dragoman.server.repository.model_file import ModelFile, ModelSettings, Swap, Versions
from dragoman.server.repository.models import CannotServe
from dragoman.server.repository.policy import Overrides
from dragoman.server.repository.use import Outcomes
from dragoman.server.repository.versions import Cause, Refused, State
from dragoman.server.supervisor import EngineCannotStart
from tests.server.repository.staged import MODEL, Stage, play

RESTART = ModelFile(swap=Swap(mode="restart"))
AT_ONCE = ModelFile(swap=Swap(probation_seconds=0))
TWO = Versions(latest=2)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_keeper, "WATCH_SECONDS", 0.002)
    monkeypatch.setattr(loader, "LOOK_SECONDS", 0.001)


def reason_of(stage: Stage, label: str) -> tuple[Cause | None, str]:
    version = stage.version(label)
    assert version.state is State.REFUSED
    return version.cause, version.reason


def shown(stage: Stage) -> set[tuple[str, str, str]]:
    """What metrics show."""
    return {(one.version, one.state, one.cause) for one in stage.keeper.readings()}


# The start.


def test_the_newest_serves_and_requests_are_told_to_come_back_before_that() -> None:
    stage = Stage("1", "2")

    async def scene() -> None:
        first, last = stage.routes
        assert first is not None and first.default.label == "2" and not first.default.engine.is_ready
        assert last is not None and last.default.engine is stage.engine("2")
        assert stage.steps("2") == ["open", "start", "prove", "adopt", "publish", "published", "stop"], (
            "what stood in for it has ended"
        )
        assert stage.running() == ["2"] and stage.steps("1") == []
        assert shown(stage) == {("2", "serving", "")} and stage.swaps == []

    play(stage, scene)


@pytest.mark.parametrize(
    ("step", "error"),
    [
        ("open", Refused(Cause.BUNDLE, "damaged")),
        ("start", EngineCannotStart("out of memory")),
        ("prove", Refused(Cause.PROOF, "another answer")),
    ],
)
def test_what_cannot_be_served_at_the_start_makes_way_for_the_next(step: str, error: Exception) -> None:
    stage = Stage("1", "2")
    stage.fail(step, "2", error)

    async def scene() -> None:
        assert (stage.serving, stage.running(), stage.state("2")) == ("1", ["1"], State.REFUSED)

    play(stage, scene)


def test_a_model_of_which_nothing_can_be_served_ends_the_start() -> None:
    stage = Stage("1", "2")
    for label in ("1", "2"):
        stage.fail("start", label, EngineCannotStart(f"model 'en-de': no room for {label}"))

    async def run() -> None:
        stage.keeper.open_first()
        stage.keeper.hold_first()
        with pytest.raises(EngineCannotStart, match="model 'en-de': no room for 2"):
            await stage.keeper.start()
        await stage.keeper.stop()
        assert not stage.running()

    asyncio.run(run())


@pytest.mark.parametrize(("cause", "kind"), [(Cause.BUNDLE, BundleError), (Cause.SETTINGS, ConfigError)])
def test_a_model_of_which_nothing_can_be_opened_is_no_start_either(cause: Cause, kind: type[Exception]) -> None:
    stage = Stage("1", "2")
    stage.fail("open", "2", Refused(cause, "the newest is damaged"))
    stage.fail("open", "1", Refused(Cause.BUNDLE, "the other one, too"))
    with pytest.raises(kind, match="the newest is damaged"):
        stage.keeper.open_first()


def persistent(stage: Stage, scene: Callable[[], Awaitable[None]]) -> None:
    """Lead a stage of which the start is tried again and again, as for a model that nobody waits for."""

    async def run() -> None:
        stage.keeper.open_first()
        stage.keeper.hold_first()
        stage.routes.append(stage.keeper.route)
        tasks = [asyncio.create_task(stage.keeper.start(is_persistent=True)), asyncio.create_task(stage.keeper.run())]
        try:
            await scene()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await stage.keeper.stop()
        assert not stage.running()

    asyncio.run(run())


def test_what_is_tried_again_and_again_serves_once_it_can() -> None:
    stage = Stage("1")
    stage.fail("start", "1", EngineCannotStart("not now"))

    async def scene() -> None:
        await stage.until(lambda: "start" in stage.steps("1"))
        stage.look()
        await asyncio.sleep(0.01)
        assert len(stage.routes) == 1, "an engine that has not been proved is nobody's"
        stage.engine("1").is_ready = True
        await stage.until(lambda: stage.serving == "1")
        assert stage.steps("1")[:5] == ["open", "start", "prove", "adopt", "publish"]

    persistent(stage, scene)


def test_what_is_tried_again_and_again_is_given_up_when_another_serves() -> None:
    stage = Stage("1")
    stage.fail("start", "1", EngineCannotStart("never"))

    async def scene() -> None:
        await stage.until(lambda: "start" in stage.steps("1"))
        stage.put("2")
        stage.look()
        await stage.until(lambda: stage.serving == "2" and stage.state("1") is State.REFUSED)
        assert stage.steps("1")[-1] == "stop"

    persistent(stage, scene)


def test_what_is_tried_again_and_again_is_given_up_when_its_folder_is_gone() -> None:
    stage = Stage("1")
    stage.fail("start", "1", EngineCannotStart("never"))

    async def scene() -> None:
        await stage.until(lambda: "start" in stage.steps("1"))
        stage.keeper.lose()
        await stage.until(lambda: stage.keeper.is_gone)
        assert stage.routes[-1] is None

    persistent(stage, scene)


# A swap.


def test_a_new_version_is_proved_before_it_answers_and_the_old_one_ends_after_the_probation() -> None:
    stage = Stage("1", file=ModelFile(swap=Swap(probation_seconds=0.01)))

    async def scene() -> None:
        stage.told.clear()
        stage.put("2")
        await stage.settle()
        steps = stage.told[: stage.told.index(("published", "2"))]
        assert steps == [
            ("open", "2"),
            ("measure", "1"),
            ("memory", "2"),
            ("start", "2"),
            ("prove", "2"),
            ("adopt", "2"),
            ("publish", "2"),
        ]
        await stage.until(lambda: stage.swaps == ["done"])
        await stage.until(lambda: stage.state("1") is None)
        assert (stage.serving, stage.running(), stage.state("2")) == ("2", ["2"], State.SERVING)
        assert stage.freed[-1] == range(0, 1) and stage.version("2").replicas == range(1, 2)

    play(stage, scene)


def test_on_probation_both_run_and_are_told_apart() -> None:
    stage = Stage("1")

    async def scene() -> None:
        stage.put("2")
        await stage.settle()
        assert sorted(stage.running()) == ["1", "2"]
        assert shown(stage) == {("1", "standby", ""), ("2", "trial", "")}
        assert stage.swaps == [], "how it ends is not known yet"

    play(stage, scene)


def test_without_probation_the_old_one_ends_at_once_but_not_under_a_request() -> None:
    stage = Stage("1", file=AT_ONCE)

    async def scene() -> None:
        held = stage.version("1").loaded
        held.use.take()
        stage.put("2")
        await stage.settle()
        assert (stage.serving, stage.swaps, stage.state("1")) == ("2", ["done"], State.RETIRING)
        assert sorted(stage.running()) == ["1", "2"]
        held.use.leave(1.0, None)
        await stage.until(lambda: stage.running() == ["2"])
        assert stage.state("1") is None

    play(stage, scene)


def test_forwards_and_back_many_times_leaves_nothing_behind() -> None:
    stage = Stage("1", file=AT_ONCE)

    async def scene() -> None:
        for _ in range(5):
            stage.put("2")
            await stage.settle()
            assert stage.serving == "2"
            stage.remove("2")
            await stage.settle()
            assert stage.serving == "1"
        await stage.until(lambda: stage.running() == ["1"])
        assert [one.label for one in stage.keeper.versions] == ["1"]
        assert {number for freed in stage.freed for number in freed} <= {0, 1}, "metrics' numbers are used again"

    play(stage, scene)


BAD = [
    ("open", Refused(Cause.BUNDLE, "decoder.weights: another checksum"), Cause.BUNDLE),
    ("open", Refused(Cause.SETTINGS, "max_slots"), Cause.SETTINGS),
    ("memory", Refused(Cause.MEMORY, "900 MiB"), Cause.MEMORY),
    ("start", EngineCannotStart("model 'en-de': the engine cannot start: no graph"), Cause.START),
    ("start", OSError("no room for a process"), Cause.START),
    ("prove", Refused(Cause.PROOF, "sample 1: another answer"), Cause.PROOF),
    ("adopt", OSError("no room for a socket"), Cause.START),
    ("publish", CannotServe("front end 1: its bundle is another"), Cause.FRONT_END),
]


def test_of_a_version_that_has_ended_nothing_is_kept() -> None:
    """Tokenisers of large vocabularies take a hundred megabytes, and what is refused stays known until its files change."""
    stage = Stage("1")
    stage.fail("prove", "3", Refused(Cause.PROOF, "another answer"))

    async def scene() -> None:
        one = stage.version("1")
        for name in ("2", "3"):
            stage.put(name)
            await stage.settle()
        three = stage.version("3")
        await stage.until(lambda: one.opened is None)
        assert three.state is State.REFUSED and (three.opened, three.loaded, one.loaded) == (None, None, None)
        assert three.content and stage.version("2").opened is not None

    stage.file = AT_ONCE
    play(stage, scene)


@pytest.mark.parametrize(("step", "error", "cause"), BAD, ids=[f"{step}-{cause}" for step, _, cause in BAD])
@pytest.mark.parametrize("file", [ModelFile(), AT_ONCE], ids=["probation", "none"])
def test_a_bad_version_is_refused_and_the_old_one_serves(step: str, error: Exception, cause: Cause, file: ModelFile) -> None:
    stage = Stage("1", file=file)
    stage.fail(step, "2", error)

    async def scene() -> None:
        old = stage.engine("1")
        stage.put("2")
        await stage.settle()
        assert stage.serving == "1" and stage.routes[-1].default.engine is old  # type: ignore[union-attr]
        assert reason_of(stage, "2")[0] is cause
        assert str(getattr(error, "reason", error)).removeprefix("model 'en-de': ") in reason_of(stage, "2")[1]
        assert stage.keeper.troubles() == [f"version 2 is refused ({cause.value}): {reason_of(stage, '2')[1]}"]
        await stage.until(lambda: stage.running() == ["1"])
        assert shown(stage) == {("1", "serving", ""), ("2", "refused", cause.value)}
        assert stage.swaps == ["refused"]
        opened = stage.steps("2").count("open")
        await stage.settle()
        stage.keeper.wake()
        await stage.settle()
        assert stage.steps("2").count("open") == opened, "it is not tried again while it is as it was"

    play(stage, scene)


def test_an_engine_that_hangs_is_given_up_in_time() -> None:
    stage = Stage("1")
    stage.load_seconds = 0.02
    stage.hold("start", "2")

    async def scene() -> None:
        stage.put("2")
        await stage.settle()
        assert reason_of(stage, "2") == (Cause.START, "it is not ready after 0.02 s (load_timeout_seconds)")
        assert stage.steps("2")[-1] == "stop" and stage.serving == "1"

    play(stage, scene)


def test_a_refused_version_is_tried_again_once_its_files_are_others() -> None:
    stage = Stage("1", file=AT_ONCE)
    stage.fail("prove", "2", Refused(Cause.PROOF, "another answer"))

    async def scene() -> None:
        stage.put("2")
        await stage.settle()
        assert stage.serving == "1"
        del stage.faults["prove", "2"]
        stage.put("2")
        await stage.settle()
        assert stage.serving == "2"
        assert {(version, state) for version, state, _ in shown(stage)} >= {("2", "serving")}
        assert not any(state == "refused" for _, state, _ in shown(stage)), "what it was before is forgotten"

    play(stage, scene)


@pytest.mark.parametrize(
    ("cause", "file", "is_tried"),
    [
        (Cause.MEMORY, RESTART, True),
        (Cause.SETTINGS, ModelFile(settings=ModelSettings(max_slots=8)), True),
        (Cause.PROOF, RESTART, False),
        (Cause.MEMORY, ModelFile(labels={"stable": "1"}), False),
    ],
)
def test_a_version_that_was_refused_for_its_settings_is_tried_again_with_others(
    cause: Cause, file: ModelFile, is_tried: bool
) -> None:
    stage = Stage("1")
    stage.fail("memory", "2", Refused(cause, "too large"))

    async def scene() -> None:
        stage.put("2")
        await stage.settle()
        assert stage.state("2") is State.REFUSED
        del stage.faults["memory", "2"]
        stage.file = file
        await stage.settle()
        assert stage.serving == ("2" if is_tried else "1")

    play(stage, scene)


def test_a_refused_version_is_tried_again_when_it_is_forgiven() -> None:
    stage = Stage("1", file=AT_ONCE)
    stage.fail("memory", "2", Refused(Cause.MEMORY, "too large"))

    async def scene() -> None:
        stage.put("2")
        await stage.settle()
        del stage.faults["memory", "2"]
        stage.keeper.forgive()
        await stage.settle()
        assert stage.serving == "2"

    play(stage, scene)


def test_a_version_that_comes_while_another_loads_waits_for_it() -> None:
    stage = Stage("1", file=AT_ONCE)
    gate = stage.hold("start", "2")

    async def scene() -> None:
        stage.put("2")
        stage.look()
        await stage.until(lambda: "start" in stage.steps("2"))
        stage.put("3")
        stage.look()
        await asyncio.sleep(0.01)
        assert stage.steps("3") == [] and stage.serving == "1"
        gate.set()
        await stage.settle()
        await stage.until(lambda: stage.running() == ["3"])
        assert [route.default.label for route in stage.routes[1:] if route is not None] == ["1", "3"], "nobody got version 2"

    play(stage, scene)


def test_a_version_that_is_removed_while_it_loads_is_not_served() -> None:
    stage = Stage("1", file=AT_ONCE)
    gate = stage.hold("start", "2")

    async def scene() -> None:
        stage.put("2")
        stage.look()
        await stage.until(lambda: "start" in stage.steps("2"))
        stage.remove("2")
        stage.look()
        gate.set()
        await stage.settle()
        await stage.until(lambda: stage.running() == ["1"])
        assert stage.serving == "1" and stage.state("2") is None

    play(stage, scene)


# Probation.


def on_probation(stage: Stage, scene: Callable[[], Awaitable[None]]) -> None:
    async def run() -> None:
        stage.put("2")
        await stage.settle()
        assert (stage.serving, stage.state("2")) == ("2", State.TRIAL)
        await scene()

    play(stage, run)


async def until_back(stage: Stage, cause: Cause) -> str:
    """Wait until the first version serves alone; return why."""
    await stage.until(lambda: stage.serving == "1" and stage.running() == ["1"])
    stage.keeper.wake()
    await stage.settle()
    assert (stage.serving, stage.swaps) == ("1", ["rolled_back"])
    assert shown(stage) == {("1", "serving", ""), ("2", "refused", cause.value)}
    is_cause, reason = reason_of(stage, "2")
    assert is_cause is cause
    return reason


def test_an_engine_that_dies_on_probation_brings_the_old_one_back() -> None:
    stage = Stage("1")

    async def scene() -> None:
        stage.engine("2").die()
        assert "its engine ended within 0." in await until_back(stage, Cause.DEATH)

    with structlog.testing.capture_logs() as lines:
        on_probation(stage, scene)
    served = [(line["default"], line["on_trial"]) for line in lines if line["event"] == "versions that serve"]
    assert served[-2:] == [("2", True), ("1", False)], "the log says who answers again"


def test_errors_on_probation_bring_the_old_one_back() -> None:
    stage = Stage("1")

    async def scene() -> None:
        stage.outcomes_of["2"] = Outcomes(27, 3, 1.0)
        assert await until_back(stage, Cause.ERRORS) == "3 of 30 requests failed, 10.0%; max_error_rate is 0.05"

    on_probation(stage, scene)


def test_slow_answers_on_probation_bring_the_old_one_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(trial, "JUDGED_SECONDS", 0.0)
    stage = Stage("1")
    stage.outcomes_of["1"] = Outcomes(1000, 0, 100.0)

    async def scene() -> None:
        stage.outcomes_of["2"] = Outcomes(100, 0, 31.0)
        reason = await until_back(stage, Cause.LATENCY)
        assert reason == "its answers take 310 ms in the mean, those of the version before 100 ms; max_latency_factor is 3"

    on_probation(stage, scene)


def test_what_a_failed_version_still_has_it_finishes() -> None:
    stage = Stage("1")

    async def scene() -> None:
        held = stage.version("2").loaded
        held.use.take()
        stage.engine("2").die()
        await stage.until(lambda: stage.serving == "1")
        assert "stop" not in stage.steps("2")
        held.use.leave(1.0, None)
        await until_back(stage, Cause.DEATH)

    on_probation(stage, scene)


def test_a_version_is_in_use_until_it_has_ended_or_is_refused() -> None:
    stage = Stage("1", file=ModelFile(swap=Swap(probation_seconds=0.01)))
    used = {name: partial(stage.keeper.uses, Path("models") / MODEL / name) for name in "123"}

    async def scene() -> None:
        assert used["1"]() and not used["2"]()
        gate = stage.hold("start", "2")
        stage.put("2")
        stage.look()
        await stage.until(lambda: ("start", "2") in stage.told)
        assert used["1"]() and used["2"]()
        gate.set()
        await stage.until(lambda: stage.state("1") is None)
        assert not used["1"]() and used["2"]()
        stage.fail("prove", "3", Refused(Cause.PROOF, "no"))
        stage.put("3")
        await stage.settle()
        assert used["2"]() and not used["3"]()

    play(stage, scene)


def test_the_old_one_comes_back_although_its_files_are_gone() -> None:
    """In a flat folder the new version's files have taken the place of the old one's."""
    stage = Stage("")

    async def scene() -> None:
        stage.put("")
        await stage.settle()
        assert stage.serving == "000000000002"
        stage.engine("000000000002").die()
        await stage.until(lambda: stage.serving == "000000000001")
        await stage.until(lambda: stage.running() == ["000000000001"])
        await stage.settle()
        assert stage.serving == "000000000001"
        stage.put("")
        await stage.settle()
        assert stage.serving == "000000000003", "the next files are a version like any other"

    play(stage, scene)


def test_a_flat_bundle_that_cannot_be_opened_is_shown_although_nobody_knows_its_version() -> None:
    stage = Stage("")
    stage.fail("open", "", Refused(Cause.BUNDLE, "damaged"))

    async def run() -> None:
        fault = stage.faults.pop(("open", ""))
        async with stage.led():
            stage.faults["open", ""] = fault
            stage.put("")
            await stage.settle()
            assert shown(stage) == {("000000000001", "serving", ""), ("", "refused", "bundle")}

    asyncio.run(run())


def test_versions_on_probation_are_watched_while_another_loads() -> None:
    stage = Stage("1")
    gate = stage.hold("start", "3")

    async def scene() -> None:
        stage.put("3")
        stage.look()
        await stage.until(lambda: "start" in stage.steps("3"))
        stage.engine("2").die()
        await stage.until(lambda: stage.serving == "1")
        gate.set()
        await stage.until(lambda: stage.serving == "3")
        assert reason_of(stage, "2")[0] is Cause.DEATH

    on_probation(stage, scene)


def test_a_version_that_takes_the_place_of_one_on_probation_has_the_same_to_fall_back_on() -> None:
    stage = Stage("1")

    async def scene() -> None:
        stage.put("3")
        await stage.settle()
        await stage.until(lambda: stage.state("2") is None)
        assert (stage.serving, sorted(stage.running())) == ("3", ["1", "3"])
        stage.remove("2")
        stage.look()
        stage.engine("3").die()
        await stage.until(lambda: stage.serving == "1" and stage.running() == ["1"])

    on_probation(stage, scene)


def test_a_version_that_is_removed_on_probation_leaves_the_old_one_as_it_was() -> None:
    stage = Stage("1")

    async def scene() -> None:
        stage.remove("2")
        await stage.settle()
        assert (stage.serving, stage.state("1")) == ("1", State.SERVING), "it need not prove itself against itself"
        stage.engine("1").die()
        await stage.settle()
        await stage.until(lambda: stage.running() == ["1"])
        assert (stage.serving, stage.state("1")) == ("1", State.SERVING), "a version that serves is started again if it dies"

    on_probation(stage, scene)


def test_of_two_on_probation_only_the_one_that_fails_is_refused() -> None:
    stage = Stage("1", file=ModelFile(versions=TWO))

    async def scene() -> None:
        stage.remove("1")
        stage.put("2", "3")
        await stage.settle()
        assert (stage.state("2"), stage.state("3")) == (State.TRIAL, State.TRIAL)
        stage.engine("2").die()
        await stage.until(lambda: stage.state("2") is State.REFUSED)
        await stage.settle()
        assert (stage.serving, stage.state("3")) == ("3", State.TRIAL), "it begins its probation anew"
        assert sorted(set(stage.running())) == ["1", "3"] and stage.state("1") is State.STANDBY

    play(stage, scene)


def test_labels_and_shares_change_on_probation_and_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage("1")

    async def scene() -> None:
        began = stage.keeper._switch.trial.began  # type: ignore[union-attr]
        stage.file = ModelFile(labels={"stable": "1", "canary": "2"}, weights={"canary": 0.25})
        await stage.settle()
        route = stage.routes[-1]
        assert route is not None and route.shares == {"2": 0.25, "1": 0.75} and route.labels == {"stable": "1", "canary": "2"}
        assert stage.keeper._switch.trial.began == began  # type: ignore[union-attr]
        assert shown(stage) == {("1", "serving", ""), ("2", "trial", "")}
        stage.engine("2").die()
        await stage.until(lambda: stage.state("2") is State.REFUSED)
        await stage.settle()
        assert stage.serving == "1" and stage.routes[-1].shares == {"1": 1.0}  # type: ignore[union-attr]

    on_probation(stage, scene)


def test_an_engine_that_dies_before_anybody_was_sent_there_is_never_served() -> None:
    stage = Stage("1", file=ModelFile(versions=TWO))
    gate = stage.hold("start", "2")

    async def scene() -> None:
        stage.remove("1")
        stage.put("2", "3")
        stage.look()
        await stage.until(lambda: stage.state("3") is State.STANDBY and "start" in stage.steps("2"))
        stage.engine("3").die()
        gate.set()
        await stage.settle()
        assert stage.serving == "2" and reason_of(stage, "3") == (Cause.DEATH, "its engine ended before it began to serve")
        assert "publish" not in stage.steps("3")

    play(stage, scene)


def test_an_engine_that_dies_and_comes_back_while_it_stands_by_is_no_reason_to_refuse_what_has_served() -> None:
    stage = Stage("1", file=ModelFile(swap=Swap(probation_seconds=0.05)))

    async def scene() -> None:
        stage.put("2")
        await stage.settle()
        stage.engine("1").die()
        await stage.until(lambda: stage.state("2") is State.SERVING)
        await stage.until(lambda: stage.running() == ["2"])
        assert shown(stage) == {("2", "serving", "")} and stage.swaps == ["done"]
        stage.remove("2")
        await stage.settle()
        assert stage.serving == "1"

    play(stage, scene)


def test_an_engine_that_dies_while_it_is_published_is_taken_back() -> None:
    stage = Stage("1")
    gate = stage.hold("publish", "2")

    async def scene() -> None:
        stage.put("2")
        stage.look()
        await stage.until(lambda: "publish" in stage.steps("2"))
        stage.engine("2").die()
        gate.set()
        await until_back(stage, Cause.DEATH)

    play(stage, scene)


def test_a_version_that_cannot_be_published_leaves_the_one_on_probation_there() -> None:
    stage = Stage("1")
    stage.fail("publish", "3", CannotServe("front end 0 does not answer"))

    async def scene() -> None:
        stage.put("3")
        await stage.settle()
        await stage.until(lambda: "stop" in stage.steps("3"))
        assert shown(stage) == {("1", "standby", ""), ("2", "trial", ""), ("3", "refused", "front_end")}
        stage.engine("2").die()
        await stage.until(lambda: stage.serving == "1" and stage.running() == ["1"])

    on_probation(stage, scene)


def test_who_cannot_be_told_of_a_label_is_not_told_without_a_pause() -> None:
    stage = Stage("1", file=AT_ONCE)

    async def scene() -> None:
        stage.fail("publish", "1", CannotServe("front end 0 does not answer"))
        stage.file = ModelFile(labels={"stable": "1"}, swap=Swap(probation_seconds=0))
        stage.look()
        await stage.until(lambda: stage.swaps)
        num_told = stage.steps("1").count("publish")
        await asyncio.sleep(0.05)
        assert stage.steps("1").count("publish") == num_told and stage.state("1") is State.SERVING
        del stage.faults["publish", "1"]
        stage.keeper.wake()
        await stage.settle()
        assert stage.routes[-1].labels == {"stable": "1"}  # type: ignore[union-attr]

    play(stage, scene)


@pytest.mark.parametrize("error", [CannotServe("front end 0 does not answer"), RuntimeError("nobody foresaw it")])
def test_front_ends_that_could_not_be_told_who_is_back_are_told_again(error: Exception) -> None:
    stage = Stage("1")

    async def scene() -> None:
        stage.fail("publish", "1", error)
        stage.engine("2").die()
        await stage.until(lambda: stage.steps("1").count("publish") > 2)
        assert stage.serving == "2" and stage.state("2") is State.REFUSED
        del stage.faults["publish", "1"]
        stage.keeper.wake()
        await stage.until(lambda: stage.serving == "1" and stage.running() == ["1"])

    on_probation(stage, scene)


def test_what_nobody_foresaw_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(switch, "RETRY_SECONDS", 0.05)
    stage = Stage("1", file=AT_ONCE)

    async def scene() -> None:
        stage.fail("publish", "2", RuntimeError("nobody foresaw it"))
        stage.put("2")
        stage.look()
        await stage.until(lambda: stage.steps("2").count("publish") > 1)
        assert stage.serving == "1" and stage.running() == ["1", "2"]
        del stage.faults["publish", "2"]
        await stage.until(lambda: stage.serving == "2" and stage.running() == ["2"])
        assert stage.state("2") is State.SERVING

    play(stage, scene)


# A gap that is accepted.


def test_with_a_gap_the_old_one_has_ended_before_the_new_one_starts() -> None:
    stage = Stage("1", file=RESTART)

    async def scene() -> None:
        stage.told.clear()
        running_at_start: list[list[str]] = []
        gate = stage.hold("start", "2")
        stage.put("2")
        stage.look()
        await stage.until(lambda: "start" in stage.steps("2"))
        running_at_start.append(stage.running())
        assert stage.serving is None and stage.routes[-1] is not None, "requests are told to come back"
        gate.set()
        await stage.settle()
        assert (stage.serving, running_at_start) == ("2", [[]])
        assert stage.told.index(("measure", "1")) < stage.told.index(("stop", "1")) < stage.told.index(("memory", "2"))

    play(stage, scene)


def test_in_a_gap_and_before_the_start_requests_that_name_a_version_are_told_to_come_back_too() -> None:
    stage = Stage("1", file=RESTART)
    stage.keeper.open_first()
    stage.keeper.hold_first()

    def told_to_come_back(named: str) -> bool:
        assert stage.keeper.route is not None
        with pytest.raises(NotReady, match="'en-de' is not ready"):
            stage.keeper.route.find(named)
        return not stage.keeper.route.find("").engine.is_ready

    assert told_to_come_back("stable")
    stage = Stage("1", file=RESTART)

    async def scene() -> None:
        gate = stage.hold("start", "2")
        stage.put("2")
        stage.look()
        await stage.until(lambda: "start" in stage.steps("2"))
        assert told_to_come_back("1") and told_to_come_back("stable")
        gate.set()
        await stage.settle()
        with pytest.raises(UnknownVersion):
            stage.keeper.route.find("stable")  # type: ignore[union-attr]

    play(stage, scene)


def test_with_a_gap_requests_that_run_are_waited_for() -> None:
    stage = Stage("1", file=RESTART)

    async def scene() -> None:
        held = stage.version("1").loaded
        held.use.take()
        stage.put("2")
        stage.look()
        await stage.until(lambda: stage.serving is None)
        assert stage.running() == ["1"] and "start" not in stage.steps("2")
        held.use.leave(1.0, None)
        await stage.settle()
        assert stage.serving == "2"

    play(stage, scene)


def test_with_a_gap_requests_that_run_hold_up_no_other_model() -> None:
    stage = Stage("1", file=RESTART)

    async def scene() -> None:
        held = stage.version("1").loaded
        held.use.take()
        stage.put("2")
        stage.look()
        await stage.until(lambda: stage.serving is None)
        async with asyncio.timeout(1), stage.turn:
            held.use.leave(1.0, None)
        await stage.settle()
        assert stage.serving == "2"

    play(stage, scene)


@pytest.mark.parametrize("step", ["memory", "start", "prove"])
def test_with_a_gap_the_old_one_is_loaded_again_if_the_new_one_is_bad(step: str) -> None:
    stage = Stage("1", file=RESTART)
    stage.fail(step, "2", Refused(Cause.MEMORY, "too large"))

    async def scene() -> None:
        stage.put("2")
        await stage.settle()
        assert (stage.serving, stage.running(), stage.state("2")) == ("1", ["1"], State.REFUSED)

    play(stage, scene)


@pytest.mark.parametrize(
    ("step", "error"),
    [("open", Refused(Cause.BUNDLE, "damaged")), ("adopt", BundleError("its files are gone"))],
    ids=["open", "adopt"],
)
def test_what_cannot_even_be_opened_makes_no_gap(step: str, error: Exception) -> None:
    stage = Stage("1", file=RESTART)
    stage.fail(step, "2", error)

    async def scene() -> None:
        stage.put("2")
        await stage.settle()
        assert [one.label for one in stage.keeper.versions if one.loaded is not None] == ["1"]
        assert stage.serving == "1" and "stop" not in stage.steps("1")[stage.steps("1").index("published") + 2 :]
        assert all(route is None or route.default.label == "1" for route in stage.routes)

    play(stage, scene)


# The end.


def test_a_model_whose_folder_is_gone_ends_when_no_request_holds_it() -> None:
    stage = Stage("1")

    async def scene() -> None:
        held = stage.version("1").loaded
        held.use.take()
        stage.keeper.lose()
        await stage.keeper.settled()
        assert stage.routes[-1] is None and stage.running() == ["1"] and not stage.keeper.is_gone
        held.use.leave(1.0, None)
        await stage.until(lambda: stage.keeper.is_gone)
        await stage.keeper.settled()
        assert stage.running() == []
        await stage.until(lambda: stage.told[-1] == ("gone", ""))

    play(stage, scene)


def test_who_waits_for_what_is_gone_does_not_wait_for_ever() -> None:
    stage = Stage("1")

    async def scene() -> None:
        stage.keeper.lose()
        await stage.until(lambda: stage.keeper.is_gone and not stage.running())
        await asyncio.sleep(0)
        stage.keeper.forgive()
        async with asyncio.timeout(1):
            await stage.keeper.settled()

    play(stage, scene)


def test_a_folder_that_is_back_before_anything_was_done_changes_nothing() -> None:
    stage = Stage("1")

    async def scene() -> None:
        num_told = len(stage.told)
        stage.keeper.lose()
        stage.look()
        await stage.keeper.settled()
        assert stage.serving == "1" and len(stage.told) == num_told

    play(stage, scene)


def test_a_folder_that_is_back_while_its_requests_finish_is_served_again() -> None:
    stage = Stage("1")

    async def scene() -> None:
        old = stage.version("1").loaded
        old.use.take()
        stage.keeper.lose()
        await stage.keeper.settled()
        await stage.settle()
        assert stage.serving == "1" and stage.version("1").loaded is not old
        assert stage.running() == ["1", "1"], "the old one has a request"
        old.use.leave(1.0, None)
        await stage.until(lambda: stage.running() == ["1"])

    play(stage, scene)


def test_a_folder_that_is_gone_while_its_first_version_loads_ends_that_too() -> None:
    stage = Stage("1")
    gate = stage.hold("start", "2")

    async def scene() -> None:
        stage.put("2")
        stage.look()
        await stage.until(lambda: "start" in stage.steps("2"))
        stage.remove("1", "2")
        stage.keeper.lose()
        await asyncio.sleep(0.005)
        assert not stage.keeper.is_gone
        gate.set()
        await stage.until(lambda: stage.keeper.is_gone and not stage.running())

    play(stage, scene)


@pytest.mark.parametrize("step", ["start", "prove", "adopt", "publish"])
def test_a_stop_in_the_middle_of_a_swap_leaves_nothing_running(step: str) -> None:
    stage = Stage("1")
    stage.hold(step, "2")

    async def scene() -> None:
        stage.put("2")
        stage.look()
        await stage.until(lambda: step in stage.steps("2"))

    play(stage, scene)


def test_a_stop_on_probation_or_while_a_request_runs_leaves_nothing_running() -> None:
    stage = Stage("1")

    async def scene() -> None:
        stage.version("1").loaded.use.take()
        stage.put("2")
        await stage.settle()
        stage.put("3")
        await stage.settle()

    play(stage, scene)


def test_what_nobody_foresaw_is_logged_and_life_goes_on(logged: Callable[[], list[dict[str, Any]]]) -> None:
    stage = Stage("1", file=AT_ONCE)

    async def scene() -> None:
        stage.fail("publish", "2", KeyError("desk"))
        stage.put("2")
        await stage.settle()
        del stage.faults["publish", "2"]
        stage.put("3")
        await stage.settle()
        assert stage.serving == "3"

    play(stage, scene)
    assert any(line["event"] == "the versions of a model cannot be led to where they are to be" for line in logged())


def test_the_log_says_why_which_version_is_refused(logged: Callable[[], list[dict[str, Any]]]) -> None:
    stage = Stage("1")
    stage.fail("prove", "2", Refused(Cause.PROOF, "sample 3: another answer"))

    async def scene() -> None:
        stage.put("2")
        await stage.settle()

    play(stage, scene)
    (line,) = [line for line in logged() if line["event"] == "a version is refused"]
    told = {key: line[key] for key in ("level", "model", "version", "cause", "reason")}
    assert told == {"level": "error", "model": MODEL, "version": "2", "cause": "proof", "reason": "sample 3: another answer"}


# What an operator asks for.


def test_a_rollback_loads_the_older_one_again_and_lasts_until_it_is_lifted() -> None:
    stage = Stage("1", "2", file=AT_ONCE)

    async def scene() -> None:
        stage.keeper.ask(Overrides(pinned="1"))
        await stage.settle()
        assert stage.serving == "1"
        stage.put("3")
        await stage.settle()
        assert stage.serving == "1" and stage.steps("3") == []
        stage.keeper.ask(Overrides())
        await stage.settle()
        await stage.until(lambda: stage.running() == ["3"])

    play(stage, scene)


def test_an_unloaded_model_is_gone_for_callers_and_comes_back() -> None:
    stage = Stage("1", file=AT_ONCE)

    async def scene() -> None:
        stage.keeper.ask(Overrides(is_unloaded=True))
        await stage.settle()
        assert stage.routes[-1] is None
        await stage.until(lambda: stage.running() == [])
        assert not stage.keeper.is_gone
        stage.keeper.ask(Overrides())
        await stage.settle()
        assert stage.serving == "1"

    play(stage, scene)


def test_what_is_wanted_and_cannot_be_had_is_told_once(logged: Callable[[], list[dict[str, Any]]]) -> None:
    stage = Stage("1", file=ModelFile(labels={"canary": "9"}))

    async def scene() -> None:
        await stage.settle()
        stage.keeper.wake()
        await stage.settle()
        assert stage.keeper.problems == ("labels.canary: there is no version '9'",)

    play(stage, scene)
    assert sum(line["event"] == "what is wanted of a model cannot be had" for line in logged()) == 1


def test_probation_needs_as_many_requests_as_say_something() -> None:
    assert trial.MIN_REQUESTS > 1
    stage = Stage("1")

    async def scene() -> None:
        stage.outcomes_of["2"] = Outcomes(0, trial.MIN_REQUESTS - 1, 0.0)
        stage.keeper.wake()
        await stage.settle()
        assert stage.state("2") is State.TRIAL
        stage.outcomes_of["2"] = Outcomes(0, trial.MIN_REQUESTS, 0.0)
        await until_back(stage, Cause.ERRORS)

    on_probation(stage, scene)
