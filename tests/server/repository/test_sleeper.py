"""Idle unloading of one model: when its versions are loaded, the state shown, and what waiting requests are told."""

import asyncio
import time

import pytest

from dragoman.export.bundle import BundleError
from dragoman.server.repository import placement, sleep
from dragoman.server.repository.model_file import ModelFile, ModelSettings, Versions
from dragoman.server.repository.status import status_of
from dragoman.server.repository.versions import Cause, Refused, State
from dragoman.server.supervisor import EngineCannotStart
from tests.server.repository.staged import Stage

WRONG = Refused(Cause.PROOF, "another answer")


def sleepy(*names: str, keep: str = "1h", **tables: object) -> Stage:
    return Stage(*names, file=ModelFile(settings=ModelSettings(keep_loaded=keep), **tables), size=60)  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def _no_minimal_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "MIN_STAY_SECONDS", 0.0)


async def test_model_is_ready_but_not_loaded_until_it_is_asked_for_and_unloaded_for_others() -> None:
    stage = sleepy("1", "2")
    async with stage.led():
        assert stage.route.default.is_asleep and stage.route.default.engine.is_ready and stage.route.default.label == "2"
        assert stage.steps("2") == ["open"] and stage.running() == [] and stage.shown == {"2": "asleep"}
        assert stage.keeper.stay() is None
        await stage.ask_for()
        await stage.settle()
        assert (stage.serving, stage.running(), stage.wakes, stage.shown) == ("2", ["2"], ["loaded"], {"2": "serving"})
        held = stage.route.default
        held.use.take()
        stage.keeper.give_way()
        await stage.until(lambda: stage.sleeps)
        assert stage.serving is None and stage.running() == ["2"] and stage.keeper.is_leaving
        assert stage.keeper.memory_bytes() == 60, "until its last request has ended"
        held.use.leave(1.0, None)
        await stage.until(lambda: not stage.running() and not stage.keeper.is_leaving)
        assert stage.keeper.memory_bytes() == 0 and stage.sleeps == ["memory"] and stage.swaps == []
        await stage.ask_for()
        assert stage.serving == "2" and stage.steps("2").count("prove") == 2 and stage.steps("2").count("open") == 1
        stage.file = ModelFile(settings=ModelSettings(keep_loaded="always"))
        await stage.settle()
        assert stage.keeper.stay() is None, "it is not unloaded any more"


async def test_model_that_is_loaded_and_not_yet_published_counts_as_busy() -> None:
    """Its memory will be free again: a model that needs it has to wait, and must not be refused."""
    stage = sleepy("1")
    async with stage.led():
        gate = stage.hold("adopt", "1")
        asking = asyncio.create_task(stage.ask_for())
        await stage.until(lambda: stage.running() == ["1"] and stage.turn.locked())
        asyncio.get_running_loop().call_soon(gate.set)
        async with stage.turn:
            stay = stage.keeper.stay()
        assert stay is not None and stay.is_busy
        await asking
        await stage.settle()
        stay = stage.keeper.stay()
        assert stay is not None and not stay.is_busy
        await stage.deploy("2")
        assert (stage.serving, stage.shown) == ("2", {"1": "standby", "2": "trial"})
        stay = stage.keeper.stay()
        assert stay is not None and stay.is_busy, "while a version is on probation"


async def test_idle_time_counts_from_the_end_of_the_last_request() -> None:
    stage = sleepy("1", keep="40ms")
    async with stage.led():
        await stage.ask_for()
        stage.route.default.use.take()
        await asyncio.sleep(0.1)
        assert stage.sleeps == []
        stage.route.default.use.leave(0.1, None)
        left = time.monotonic()
        await stage.until(lambda: stage.sleeps == ["idle"] and not stage.running())
        assert time.monotonic() - left >= 0.04 and stage.shown["1"] == "asleep"


async def test_model_is_not_loaded_where_the_request_has_gone_before_its_turn() -> None:
    stage = sleepy("1")
    async with stage.led():
        async with stage.turn:
            stage.is_asked_for = True
            stage.keeper.wake()
            await asyncio.sleep(0.01)
            stage.is_asked_for = False
        await stage.settle()
        assert stage.state("1") is State.ASLEEP and stage.steps("1") == ["open"] and stage.wakes == []


async def test_lack_of_memory_is_told_to_waiting_requests_and_retried_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep, "MIN_RETRY_SECONDS", 0.05)
    stage = sleepy("1")
    async with stage.led():
        stage.free_bytes = 59
        await stage.ask_for()
        reason, seconds = stage.refusals[0]
        assert reason == "there is no memory for it now" and 0 < seconds <= 0.05
        told = "the model cannot be woken: it may take 0 MiB, and 0 MiB is free"
        assert status_of(stage.keeper).problems == (told,), "the numbers are for operators"
        assert stage.state("1") is State.ASLEEP and stage.wakes == ["failed"]
        await stage.ask_for()
        assert stage.refusals[-1][0] == reason and stage.wakes == ["failed"], "told at once, and not tried"
        stage.free_bytes = 60
        await asyncio.sleep(0.05)
        await stage.ask_for()
        assert stage.serving == "1" and status_of(stage.keeper).problems == ()


async def test_version_that_was_up_before_and_cannot_be_started_now_stays_asleep() -> None:
    stage = sleepy("1")
    async with stage.led():
        await stage.ask_for()
        await stage.settle()
        stage.keeper.give_way()
        await stage.until(lambda: not stage.running())
        stage.fail("start", "1", EngineCannotStart("no room for a process"))
        await stage.ask_for()
        assert stage.refusals[-1][0] == "its engine cannot be started now" and stage.state("1") is State.ASLEEP
        assert status_of(stage.keeper).problems == ("the model cannot be woken: no room for a process",)
        assert stage.wakes == ["loaded", "failed"]


async def test_version_that_fails_its_proof_is_refused_and_the_next_one_is_loaded() -> None:
    stage = sleepy("1", "2")
    stage.fail("prove", "2", WRONG)
    async with stage.led():
        await stage.ask_for()
        assert (stage.serving, stage.running(), stage.state("2")) == ("1", ["1"], State.REFUSED)
        assert stage.wakes == ["refused", "loaded"]
    stage = sleepy("1")
    stage.fail("prove", "1", WRONG)
    async with stage.led():
        stage.is_asked_for = True
        stage.keeper.wake()
        await stage.until(lambda: not stage.route.default.is_asleep)
        assert not stage.route.default.engine.is_ready, "the model is not ready where no version is left"
        assert stage.version("1").reason == "another answer" and stage.wakes == ["refused"]


async def test_new_version_of_an_unloaded_model_is_opened_and_proved_when_it_is_asked_for() -> None:
    stage = sleepy("1")
    async with stage.led():
        await stage.deploy("2")
        assert stage.route.default.label == "2" and stage.route.default.is_asleep
        await stage.until(lambda: stage.shown == {"2": "asleep"})
        assert "open" in stage.steps("2") and "start" not in stage.steps("2")
        stage.fail("adopt", "3", BundleError("bundle.json: No such file or directory"))
        await stage.deploy("3")
        assert stage.state("3") is State.REFUSED and "No such file" in stage.version("3").reason
        await stage.ask_for()
        assert stage.serving == "2" and "start" not in stage.steps("1")


async def test_versions_are_loaded_and_unloaded_together_with_their_labels_and_shares() -> None:
    stage = sleepy("1", "2", versions=Versions(latest=2), labels={"old": "1"}, weights={"1": 0.25})
    stage.size = 50
    async with stage.led():
        asleep = stage.route
        await stage.ask_for()
        assert stage.running() == ["1", "2"] == sorted(stage.route.versions)
        for route in (asleep, stage.route):
            assert (route.shares, route.labels) == ({"1": 0.25, "2": 0.75}, {"old": "1"})


async def test_unloaded_model_goes_with_its_folder_or_is_loaded_once_it_is_always_to_be() -> None:
    stage = sleepy("1")
    async with stage.led():
        stage.file = ModelFile(settings=ModelSettings(keep_loaded="always"))
        stage.look()
        await stage.until(lambda: stage.serving == "1")
    stage = sleepy("1")
    async with stage.led():
        stage.keeper.lose()
        await stage.until(lambda: stage.keeper.is_gone)
        assert stage.routes[-1] is None and stage.wakes == []


async def test_model_that_could_not_be_loaded_again_with_its_file_stays_loaded() -> None:
    stage = sleepy("1")
    async with stage.led():
        await stage.ask_for()
        stage.file = stage.misfit = ModelFile(settings=ModelSettings(keep_loaded="20ms", max_slots=1))
        await stage.settle()
        await asyncio.sleep(0.06)
        assert (stage.shown, stage.serving, stage.sleeps) == ({"1": "serving"}, "1", [])
        stage.file = ModelFile(settings=ModelSettings(keep_loaded="20ms"))
        stage.look()
        await stage.until(lambda: stage.sleeps == ["idle"] and not stage.running())


@pytest.mark.parametrize("is_loading", [True, False])
async def test_nothing_is_polled_while_a_version_loads_or_a_loaded_model_is_asked_for(is_loading: bool) -> None:
    stage = sleepy("1", keep="20ms")
    stage.size = 50
    async with stage.led():
        await stage.ask_for()
        if is_loading:
            gate = await stage.deploy_until("start", "2")
        else:
            stage.is_asked_for = True
        await asyncio.sleep(0.04)
        num_looks = stage.num_looks
        await asyncio.sleep(0.06)
        assert stage.num_looks <= num_looks + 1 and stage.serving == "1"
        if is_loading:
            gate.set()
            await stage.settle()
