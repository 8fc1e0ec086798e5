"""Rollouts of one model: the version that serves, the state of each, and what is told, whatever fails in between."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.export.bundle import BundleError
from dragoman.server.config import ConfigError
from dragoman.server.errors import NotReady, UnknownVersion
from dragoman.server.repository import switch, trial
from dragoman.server.repository.model_file import ModelFile, ModelSettings, Swap, Versions
from dragoman.server.repository.models import CannotServe
from dragoman.server.repository.policy import Overrides
from dragoman.server.repository.use import Outcomes
from dragoman.server.repository.versions import Cause, Refused, State
from dragoman.server.supervisor import EngineCannotStart
from tests.server.repository.staged import MODEL, Stage

RESTART = ModelFile(swap=Swap(mode="restart"))
AT_ONCE = ModelFile(swap=Swap(probation_seconds=0))
QUICK = ModelFile(swap=Swap(probation_seconds=0.02))
TWO = ModelFile(versions=Versions(latest=2))
DAMAGED, WRONG = Refused(Cause.BUNDLE, "damaged"), Refused(Cause.PROOF, "another answer")
SILENT = CannotServe("front end 0 does not answer")


@asynccontextmanager
async def on_probation(stage: Stage) -> AsyncIterator[Stage]:
    async with stage.led():
        await stage.deploy("2")
        assert (stage.serving, stage.running(), stage.swaps) == ("2", ["1", "2"], [])
        assert stage.shown == {"1": "standby", "2": "trial"}
        yield stage


async def until_back(stage: Stage, cause: Cause) -> str:
    """Wait until version 1 serves alone, and return the reason why version 2 was refused."""
    await stage.until(lambda: stage.serving == "1" and stage.running() == ["1"])
    stage.keeper.wake()
    await stage.settle()
    assert (stage.serving, stage.swaps) == ("1", ["rolled_back"])
    assert stage.shown == {"1": "serving", "2": f"refused {cause.value}"}
    return stage.version("2").reason


# The start.


async def test_newest_version_serves_and_requests_are_refused_until_it_does() -> None:
    async with Stage("1", "2").led() as stage:
        first, last = stage.routes
        assert first is not None and first.default.label == "2" and not first.default.engine.is_ready
        assert last is not None and last.default.engine is stage.engine("2")
        assert stage.shown == {"2": "serving"} and stage.running() == ["2"] and stage.swaps == [] and stage.steps("1") == []
        assert stage.steps("2")[-1] == "stop", "the stand-in has ended"


@pytest.mark.parametrize(("step", "error"), [("open", DAMAGED), ("start", EngineCannotStart("no memory")), ("prove", WRONG)])
async def test_next_version_serves_where_the_newest_cannot_be_started(step: str, error: Exception) -> None:
    stage = Stage("1", "2")
    stage.fail(step, "2", error)
    async with stage.led():
        assert (stage.serving, stage.running(), stage.state("2")) == ("1", ["1"], State.REFUSED)


@pytest.mark.parametrize(
    ("step", "error", "kind"),
    [
        ("open", Refused(Cause.BUNDLE, "the newest"), BundleError),
        ("open", Refused(Cause.SETTINGS, "the newest"), ConfigError),
        ("start", EngineCannotStart("model 'en-de': the newest"), EngineCannotStart),
    ],
)
async def test_start_fails_with_the_reason_of_the_newest_where_no_version_can_be_served(
    step: str, error: Exception, kind: type[Exception]
) -> None:
    stage = Stage("1", "2")
    stage.fail(step, "2", error)
    stage.fail(step, "1", DAMAGED if step == "open" else EngineCannotStart("the other"))
    with pytest.raises(kind, match=r"^(model 'en-de': )?the newest$"):
        async with stage.led():
            pass
    await stage.keeper.stop()
    assert not stage.running()


@pytest.mark.parametrize("ending", ["it is ready", "another serves", "its folder is gone"])
async def test_start_is_retried_until(ending: str) -> None:
    stage = Stage("1")
    stage.fail("start", "1", EngineCannotStart("not now"))
    async with stage.led(is_persistent=True):
        await stage.until(lambda: "start" in stage.steps("1"))
        stage.look()
        await asyncio.sleep(0.01)
        assert len(stage.routes) == 1, "an engine that has not been proved serves nobody"
        if ending == "it is ready":
            stage.engine("1").is_ready = True
            await stage.until(lambda: stage.serving == "1")
            assert "prove" in stage.steps("1")
        elif ending == "another serves":
            stage.put("2")
            stage.look()
            await stage.until(lambda: stage.serving == "2" and stage.state("1") is State.REFUSED)
            assert stage.steps("1")[-1] == "stop"
        else:
            stage.keeper.lose()
            await stage.until(lambda: stage.keeper.is_gone)
            assert stage.routes[-1] is None


# A rollout.


async def test_new_version_is_proved_before_it_serves_and_the_old_one_ends_after_probation() -> None:
    async with Stage("1", file=ModelFile(swap=Swap(probation_seconds=0.01))).led() as stage:
        uses = lambda name: stage.keeper.uses(Path("models") / MODEL / name)  # noqa: E731
        assert uses("1") and not uses("2")
        gate = await stage.deploy_until("prove", "2")
        assert stage.serving == "1" and uses("1") and uses("2")
        gate.set()
        await stage.until(lambda: stage.swaps == ["done"] and stage.state("1") is None)
        assert (stage.serving, stage.running(), stage.state("2")) == ("2", ["2"], State.SERVING)
        assert stage.freed[-1] == range(0, 1) and stage.version("2").replicas == range(1, 2)
        assert not uses("1") and uses("2") and ("measure", "1") in stage.told
        stage.fail("prove", "3", WRONG)
        await stage.deploy("3")
        assert uses("2") and not uses("3")


async def test_without_probation_the_old_version_ends_once_its_last_request_has() -> None:
    async with Stage("1", file=AT_ONCE).led() as stage:
        one = stage.version("1")
        one.loaded.use.take()
        await stage.deploy("2")
        assert (stage.serving, stage.swaps, stage.state("1"), stage.running()) == ("2", ["done"], State.RETIRING, ["1", "2"])
        one.loaded.use.leave(1.0, None)
        await stage.until(lambda: stage.running() == ["2"])
        assert stage.state("1") is None
        await stage.until(lambda: (one.opened, one.loaded) == (None, None))
        stage.fail("prove", "3", WRONG)
        await stage.deploy("3")
        three = stage.version("3")
        assert (three.opened, three.loaded) == (None, None) and three.content, "of what is refused no tokeniser is kept"


BAD = [
    ("open", Refused(Cause.BUNDLE, "decoder.weights: another checksum"), Cause.BUNDLE),
    ("open", Refused(Cause.SETTINGS, "max_slots"), Cause.SETTINGS),
    ("start", EngineCannotStart("model 'en-de': the engine cannot start: no graph"), Cause.START),
    ("start", OSError("no room for a process"), Cause.START),
    ("prove", Refused(Cause.PROOF, "sample 1: another answer"), Cause.PROOF),
    ("adopt", OSError("no room for a socket"), Cause.START),
    ("publish", CannotServe("front end 1: its bundle is another"), Cause.FRONT_END),
    ("memory", Exception('it may take 0 MiB, and 0 MiB is free; swap.mode = "restart" ends what serves first'), Cause.MEMORY),
]


@pytest.mark.parametrize(("step", "error", "cause"), BAD, ids=[f"{step}-{cause}" for step, _, cause in BAD])
@pytest.mark.parametrize("file", [ModelFile(), AT_ONCE], ids=["probation", "none"])
async def test_bad_version_is_refused_and_the_old_one_serves(
    step: str, error: Exception, cause: Cause, file: ModelFile, logged: Any
) -> None:
    stage = Stage("1", file=file)
    stage.fail(step, "2", error)
    stage.sizes["2"] = 101 if step == "memory" else 100
    async with stage.led():
        old = stage.engine("1")
        await stage.deploy("2")
        assert stage.serving == "1" and stage.route.default.engine is old
        reason = stage.version("2").reason
        assert str(error).removeprefix("model 'en-de': ") in reason and not reason.startswith("model")
        assert stage.keeper.troubles() == [f"version 2 is refused ({cause.value}): {reason}"]
        await stage.until(lambda: stage.running() == ["1"])
        assert stage.shown == {"1": "serving", "2": f"refused {cause.value}"} and stage.swaps == ["refused"]
        num_opened = stage.steps("2").count("open")
        stage.keeper.wake()
        await stage.settle()
        assert stage.steps("2").count("open") == num_opened, "it is not retried while it is as it was"
    (line,) = [line for line in logged() if line["event"] == "a version is refused"]
    told = {key: line[key] for key in ("level", "model", "version", "cause", "reason")}
    assert told == {"level": "error", "model": MODEL, "version": "2", "cause": cause.value, "reason": reason}


async def test_engine_that_hangs_is_given_up_in_time() -> None:
    stage = Stage("1")
    stage.load_seconds = 0.02
    stage.hold("start", "2")
    async with stage.led():
        await stage.deploy("2")
        assert stage.shown["2"] == "refused start" and stage.serving == "1" and stage.steps("2")[-1] == "stop"
        assert stage.version("2").reason == "it is not ready after 0.02 s (load_timeout_seconds)"


@pytest.mark.parametrize(
    ("step", "change", "is_tried"),
    [
        ("prove", "files", True),
        ("memory", "forgive", True),
        ("memory", RESTART, True),
        ("memory", ModelFile(settings=ModelSettings(max_slots=8)), True),
        ("prove", RESTART, False),
        ("memory", ModelFile(labels={"stable": "1"}), False),
    ],
)
async def test_refused_version_is_retried_after(step: str, change: Any, is_tried: bool) -> None:
    """After a change of settings, only where the settings may be to blame."""
    async with Stage("1").led() as stage:
        stage.fail(step, "2", WRONG)
        stage.sizes["2"] = 101 if step == "memory" else 0
        await stage.deploy("2")
        assert stage.state("2") is State.REFUSED
        stage.faults.clear()
        stage.sizes.clear()
        if change == "files":
            stage.put("2")
        elif change == "forgive":
            stage.keeper.forgive()
        else:
            stage.file = change
        await stage.settle()
        assert stage.serving == ("2" if is_tried else "1")
        assert any("refused" in state for state in stage.shown.values()) is not is_tried


async def test_version_that_arrives_or_goes_while_another_loads_takes_effect_after_it() -> None:
    async with Stage("1", file=AT_ONCE).led() as stage:
        gate = await stage.deploy_until("start", "2")
        stage.put("3")
        stage.look()
        await asyncio.sleep(0.01)
        assert stage.steps("3") == [] and stage.serving == "1"
        gate.set()
        await stage.settle()
        await stage.until(lambda: stage.running() == ["3"])
        assert [route.default.label for route in stage.routes[1:] if route is not None] == ["1", "3"]
        gate = await stage.deploy_until("start", "4")
        stage.remove("4")
        stage.look()
        gate.set()
        await stage.settle()
        await stage.until(lambda: stage.running() == ["3"])
        assert stage.serving == "3" and stage.state("4") is None


EVENTS = st.tuples(st.sampled_from(["put", "remove", "break", "mend", "pin"]), st.sampled_from("123"))


@settings(max_examples=25)
@given(st.lists(EVENTS, min_size=1, max_size=8))
def test_best_version_that_can_be_served_serves_whatever_comes_and_goes(events: list[tuple[str, str]]) -> None:
    """The newest proved version, or the pinned one; where none can be served, the one that did goes on."""

    async def run() -> None:
        broken: set[str] = set()
        async with Stage("0", file=AT_ONCE).led() as stage:
            for event, name in events:
                if event == "put":
                    stage.put(name)
                elif event == "remove":
                    stage.remove(name)
                elif event == "pin":
                    pinned = name if stage.keeper.overrides.pinned != name else None
                    stage.keeper.ask(Overrides(pinned=pinned))
                else:
                    (broken.add if event == "break" else broken.discard)(name)
                    stage.faults = {("prove", one): WRONG for one in broken}
                    stage.put(*({name} & {one.name for one in stage.versions}))
                await stage.settle()
                refused = {label for label, state in stage.shown.items() if state.startswith("refused")}
                good = [one.name for one in stage.versions if one.name not in refused]
                expected = stage.keeper.overrides.pinned if stage.keeper.overrides.pinned in good else good[-1]
                assert stage.serving == expected
                await stage.until(lambda expected=expected: stage.running() == [expected])
                assert [label for label, state in stage.shown.items() if state == "serving"] == [expected]
            assert {number for freed in stage.freed for number in freed} <= {0, 1}, "replica numbers are used again"

    asyncio.run(run())


# Probation.


@pytest.mark.parametrize(
    ("outcomes", "cause", "reason"),
    [
        (None, Cause.DEATH, "its engine ended within 0."),
        (Outcomes(0, trial.MIN_REQUESTS, 0.0), Cause.ERRORS, "20 of 20 requests failed, 100.0%; max_error_rate is 0.05"),
        (Outcomes(27, 3, 1.0), Cause.ERRORS, "3 of 30 requests failed, 10.0%; max_error_rate is 0.05"),
        (
            Outcomes(100, 0, 31.0),
            Cause.LATENCY,
            "its answers take 310 ms in the mean, those of the version before 100 ms; max_latency_factor is 3",
        ),
    ],
)
async def test_failed_probation_brings_the_old_version_back_and_running_requests_finish(
    monkeypatch: pytest.MonkeyPatch, outcomes: Outcomes | None, cause: Cause, reason: str
) -> None:
    monkeypatch.setattr(trial, "SETTLING_SECONDS", 0.0)
    monkeypatch.setattr(trial, "JUDGED_SECONDS", 0.0)
    stage = Stage("1")
    stage.outcomes_of["1"] = Outcomes(1000, 0, 100.0)
    with structlog.testing.capture_logs() as lines:
        async with on_probation(stage):
            stage.outcomes_of["2"] = Outcomes(0, trial.MIN_REQUESTS - 1, 0.0)
            stage.keeper.wake()
            await stage.settle()
            assert stage.state("2") is State.TRIAL
            held = stage.version("2").loaded
            held.use.take()
            if outcomes is None:
                stage.engine("2").die()
            else:
                stage.outcomes_of["2"] = outcomes
            await stage.until(lambda: stage.serving == "1")
            assert "stop" not in stage.steps("2")
            held.use.leave(1.0, None)
            assert (await until_back(stage, cause)).startswith(reason)
    served = [(line["default"], line["on_trial"]) for line in lines if line["event"] == "versions that serve"]
    assert served[-2:] == [("2", True), ("1", False)]


async def test_old_version_of_a_flat_folder_comes_back_although_its_files_are_gone() -> None:
    async with Stage("").led() as stage:
        one, two, three = (f"{number:012}" for number in (1, 2, 3))
        await stage.deploy("")
        assert stage.serving == two
        stage.engine(two).die()
        await stage.until(lambda: stage.serving == one and stage.running() == [one])
        await stage.settle()
        assert stage.serving == one
        await stage.deploy("")
        assert stage.serving == three
        stage.fail("open", "", DAMAGED)
        await stage.deploy("")
        assert stage.shown.get("") == "refused bundle" and stage.serving == three


async def test_probation_is_watched_while_another_version_loads() -> None:
    async with on_probation(Stage("1")) as stage:
        gate = await stage.deploy_until("start", "3")
        stage.engine("2").die()
        await stage.until(lambda: stage.serving == "1")
        gate.set()
        await stage.until(lambda: stage.serving == "3")
        assert stage.shown["2"] == "refused death"


async def test_labels_and_shares_change_on_probation_and_it_goes_on() -> None:
    async with on_probation(Stage("1")) as stage:
        stage.file = ModelFile(labels={"stable": "1", "canary": "2"}, weights={"canary": 0.25})
        await stage.settle()
        assert (stage.route.shares, stage.route.labels) == ({"2": 0.25, "1": 0.75}, {"stable": "1", "canary": "2"})
        assert stage.shown == {"1": "serving", "2": "trial"}
        stage.engine("2").die()
        await stage.until(lambda: stage.state("2") is State.REFUSED)
        await stage.settle()
        assert stage.serving == "1" and stage.route.shares == {"1": 1.0}


async def test_engine_that_dies_before_it_serves_is_never_served() -> None:
    async with Stage("1", file=TWO).led() as stage:
        stage.remove("1")
        gate = stage.hold("start", "2")
        stage.put("2", "3")
        stage.look()
        await stage.until(lambda: stage.state("3") is State.STANDBY and "start" in stage.steps("2"))
        stage.engine("3").die()
        gate.set()
        await stage.settle()
        assert stage.serving == "2" and "publish" not in stage.steps("3") and stage.shown["3"] == "refused death"
        assert stage.version("3").reason == "its engine ended before it began to serve"


async def test_engine_that_dies_while_it_is_published_is_rolled_back() -> None:
    async with Stage("1").led() as stage:
        gate = await stage.deploy_until("publish", "2")
        stage.engine("2").die()
        gate.set()
        await until_back(stage, Cause.DEATH)


async def test_label_that_cannot_be_published_is_retried_when_asked_and_not_in_a_loop() -> None:
    async with Stage("1", file=AT_ONCE).led() as stage:
        stage.fail("publish", "1", SILENT)
        stage.file = ModelFile(labels={"stable": "1"}, swap=Swap(probation_seconds=0))
        stage.look()
        await stage.until(lambda: stage.swaps)
        num_told = stage.steps("1").count("publish")
        await asyncio.sleep(0.05)
        assert stage.steps("1").count("publish") == num_told and stage.state("1") is State.SERVING
        stage.faults.clear()
        stage.keeper.wake()
        await stage.settle()
        assert stage.route.labels == {"stable": "1"}


@pytest.mark.parametrize("error", [SILENT, RuntimeError("unforeseen")])
async def test_rollback_that_cannot_be_published_is_published_again(error: Exception) -> None:
    async with on_probation(Stage("1")) as stage:
        stage.fail("publish", "1", error)
        stage.engine("2").die()
        await stage.until(lambda: stage.steps("1").count("publish") > 2)
        assert stage.serving == "2" and stage.state("2") is State.REFUSED
        stage.faults.clear()
        stage.keeper.wake()
        await stage.until(lambda: stage.serving == "1" and stage.running() == ["1"])


async def test_unforeseen_error_is_logged_and_retried_after_a_pause(monkeypatch: pytest.MonkeyPatch, logged: Any) -> None:
    monkeypatch.setattr(switch, "RETRY_SECONDS", 0.05)
    async with Stage("1", file=AT_ONCE).led() as stage:
        stage.fail("publish", "2", KeyError("unforeseen"))
        stage.put("2")
        stage.look()
        await stage.until(lambda: stage.steps("2").count("publish") > 1)
        assert stage.serving == "1" and stage.running() == ["1", "2"]
        stage.faults.clear()
        await stage.until(lambda: stage.serving == "2" and stage.running() == ["2"])
        assert stage.state("2") is State.SERVING
    assert any(line["event"] == "the versions of a model cannot be led to where they are to be" for line in logged())


# swap.mode = "restart"


async def test_restart_ends_the_old_version_before_the_new_one_starts_and_requests_are_told_to_retry() -> None:
    async def assert_not_ready(stage: Stage, *names: str) -> None:
        assert stage.keeper.route is not None and not stage.keeper.route.find("").engine.is_ready
        for name in names:
            with pytest.raises(NotReady, match="'en-de' is not ready"):
                stage.keeper.route.find(name)

    stage = Stage("1", file=RESTART)
    stage.keeper.open_first()
    stage.keeper.hold_first()
    await assert_not_ready(stage, "stable")
    async with Stage("1", file=RESTART).led() as stage:
        held = stage.version("1").loaded
        held.use.take()
        stage.put("2")
        stage.look()
        await stage.until(lambda: stage.serving is None)
        assert stage.running() == ["1"] and "start" not in stage.steps("2"), "a request still runs"
        gate = stage.hold("start", "2")
        async with asyncio.timeout(1), stage.turn:  # other models are not held up
            held.use.leave(1.0, None)
        await stage.until(lambda: "start" in stage.steps("2"))
        assert stage.running() == [] and ("measure", "1") in stage.told
        await assert_not_ready(stage, "1", "stable")
        gate.set()
        await stage.settle()
        assert stage.serving == "2"
        with pytest.raises(UnknownVersion):
            stage.route.find("stable")


@pytest.mark.parametrize("step", ["memory", "start", "prove"])
async def test_restart_loads_the_old_version_again_where_the_new_one_is_bad(step: str) -> None:
    stage = Stage("1", file=RESTART)
    stage.fail(step, "2", WRONG)
    stage.sizes["2"] = 101 if step == "memory" else 0
    async with stage.led():
        await stage.deploy("2")
        assert (stage.serving, stage.running(), stage.state("2")) == ("1", ["1"], State.REFUSED)


@pytest.mark.parametrize(
    ("step", "error"), [("open", DAMAGED), ("adopt", BundleError("its files are gone"))], ids=["open", "adopt"]
)
async def test_version_that_cannot_be_opened_interrupts_nothing(step: str, error: Exception) -> None:
    stage = Stage("1", file=RESTART)
    stage.fail(step, "2", error)
    async with stage.led():
        engine = stage.engine("1")
        await stage.deploy("2")
        assert [one.label for one in stage.keeper.versions if one.loaded is not None] == ["1"]
        assert stage.serving == "1" and stage.engine("1") is engine and engine.is_ready
        assert all(route is None or route.default.label == "1" for route in stage.routes)


TRANSITIONS = [
    (ModelFile(), "deploy 2, deploy 3", "1 standby, 3 trial"),
    (ModelFile(), "deploy 2, deploy 3, remove 2, die 3", "1 serving, 3 refused death"),
    (ModelFile(), "deploy 2, remove 2", "1 serving"),
    (ModelFile(), "deploy 2, remove 2, die 1", "1 serving"),
    (ModelFile(), "deploy 2, die 1", "1 standby, 2 trial"),
    (ModelFile(), "deploy 2, fail 3, deploy 3", "1 standby, 2 trial, 3 refused front_end"),
    (ModelFile(), "deploy 2, fail 3, deploy 3, die 2", "1 serving, 2 refused death, 3 refused front_end"),
    (TWO, "forget 1, deploy 2 3", "1 standby, 2 trial, 3 trial"),
    (TWO, "forget 1, deploy 2 3, die 2", "1 standby, 2 refused death, 3 trial"),
    (QUICK, "deploy 2", "2 serving"),
    (QUICK, "deploy 2, die 1, remove 2", "1 serving"),
    (AT_ONCE, "deploy 2, pin 1", "1 serving"),
    (AT_ONCE, "deploy 2, pin 1, deploy 3", "1 serving"),
    (AT_ONCE, "deploy 2, pin 1, deploy 3, pin -", "3 serving"),
    (AT_ONCE, "pin unload", ""),
    (AT_ONCE, "pin unload, pin -", "1 serving"),
]


@pytest.mark.parametrize(("file", "events", "expected"), TRANSITIONS, ids=[events for _, events, _ in TRANSITIONS])
async def test_states_after(file: ModelFile, events: str, expected: str) -> None:
    async with Stage("1", file=file).led() as stage:
        for event, *names in map(str.split, events.split(", ")):
            if event == "deploy":
                stage.put(*names)
            elif event in ("remove", "forget"):
                stage.remove(*names)
            elif event == "die":
                stage.engine(*names).die()
            elif event == "fail":
                stage.fail("publish", *names, SILENT)
            else:
                stage.keeper.ask(Overrides(pinned={"-": None}.get(*names, *names), is_unloaded=names == ["unload"]))
            if event != "forget":
                await stage.settle()
        states = dict(state.split(maxsplit=1) for state in expected.split(", ") if state)
        await stage.until(lambda: stage.shown == states)
        await stage.until(lambda: stage.running() == [label for label, state in states.items() if "refused" not in state])
        assert not stage.keeper.is_gone


# The end.


async def test_model_without_a_folder_ends_once_no_request_holds_it_and_comes_back_with_it() -> None:
    async with Stage("1").led() as stage:
        num_told = len(stage.told)
        stage.keeper.lose()
        await stage.settle()
        assert stage.serving == "1" and len(stage.told) == num_told, "it was back before anything was done"
        held = stage.version("1").loaded
        held.use.take()
        stage.keeper.lose()
        await stage.keeper.settled()
        assert stage.routes[-1] is None and stage.running() == ["1"] and not stage.keeper.is_gone
        await stage.settle()
        assert stage.serving == "1" and stage.version("1").loaded is not held and stage.running() == ["1", "1"]
        stage.keeper.lose()
        held.use.leave(1.0, None)
        await stage.until(lambda: stage.keeper.is_gone and stage.told[-1] == ("gone", ""))
        assert stage.running() == []
        await asyncio.sleep(0)
        stage.keeper.forgive()
        async with asyncio.timeout(1):
            await stage.keeper.settled()


async def test_folder_that_goes_while_a_version_loads_ends_that_too() -> None:
    async with Stage("1").led() as stage:
        gate = await stage.deploy_until("start", "2")
        stage.remove("1", "2")
        stage.keeper.lose()
        await asyncio.sleep(0.005)
        assert not stage.keeper.is_gone
        gate.set()
        await stage.until(lambda: stage.keeper.is_gone and not stage.running())


@pytest.mark.parametrize("step", ["start", "prove", "adopt", "publish"])
async def test_stop_in_the_middle_of_a_rollout_leaves_no_engine(step: str) -> None:
    async with on_probation(Stage("1")) as stage:
        stage.version("1").loaded.use.take()
        await stage.deploy_until(step, "3")


async def test_policy_that_cannot_be_met_is_logged_once(logged: Any) -> None:
    async with Stage("1", file=ModelFile(labels={"canary": "9"})).led() as stage:
        for _ in range(2):
            stage.keeper.wake()
            await stage.settle()
        assert stage.keeper.problems == ("labels.canary: there is no version '9'",)
    assert sum(line["event"] == "what is wanted of a model cannot be had" for line in logged()) == 1
