"""Rollouts and idle unloading of one model: the version that serves, and the state of each, whatever fails in between."""

import asyncio
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dragoman.export.bundle import BundleError
from dragoman.server.config import ConfigError
from dragoman.server.errors import NotReady, UnknownVersion
from dragoman.server.models import executor, memory, reconcile
from dragoman.server.models.model_file import ModelFile, ModelSettings, Swap, Versions
from dragoman.server.models.policy import Overrides
from dragoman.server.models.registry import CannotServe
from dragoman.server.models.status import status_of
from dragoman.server.models.version import Cause, Refused
from dragoman.server.workers.supervisor import EngineCannotStart
from tests.server.conftest import until
from tests.server.models.staged import MODEL, Stage


def kept(time: str, **fields: Any) -> ModelFile:
    return ModelFile(settings=ModelSettings(keep_loaded=time, **fields))  # type: ignore[arg-type]


AT_ONCE, RESTART, SLEEPY = ModelFile(swap=Swap(probation_seconds=0)), ModelFile(swap=Swap(mode="restart")), kept("1h")
FILES = {
    "plain": ModelFile(),
    "at-once": AT_ONCE,
    "quick": ModelFile(swap=Swap(probation_seconds=0.02)),
    "restart": RESTART,
    "two": ModelFile(versions=Versions(latest=2)),
    "slots": ModelFile(settings=ModelSettings(max_slots=8)),
    "labelled": ModelFile(labels={"stable": "1"}, swap=Swap(probation_seconds=0)),
    "sleepy": SLEEPY,
    "always": kept("always"),
}
# Of a file and versions ("1" unless others are named): events and the states after them, which versions were the default by turns,
# which engines were started, and what was counted of rollouts.
STORIES: list[tuple[str, str, dict[str, str]]] = [
    ("plain 1 2", "= 2 serving", {"served": "2 2", "started": "2"}),
    ("plain 1 2", "fail open 2 = 1 serving, 2 refused bundle", {"started": "1"}),
    ("plain 1 2", "fail start 2 = 1 serving, 2 refused start", {"started": "2 1"}),
    ("plain 1 2", "fail prove 2 = 1 serving, 2 refused proof", {"started": "2 1"}),
    ("plain", "deploy 2 = 1 standby, 2 trial; deploy 3 = 1 standby, 3 trial", {"started": "1 2 3"}),
    ("plain", "deploy 2, deploy 3, remove 2, die 3 = 1 serving, 3 refused death", {"swaps": "rolled_back"}),
    ("plain", "deploy 2, remove 2 = 1 serving; die 1 = 1 serving", {}),
    ("plain", "deploy 2, die 1 = 1 standby, 2 trial", {}),
    ("plain", "deploy 2, fail publish 3, deploy 3 = 1 standby, 2 trial, 3 refused front_end", {"swaps": "refused"}),
    ("plain", "deploy 2, fail publish 3, deploy 3, die 2 = 1 serving, 2 refused death, 3 refused front_end", {}),
    ("two", "forget 1, deploy 2 3 = 1 standby, 2 trial, 3 trial; die 2 = 1 standby, 2 refused death, 3 trial", {}),
    ("two", "begin prove 2 = 1 serving, 2 proving; die 2, let = 1 serving, 2 refused death", {"served": "1 1", "swaps": "refused"}),
    ("two", "forget 1, hold start 2, put 2 3 = 1 serving, 2 starting, 3 standby; die 3, let = 1 standby, 2 trial, 3 refused death",
     {"served": "1 1 2"}),
    ("quick", "begin prove 2 = 1 serving, 2 proving; let = 2 serving", {"served": "1 1 2", "swaps": "done"}),
    ("quick", "deploy 2, die 1, remove 2 = 1 serving", {}),
    ("quick", "deploy 2, take 2, die 2 = 1 serving, 2 refused death; leave 2 = 1 serving, 2 refused death", {}),
    ("at-once", "take 1, deploy 2 = 1 retiring, 2 serving; leave 1 = 2 serving", {"swaps": "done", "started": "1 2"}),
    ("at-once", "deploy 2 = 2 serving; pin 1 = 1 serving; deploy 3 = 1 serving; pin = 3 serving", {}),
    ("at-once", "unload =; pin = 1 serving", {"started": "1 1"}),
    ("at-once", "begin start 2, put 3 = 1 serving, 2 starting; let = 3 serving", {"served": "1 1 3"}),
    ("at-once", "begin start 2, remove 2 = 1 serving, 2 starting; let = 1 serving", {"served": "1 1"}),
    ("plain", "deploy 2, begin prove 3, die 2 = 1 serving, 2 refused death, 3 proving", {}),
    ("plain", "begin publish 2, die 2, let = 1 serving, 2 refused death", {"swaps": "rolled_back"}),
    # Refused versions are retried when their files change, and when settings do that may be to blame.
    ("plain", "fail prove 2, deploy 2 = 1 serving, 2 refused proof; mend, deploy 2 = 1 standby, 2 trial", {"started": "1 2 2"}),
    ("plain", "large 2, deploy 2 = 1 serving, 2 refused memory; mend, forgive = 1 standby, 2 trial", {"started": "1 2"}),
    ("plain", "large 2, deploy 2, mend, file restart = 2 serving", {}),
    ("plain", "large 2, deploy 2, mend, file slots = 1 standby, 2 trial", {}),
    ("plain", "fail prove 2, deploy 2, mend, file restart = 1 serving, 2 refused proof", {}),
    ("plain", "large 2, deploy 2, mend, file labelled = 1 serving, 2 refused memory", {}),
    # With `restart` the old version is loaded again where the new one is bad; one that cannot be opened interrupts nothing.
    ("restart", "take 1, put 2 = 1 retiring, 2 opening; leave 1 = 2 serving", {"started": "1 2"}),
    ("restart", "begin start 2 = 2 starting; let = 2 serving", {"started": "1 2"}),
    ("restart", "fail open 2, deploy 2 = 1 serving, 2 refused bundle", {"served": "1 1", "started": "1"}),
    ("restart", "fail adopt 2, deploy 2 = 1 serving, 2 refused bundle", {"served": "1 1", "started": "1"}),
    ("restart", "large 2, deploy 2 = 1 serving, 2 refused memory", {"started": "1 1"}),
    ("restart", "fail start 2, deploy 2 = 1 serving, 2 refused start", {"started": "1 2 1"}),
    ("restart", "fail prove 2, deploy 2 = 1 serving, 2 refused proof", {"started": "1 2 1"}),
    # A model ends with its folder, once no request holds it, and comes back with it.
    ("plain", "lose =", {"served": "1 1 None", "started": "1"}),
    ("plain", "take 1, lose = 1 retiring; look = 1 serving; leave 1 = 1 serving", {"started": "1 1"}),
    ("plain", "begin start 2, remove 1 2, lose = 1 serving, 2 starting; let =", {}),
    # The server may stop in the middle of a rollout.
    *(("plain", f"deploy 2, take 1, begin {step} 3 = {states}", {}) for step, states in {
        "start": "1 standby, 2 trial, 3 starting",
        "prove": "1 standby, 2 trial, 3 proving",
        "adopt": "1 standby, 2 trial, 3 proving",
        "publish": "1 standby, 2 trial, 3 standby",
    }.items()),
    # Idle unloading.
    ("sleepy 1 2", "= 2 asleep; ask = 2 serving", {"wakes": "loaded", "started": "2", "swaps": ""}),
    ("sleepy", "ask = 1 serving; evict = 1 asleep; ask = 1 serving", {"wakes": "loaded loaded", "sleeps": "memory"}),
    ("sleepy", "ask, take 1, evict = 1 asleep; leave 1 = 1 asleep", {"sleeps": "memory", "swaps": ""}),
    ("sleepy 1 2", "fail prove 2, ask = 1 serving, 2 refused proof", {"wakes": "refused loaded", "started": "2 1"}),
    ("sleepy", "ask, evict, fail start 1, ask = 1 asleep", {"wakes": "loaded failed"}),
    ("sleepy", "deploy 2 = 2 asleep; fail adopt 3, deploy 3 = 2 asleep, 3 refused bundle; ask = 2 serving, 3 refused bundle", {}),
    ("sleepy", "ask, deploy 2 = 1 standby, 2 trial", {"wakes": "loaded", "started": "1 2"}),
    ("sleepy", "file always = 1 serving; evict = 1 serving", {"sleeps": ""}),
    ("sleepy", "lose =", {"wakes": ""}),
]  # fmt: skip


FAULTS = ("fail", "large", "mend", "forget", "hold")


async def play(stage: Stage, events: str) -> None:
    """Make changes; each is complete before the next unless a step is held."""
    for event, *names in map(str.split, events.split(", ") if events else ()):
        match event:
            case "deploy" | "put":
                stage.put(*names)
            case "remove" | "forget":
                stage.remove(*names)
            case "fail":
                stage.fail(*names)
            case "large":
                stage.sizes |= dict.fromkeys(names, 101)
            case "mend":
                stage.faults, stage.sizes = {}, {}
            case "hold":
                stage.hold(*names)
            case "begin":
                await stage.deploy_until(*names)
            case "let":
                for gate in stage.gates.values():
                    gate.set()
                stage.gates.clear()
            case "take":
                stage.held[names[0]] = stage.version(*names).loaded
                stage.held[names[0]].use.take()
            case "leave":
                stage.held.pop(*names).use.leave(1.0, None)
            case "die":
                stage.engine(*names).die()
            case "pin" | "unload":
                stage.keeper.override(Overrides(pinned=names[0] if names else None, is_unloaded=event == "unload"))
            case "forgive":
                stage.keeper.retry_refused()
            case "file":
                stage.file = FILES[names[0]]
            case "lose":
                stage.keeper.note_removed()
            case "ask":
                await stage.ask_for()
            case "evict":
                stage.keeper.evict()
                await until(lambda: stage.sleeps or stage.file != SLEEPY)
        if event in FAULTS:
            continue
        if event not in ("lose", "begin", "let"):
            stage.scan()
        if not stage.is_held and event != "put":
            async with asyncio.timeout(10):
                await stage.keeper.settled()


@pytest.mark.parametrize(("given", "story", "outcomes"), STORIES, ids=[" ".join(row[:2]) for row in STORIES])
async def test_states_after(monkeypatch: pytest.MonkeyPatch, given: str, story: str, outcomes: dict[str, str]) -> None:
    monkeypatch.setattr(memory, "MIN_STAY_SECONDS", 0.0)
    file, *versions = given.split()
    stage = Stage(*versions or ["1"], file=FILES[file])
    await play(stage, ", ".join(takewhile(lambda event: event.startswith(FAULTS), story.split(" =")[0].split(", "))))
    async with stage.led():
        for events, expected in (part.split("=") for part in story.split(";")):
            await play(stage, events.strip())
            states = dict(state.split(maxsplit=1) for state in expected.strip().split(", ") if state)
            await until(lambda states=states: stage.shown == states)
            assert (stage.serving is None) == (not {"serving", "trial"} & {*states.values()})
        if not stage.is_held:
            loaded = [label for label, state in states.items() if state.split()[0] not in ("refused", "asleep")]
            await until(lambda: stage.running() == loaded)
            assert stage.keeper.is_gone == ("lose" in story and not states)
        found = {
            "served": [None if route is None else route.default.label for route in stage.routes],
            "started": [one.label for one in stage.engines if one.is_started],
            **{"swaps": stage.swaps, "wakes": stage.wakes, "sleeps": stage.sleeps},
        }
        assert {name: " ".join(map(str, found[name])) for name in outcomes} == outcomes


NAMES = st.sampled_from("123")
STEPS = st.sampled_from(["open", "start", "prove", "adopt", "publish"])
DEFINED = ("at-once", "plain", "two", "restart", "sleepy")


class Rollouts(RuleBasedStateMachine):
    """Versions come, go, fail and die, and operators and requests interfere: what can be served is, and nothing in use ends."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.stage = Stage("0", file=FILES["at-once"])
        self.led = self.stage.led()
        self.kept: list[Any] = []
        self.run(self.led.__aenter__())

    def run(self, work: Any) -> None:
        self.loop.run_until_complete(asyncio.wait_for(work, 10))

    def settle(self) -> None:
        self.run(self.stage.settle())

    def teardown(self) -> None:
        self.release()
        self.run(self.led.__aexit__(None, None, None))
        self.loop.close()

    @rule(name=NAMES)
    def put(self, name: str) -> None:
        self.stage.put(name)
        self.settle()

    @rule(name=NAMES)
    def remove(self, name: str) -> None:
        self.stage.remove(name)
        self.settle()

    @rule(step=STEPS, name=NAMES)
    def put_broken(self, step: str, name: str) -> None:
        route = self.stage.keeper.route
        assume(step != "publish" or (route is not None and not route.default.is_asleep))  # else it is tried again after a pause
        self.stage.fail(step, name)
        self.put(name)
        self.stage.faults.clear()  # it is refused until its files change

    @rule(name=NAMES)
    def die(self, name: str) -> None:
        for engine in self.stage.engines:
            if engine.label == name and engine.is_ready:
                engine.die()
        self.settle()

    @rule(name=st.none() | NAMES, is_unloaded=st.booleans())
    def ask(self, name: str | None, is_unloaded: bool) -> None:
        self.stage.keeper.override(Overrides(pinned=name, is_unloaded=is_unloaded))
        self.settle()

    @rule(name=st.sampled_from(DEFINED))
    def define(self, name: str) -> None:
        self.release()
        self.stage.file = FILES[name]
        self.settle()

    @precondition(lambda self: self.stage.serving is not None and self.stage.file != RESTART)
    @rule()
    def hold(self) -> None:
        self.kept.append(self.stage.route.default)
        self.kept[-1].use.take()

    @rule()
    def release(self) -> None:
        while self.kept:
            self.kept.pop().use.leave(1.0, None)
        self.settle()

    @rule()
    def evict(self) -> None:
        self.stage.keeper.evict()
        self.settle()

    @rule()
    def request(self) -> None:
        """Have a request wait for the model, if it is asleep."""
        for self.stage.is_asked_for in (True, False):
            self.stage.keeper.wake()
            self.settle()

    @invariant()
    def nothing_is_left_to_do(self) -> None:
        keeper = self.stage.keeper
        assert not reconcile.reconcile(keeper.found, keeper.overrides, keeper.loaded, keeper._executor.observe())

    @invariant()
    def versions_in_use_run(self) -> None:
        assert all(model.engine.is_ready for model in self.kept)
        route = self.stage.keeper.route
        if route is not None and not route.is_stand_in:
            assert all(model.engine.is_ready for model in route.versions.values())

    @invariant()
    def best_version_answers(self) -> None:
        """The newest version that is not refused, or the pinned one; where there is none, the one that did goes on."""
        stage, asked, route = self.stage, self.stage.keeper.overrides, self.stage.keeper.route
        refused = {label for label, state in stage.shown.items() if state.startswith("refused")}
        good = [one.name for one in stage.versions if one.name not in refused]
        if asked.is_unloaded or not stage.versions:
            assert route is None
        elif good:
            assert route is not None and not route.is_stand_in
            assert route.default.label == (asked.pinned if asked.pinned in good else good[-1])

    @invariant()
    def replica_numbers_are_used_again(self) -> None:
        assert max((number for one in self.stage.freed for number in one), default=0) < 8


TestRollouts = Rollouts.TestCase
TestRollouts.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)


# The start.


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
    stage.fail(step, "1")
    with pytest.raises(kind, match=r"^(model 'en-de': )?the newest$"):
        async with stage.led():
            pass
    await stage.keeper.stop()
    assert not stage.running()


@pytest.mark.parametrize("ending", ["it is ready", "another serves", "its folder is gone"])
async def test_start_is_retried_until(ending: str) -> None:
    stage = Stage("1")
    stage.fail("start", "1")
    async with stage.led(is_persistent=True):
        await until(lambda: "start" in stage.steps("1"))
        stage.scan()
        await asyncio.sleep(0.01)
        assert len(stage.routes) == 1 and stage.serving is None, "an engine that has not been proved is not served"
        if ending == "it is ready":
            stage.engine("1").is_ready = True
            await until(lambda: stage.serving == "1" and "prove" in stage.steps("1"))
        elif ending == "another serves":
            stage.put("2")
            stage.scan()
            await until(lambda: stage.shown == {"1": "refused start", "2": "serving"})
            assert stage.steps("1")[-1] == "stop"
        else:
            stage.keeper.note_removed()
            await until(lambda: stage.keeper.is_gone and stage.routes[-1] is None)


# Rollouts.


async def test_version_that_has_ended_frees_its_folder_replicas_and_tokenisers() -> None:
    async with Stage("1", file=AT_ONCE).led() as stage:
        uses = lambda name: stage.keeper.uses(Path("models") / MODEL / name)  # noqa: E731
        one = stage.version("1")
        gate = await stage.deploy_until("prove", "2")
        assert uses("1") and uses("2") and not uses("3")
        gate.set()
        await until(lambda: stage.running() == ["2"] and (one.opened, one.loaded) == (None, None))
        assert stage.freed[-1] == range(0, 1) and stage.version("2").replicas == range(1, 2)
        assert not uses("1") and uses("2") and ("measure", "1") in stage.told
        await play(stage, "fail prove 3, deploy 3")
        three = stage.version("3")
        assert (three.opened, three.loaded) == (None, None) and three.content and not uses("3")


BAD = [
    ("open", Refused(Cause.BUNDLE, "decoder.weights: another checksum"), Cause.BUNDLE),
    ("open", Refused(Cause.SETTINGS, "max_slots"), Cause.SETTINGS),
    ("start", EngineCannotStart("model 'en-de': the engine cannot start: no graph"), Cause.START),
    ("start", OSError("no room for a process"), Cause.START),
    ("prove", Refused(Cause.PROOF, "sample 1: another answer"), Cause.PROOF),
    ("adopt", OSError("no room for a socket"), Cause.START),
    ("publish", CannotServe("front end 1: its bundle is another"), Cause.FRONT_END),
    ("memory", Exception('it may take 0 MiB, and 0 MiB is free; swap.mode = "restart" ends what serves first'), Cause.MEMORY),
    ("hang", Exception("it is not ready after 0.02 s (load_timeout_seconds)"), Cause.START),
]


@pytest.mark.parametrize(("step", "error", "cause"), BAD, ids=[f"{step}-{cause}" for step, _, cause in BAD])
async def test_bad_version_is_refused_and_the_old_one_serves(step: str, error: Exception, cause: Cause, logged: Any) -> None:
    stage = Stage("1")
    stage.fail(step, "2", error)
    stage.sizes["2"] = 101 if step == "memory" else 100
    async with stage.led():
        old = stage.engine("1")
        if step == "hang":
            stage.load_seconds = 0.02
            stage.hold("start", "2")
        await stage.deploy("2")
        assert stage.serving == "1" and stage.route.default.engine is old
        reason = stage.version("2").reason
        assert str(error).removeprefix("model 'en-de': ") in reason and not reason.startswith("model")
        assert stage.keeper.troubles() == [f"version 2 is refused ({cause.value}): {reason}"]
        await until(lambda: stage.running() == ["1"])
        assert stage.shown == {"1": "serving", "2": f"refused {cause.value}"} and stage.swaps == ["refused"]
        num_opened = stage.steps("2").count("open")
        stage.keeper.wake()
        await stage.settle()
        assert stage.steps("2").count("open") == num_opened, "it is not retried while it is as it was"
    (line,) = [line for line in logged() if line["event"] == "a version is refused"]
    told = {key: line[key] for key in ("level", "model", "version", "cause", "reason")}
    assert told == {"level": "error", "model": MODEL, "version": "2", "cause": cause.value, "reason": reason}


@pytest.mark.parametrize(("change", "error"), [("labels", None), ("version", KeyError("unforeseen")), ("rollback", None)])
async def test_route_that_cannot_be_published_is_published_later(
    monkeypatch: pytest.MonkeyPatch, change: str, error: Exception | None
) -> None:
    """After a pause, or when the model is to be looked at again, but not in a loop."""
    monkeypatch.setattr(executor, "RETRY_SECONDS", 0.05)
    label = "2" if change == "version" else "1"
    async with Stage("1", file=FILES["plain" if change == "rollback" else "at-once"]).led() as stage:
        if change == "rollback":
            await stage.deploy("2")
        stage.fail("publish", label, error)
        num_before = stage.steps(label).count("publish")
        if change == "labels":
            stage.file = FILES["labelled"]
        elif change == "version":
            stage.put("2")
        else:
            stage.engine("2").die()
        stage.scan()
        await until(lambda: stage.steps(label).count("publish") > num_before + (change == "version"))
        await asyncio.sleep(0.02)
        assert stage.steps(label).count("publish") < num_before + 5
        assert stage.serving == ("2" if change == "rollback" else "1")
        stage.faults.clear()
        stage.keeper.wake()
        await until(lambda: stage.serving == label and stage.running() == [label])
        await until(lambda: change != "labels" or stage.route.labels == {"stable": "1"})


async def test_requests_are_told_to_retry_while_a_model_restarts_and_other_models_are_not_held_up() -> None:
    stage = Stage("1", file=RESTART)
    async with stage.led():
        await play(stage, "take 1, put 2")
        await until(lambda: stage.serving is None)
        gate = stage.hold("start", "2")
        async with asyncio.timeout(1), stage.turn:
            stage.held["1"].use.leave(1.0, None)
        await until(lambda: "start" in stage.steps("2"))
        assert stage.running() == [] and stage.keeper.route is not None
        for name in ("1", "stable"):
            with pytest.raises(NotReady, match="'en-de' is not ready"):
                stage.keeper.route.find(name)
        gate.set()
        await stage.settle()
        with pytest.raises(UnknownVersion):
            stage.route.find("stable")


# Idle unloading.


def sleepy(*names: str, file: ModelFile = SLEEPY) -> Stage:
    return Stage(*names, file=file, size=60)


async def test_versions_are_loaded_one_by_one_unloaded_together_and_their_memory_is_free_when_no_request_holds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "MIN_STAY_SECONDS", 0.0)
    fields: dict[str, Any] = {"versions": Versions(latest=2), "labels": {"old": "1"}, "weights": {"1": 0.25}}
    async with Stage("1", "2", file=ModelFile(settings=SLEEPY.settings, **fields), size=50).led() as stage:
        asleep = stage.route
        assert asleep.default.is_asleep and asleep.default.engine.is_ready and not stage.keeper.candidate().may_leave
        proving = stage.hold("prove", "2")
        asking = asyncio.create_task(stage.ask_for())
        await until(lambda: "prove" in stage.steps("2"))
        assert not stage.engine("2").is_observed() and "start" not in stage.steps("1"), "requests of a proof are not counted"
        proving.set()
        await asking
        assert stage.engine("2").is_observed() and stage.running() == ["1", "2"] == sorted(stage.route.versions)
        for route in (asleep, stage.route):
            assert (route.shares, route.labels) == ({"1": 0.25, "2": 0.75}, {"old": "1"})
        await play(stage, "take 2")
        stage.keeper.evict()
        await until(lambda: stage.sleeps)
        assert "2" in stage.running() and stage.keeper.candidate().is_leaving and stage.keeper.candidate().memory_bytes >= 50
        await play(stage, "leave 2")
        await until(lambda: not stage.running() and not stage.keeper.candidate().is_leaving)
        assert stage.keeper.candidate().memory_bytes == 0


async def test_reason_why_a_model_cannot_be_loaded_is_told_to_requests_and_it_is_retried_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reconcile, "MIN_RETRY_SECONDS", 0.05)
    monkeypatch.setattr(memory, "MIN_STAY_SECONDS", 0.0)
    async with sleepy("1").led() as stage:
        for fault, reason, told in (
            ("memory", "there is no memory for it now", "it may take 0 MiB, and 0 MiB is free"),
            ("start", "its engine cannot be started now", "no memory"),
        ):
            if fault == "memory":
                stage.free_bytes = 59
            else:
                stage.fail(fault, "1")
            for _ in range(2):  # the second is told at once, and not tried
                await stage.ask_for()
                assert stage.refusals[-1][0] == reason and 0 < stage.refusals[-1][1] <= 0.05
            assert stage.wakes[-1] == "failed" and stage.wakes.count("failed") == 1 + (fault == "start")
            assert status_of(stage.keeper).problems == (f"the model cannot be woken: {told}",), "the numbers are for operators"
            assert stage.shown == {"1": "asleep"}
            stage.free_bytes = 60
            stage.faults.clear()
            await asyncio.sleep(0.05)
            await play(stage, "ask")
            assert stage.serving == "1" and status_of(stage.keeper).problems == ()
            await play(stage, "evict")
            await until(lambda: not stage.running())


async def test_model_that_could_not_be_loaded_again_with_its_file_stays_loaded() -> None:
    async with sleepy("1").led() as stage:
        await stage.ask_for()
        stage.file = stage.misfit = kept("20ms", max_slots=1)
        await stage.settle()
        await asyncio.sleep(0.06)
        assert (stage.shown, stage.serving, stage.sleeps) == ({"1": "serving"}, "1", [])
        stage.file = kept("20ms")
        stage.scan()
        await until(lambda: stage.sleeps == ["idle"] and not stage.running())
