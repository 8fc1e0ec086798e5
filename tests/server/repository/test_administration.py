"""What operators ask for: it is done, or nothing is, with the reason; whoever goes, whoever else asks, whenever the server ends."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import BundleError
from dragoman.server.core.administration import ModelStatus, Operator, Requested
from dragoman.server.errors import Draining, InvalidRequest, NotInRepository, NotPossible, NotReady
from dragoman.server.repository import keeper as keeper_module
from dragoman.server.repository import loader, model_keeper
from dragoman.server.repository.administration import Administrator
from dragoman.server.repository.found import FoundModel
from dragoman.server.repository.keeper import Keeper
from dragoman.server.repository.model_file import ModelFile, Swap, Versions
from dragoman.server.repository.use import Outcomes
from dragoman.server.repository.versions import Cause, Refused
from tests.server.repository.staged import MODEL, Stage

ANNA = Operator("anna")
AT_ONCE = Swap(probation_seconds=0)
NEWEST = ModelFile(swap=AT_ONCE)

Scene = Callable[[Administrator[Any]], Awaitable[None]]


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_keeper, "WATCH_SECONDS", 0.002)
    monkeypatch.setattr(loader, "LOOK_SECONDS", 0.001)


class Idle:
    """Leads another model nowhere."""

    is_gone = False

    async def run(self) -> None:
        await asyncio.Event().wait()

    def find(self, found: FoundModel) -> None: ...


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[Stage, Scene], None]:
    """Lead a stage's versions while an administrator is asked for something."""

    def play(stage: Stage, scene: Scene) -> None:
        monkeypatch.setattr(keeper_module, "scan", lambda *_: [stage.found])

        async def run() -> None:
            async with stage.led():

                def make(found: FoundModel) -> Any:
                    return stage.keeper if found.name == MODEL else Idle()

                keeper: Keeper[Any] = Keeper(Path("models"), [stage.found], make, 0.0)
                administrator = Administrator(keeper)
                administrator.begin()
                await scene(administrator)
                await administrator.end()

        asyncio.run(run())

    return play


def states(status: ModelStatus) -> dict[str, str]:
    return {one.name: one.state for one in status.versions}


def default(status: ModelStatus) -> str | None:
    return next((one.name for one in status.versions if one.is_default), None)


def test_everything_that_lies_there_is_told(play: Any) -> None:
    file = ModelFile(swap=AT_ONCE, versions=Versions(latest=2), labels={"canary": "3", "old": "9"}, weights={"canary": 0.25})
    stage = Stage("1", "2", "3", file=file)
    stage.outcomes_of["3"] = Outcomes(7, 2, 1.0)

    async def scene(administrator: Administrator[Any]) -> None:
        [status] = administrator.list(ANNA)
        assert (status.name, status.is_ready, default(status)) == (MODEL, True, "2")
        assert status.problems == ("labels.old: there is no version '9'",)
        three, two, one = status.versions
        assert (three.labels, three.share, three.num_answered, three.num_failed) == (("canary",), 0.25, 7, 2)
        assert (two.share, two.version, two.state) == (0.75, "000000000002", "serving")
        assert two.since > 1e9
        assert (one.name, one.state, one.since) == ("1", "serving", pytest.approx(two.since, abs=60))
        assert administrator.list(ANNA, MODEL) == [status]

    play(stage, scene)


def test_what_is_wrong_with_a_folder_is_told(play: Any) -> None:
    stage = Stage("1")

    async def scene(administrator: Administrator[Any]) -> None:
        stage.keeper.find(replace(stage.found, problem="a", file_problem="b\nc", left_out=("d",)))
        [status] = administrator.list(ANNA)
        assert status.problems == ("a", "b", "c", "d")

    play(stage, scene)


def test_a_version_is_loaded_beside_the_policys(play: Any) -> None:
    stage = Stage("1", "2", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        assert states(administrator.list(ANNA)[0]) == {"2": "serving", "1": "found"}
        status = await administrator.load(ANNA, MODEL, "1")
        assert (states(status), default(status)) == ({"2": "serving", "1": "serving"}, "2")
        assert status.requested == Requested(loaded=("1",))
        assert (await administrator.load(ANNA, MODEL, "1")).requested == status.requested

    play(stage, scene)


def test_a_version_that_has_just_come_is_loaded(play: Any) -> None:
    stage = Stage("1", "2", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        stage.put("0")
        status = await administrator.load(ANNA, MODEL, "0")
        assert states(status) == {"2": "serving", "1": "found", "0": "serving"}

    play(stage, scene)


def test_a_version_that_cannot_be_loaded_is_not_asked_for_any_more_and_can_be_asked_for_again(play: Any) -> None:
    stage = Stage("1", "2", file=NEWEST)
    stage.fail("prove", "1", Refused(Cause.PROOF, "another answer"))

    async def scene(administrator: Administrator[Any]) -> None:
        with pytest.raises(NotPossible, match="version 1 is refused: another answer"):
            await administrator.load(ANNA, MODEL, "1")
        [status] = administrator.list(ANNA)
        assert (status.requested, stage.serving) == (Requested(), "2")
        [refused] = [one for one in status.versions if one.state == "refused"]
        assert (refused.name, refused.cause, refused.reason) == ("1", "proof", "another answer")
        stage.faults.clear()
        assert states(await administrator.load(ANNA, MODEL, "1")) == {"2": "serving", "1": "serving"}

    play(stage, scene)


def test_a_version_is_not_done_with_while_the_one_that_its_files_have_replaced_answers(play: Any) -> None:
    stage = Stage("1", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        stage.fail("open", "1", Refused(Cause.BUNDLE, "damaged"))
        stage.put("1")
        for change in (
            administrator.reload(ANNA, MODEL),
            administrator.load(ANNA, MODEL, "1"),
            administrator.rollback(ANNA, MODEL, "1"),
        ):
            with pytest.raises(NotPossible, match="version 1 is refused: damaged"):
                await change
        status = administrator.list(ANNA)[0]
        assert [one.state for one in status.versions] == ["refused", "serving"] and status.requested == Requested()
        stage.faults.clear()
        assert (await administrator.reload(ANNA, MODEL)).versions[0].version == "000000000002"

    play(stage, scene)


def test_a_version_is_unloaded_and_the_next_takes_its_place(play: Any) -> None:
    stage = Stage("1", "2", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        status = await administrator.unload(ANNA, MODEL, "2")
        assert (stage.serving, default(status), status.requested.unloaded) == ("1", "1", ("2",))
        status = await administrator.load(ANNA, MODEL, "")
        assert (stage.serving, status.requested) == ("2", Requested())
        await administrator.unload(ANNA, MODEL, "2")
        status = await administrator.load(ANNA, MODEL, "2")
        assert (stage.serving, status.requested) == ("2", Requested(loaded=("2",)))

    play(stage, scene)


def test_what_was_loaded_and_is_gone_can_be_asked_for_no_more(play: Any) -> None:
    stage = Stage("1", "2", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        await administrator.load(ANNA, MODEL, "1")
        stage.remove("1")
        await administrator.refresh(ANNA)
        assert administrator.list(ANNA)[0].problems == ("load: there is no version '1'",)
        status = await administrator.unload(ANNA, MODEL, "1")
        assert (status.problems, status.requested, default(status)) == ((), Requested(), "2")
        with pytest.raises(NotInRepository, match='version: "1" is not there; there: 2'):
            await administrator.unload(ANNA, MODEL, "1")

    play(stage, scene)


def test_the_last_version_is_unloaded_with_its_model_only(play: Any) -> None:
    stage = Stage("1", "2", file=NEWEST)
    stage.fail("start", "1", Refused(Cause.MEMORY, "no room"))

    async def scene(administrator: Administrator[Any]) -> None:
        with pytest.raises(NotPossible, match="version 1 is refused: no room"):
            await administrator.unload(ANNA, MODEL, "2")
        assert (stage.serving, administrator.list(ANNA)[0].requested) == ("2", Requested())
        with pytest.raises(NotPossible, match="version: 2 is the last that can be served; unload the model to have none"):
            await administrator.unload(ANNA, MODEL, "2")
        status = await administrator.unload(ANNA, MODEL, "")
        assert stage.routes[-1] is None and not status.is_ready and status.requested == Requested(is_unloaded=True)
        await stage.until(lambda: not stage.running())
        for change in (
            administrator.unload(ANNA, MODEL, "2"),
            administrator.rollback(ANNA, MODEL, "2"),
            administrator.set_label(ANNA, MODEL, "stable", "2"),
        ):
            with pytest.raises(NotPossible, match="model: en-de is unloaded; load it first"):
                await change
        assert default(await administrator.load(ANNA, MODEL, "")) == "2"

    play(stage, scene)


def test_a_rollback_goes_back_and_holds_until_it_is_lifted(play: Any) -> None:
    stage = Stage("1", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        with pytest.raises(NotPossible, match=r"none that answered before is there; name one of 1$"):
            await administrator.rollback(ANNA, MODEL, "")
        for name in ("2", "3"):
            stage.put(name)
            await stage.settle()
        assert (await administrator.rollback(ANNA, MODEL, "")).requested.pinned == "2"
        stage.put("4")
        await administrator.reload(ANNA, MODEL)
        assert stage.serving == "2", "newer ones do not count"
        await administrator.rollback(ANNA, MODEL, "")
        assert stage.serving == "1", "and further back, never forward"
        status = await administrator.rollback(ANNA, MODEL, "3")
        assert (stage.serving, status.requested.pinned) == ("3", "3")
        await administrator.load(ANNA, MODEL, "")
        assert stage.serving == "4"
        await administrator.unload(ANNA, MODEL, "3")
        assert (await administrator.rollback(ANNA, MODEL, "")).requested == Requested(unloaded=("3",), pinned="1"), "3 was unloaded"

    play(stage, scene)


def test_a_rollback_to_what_cannot_be_served_leaves_all_as_it_was(play: Any) -> None:
    stage = Stage("1", "2", file=NEWEST)
    stage.fail("open", "1", Refused(Cause.BUNDLE, "damaged"))

    async def scene(administrator: Administrator[Any]) -> None:
        with pytest.raises(NotPossible, match="version 1 is refused: damaged"):
            await administrator.rollback(ANNA, MODEL, "1")
        assert (stage.serving, administrator.list(ANNA)[0].requested) == ("2", Requested())

    play(stage, scene)


def test_a_version_that_is_rolled_back_to_and_unloaded_is_not_gone_back_to(play: Any) -> None:
    stage = Stage("1", "2", "3", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        await administrator.rollback(ANNA, MODEL, "1")
        status = await administrator.unload(ANNA, MODEL, "1")
        assert (stage.serving, status.requested) == ("3", Requested(unloaded=("1",)))

    play(stage, scene)


def test_labels_are_put_on_versions_and_taken_away(play: Any) -> None:
    stage = Stage("1", "2", file=ModelFile(swap=AT_ONCE, labels={"stable": "2"}))

    async def scene(administrator: Administrator[Any]) -> None:
        status = await administrator.set_label(ANNA, MODEL, "canary", "1")
        assert {one.name: one.labels for one in status.versions} == {"2": ("stable",), "1": ("canary",)}
        status = await administrator.set_label(ANNA, MODEL, "stable", "1")
        assert [one.labels for one in status.versions if one.name == "1"] == [("canary", "stable")]
        assert status.requested.labels == {"canary": "1", "stable": "1"}
        await administrator.set_label(ANNA, MODEL, "canary", "")
        status = await administrator.set_label(ANNA, MODEL, "stable", "")
        assert [one.labels for one in status.versions if one.name == "2"] == [()]
        assert status.requested.labels == {"stable": ""}, "the file's is hidden, one of an operator's is forgotten"
        with pytest.raises(NotInRepository, match="label: stable is not there; there: none"):
            await administrator.set_label(ANNA, MODEL, "stable", "")

    play(stage, scene)


@pytest.mark.parametrize(
    ("label", "version", "error", "message"),
    [
        ("1", "2", InvalidRequest, "label: 1 is what a version is called"),
        ("000000000002", "2", InvalidRequest, "label: 000000000002 is what a version is called"),
        ("a b", "2", InvalidRequest, 'label: "a b" is no name'),
        ("", "2", InvalidRequest, "label: "),
        ("x" * 65, "2", InvalidRequest, "label: "),
        ("canary", "9", NotInRepository, 'version: "9" is not there; there: 2, 1'),
        ("canary", "1", NotPossible, "version 1 is refused: damaged"),
    ],
)
def test_labels_that_cannot_be_change_nothing(play: Any, label: str, version: str, error: type[Exception], message: str) -> None:
    stage = Stage("1", "2", file=NEWEST)
    stage.fail("open", "1", Refused(Cause.BUNDLE, "damaged"))

    async def scene(administrator: Administrator[Any]) -> None:
        with pytest.raises(error) as caught:
            await administrator.set_label(ANNA, MODEL, label, version)
        assert str(caught.value).startswith(message)
        assert administrator.list(ANNA)[0].requested == Requested()

    play(stage, scene)


def test_a_label_of_what_was_unloaded_is_refused(play: Any) -> None:
    stage = Stage("1", "2", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        await administrator.unload(ANNA, MODEL, "2")
        with pytest.raises(NotPossible, match="version: 2 was unloaded; load it first"):
            await administrator.set_label(ANNA, MODEL, "canary", "2")

    play(stage, scene)


def test_reloading_tries_again_and_says_what_still_cannot_be_served(play: Any) -> None:
    stage = Stage("1", file=NEWEST)
    stage.fail("prove", "2", Refused(Cause.PROOF, "another answer"))

    async def scene(administrator: Administrator[Any]) -> None:
        stage.put("2")
        for _ in range(2):
            with pytest.raises(NotPossible, match="version 2 is refused: another answer"):
                await administrator.reload(ANNA, MODEL)
        assert stage.steps("2").count("prove") == 2 and stage.serving == "1"
        stage.faults.clear()
        assert default(await administrator.reload(ANNA, MODEL)) == "2"

    play(stage, scene)


def test_a_file_that_cannot_be_used_is_said_by_reload(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage("1", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        monkeypatch.setattr(keeper_module, "scan", lambda *_: [replace(stage.found, file_problem="model.toml: weights: no")])
        with pytest.raises(NotPossible, match=r"model\.toml: weights: no"):
            await administrator.reload(ANNA, MODEL)
        assert stage.serving == "1"

    play(stage, scene)


def test_a_folder_that_cannot_be_looked_at_is_said(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage("1", file=NEWEST)

    def scan(*_: object) -> None:
        raise BundleError("models: no such folder")

    async def scene(administrator: Administrator[Any]) -> None:
        monkeypatch.setattr(keeper_module, "scan", scan)
        for change in (administrator.reload(ANNA, MODEL), administrator.refresh(ANNA)):
            with pytest.raises(NotPossible, match="the folder of models cannot be looked at: models: no such folder"):
                await change
        assert administrator.problem == "models: no such folder" and stage.serving == "1"

    play(stage, scene)


def test_a_refresh_answers_when_all_is_done(play: Any) -> None:
    stage = Stage("1", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        stage.put("2")
        [status] = await administrator.refresh(ANNA)
        assert default(status) == "2"

    play(stage, scene)


@pytest.mark.parametrize(
    ("model", "version", "error", "message"),
    [
        ("de-en", "", NotInRepository, 'model: "de-en" is not there; there: en-de'),
        ("", "", NotInRepository, 'model: "" is not there; there: en-de'),
        ("x" * 129, "", InvalidRequest, "model: 129 characters; at most 128 are allowed"),
        (MODEL, "x" * 129, InvalidRequest, "version: 129 characters; at most 128 are allowed"),
        (MODEL, "9\x1b[2J\n", NotInRepository, 'version: "9\\u001b[2J\\n" is not there; there: 2, 1'),
        (MODEL, "canary", NotInRepository, 'version: "canary" is not there; there: 2, 1'),
        (MODEL, "é" * 128, NotInRepository, 'version: "'),
    ],
)
def test_names_of_nothing_are_refused(play: Any, model: str, version: str, error: type[Exception], message: str) -> None:
    stage = Stage("1", "2", file=ModelFile(swap=AT_ONCE, labels={"canary": "2"}))

    async def scene(administrator: Administrator[Any]) -> None:
        for change in (administrator.load, administrator.unload, administrator.rollback):
            if version or model != MODEL:
                with pytest.raises(error) as caught:
                    await change(ANNA, model, version)
                assert str(caught.value).startswith(message) and len(str(caught.value)) < 300
        assert administrator.list(ANNA)[0].requested == Requested()

    play(stage, scene)


def test_a_version_is_meant_by_its_content_where_that_is_one(play: Any) -> None:
    stage = Stage("1", "2", file=ModelFile(swap=AT_ONCE, versions=Versions(latest=2)))

    async def scene(administrator: Administrator[Any]) -> None:
        content = stage.version("1").content
        assert (await administrator.set_label(ANNA, MODEL, "canary", content)).requested.labels == {"canary": "1"}
        stage.version("2").content = content  # the same files twice
        with pytest.raises(InvalidRequest, match=f"version: {content} may be 1 or 2; ask for one by its name"):
            await administrator.unload(ANNA, MODEL, content)

    play(stage, scene)


def test_a_flat_folder_has_one_version_that_has_no_name(play: Any) -> None:
    stage = Stage("", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        [status] = administrator.list(ANNA)
        [version] = status.versions
        assert (version.name, version.version, version.is_default) == ("000000000001", "000000000001", True)
        for change in (administrator.rollback, administrator.load, administrator.unload):
            with pytest.raises(NotInRepository, match='version: "1" is not there; there: 000000000001'):
                await change(ANNA, MODEL, "1")
        with pytest.raises(NotPossible, match="holds one version"):
            await administrator.rollback(ANNA, MODEL, version.name)
        with pytest.raises(NotPossible, match="needs no label"):
            await administrator.set_label(ANNA, MODEL, "canary", version.name)
        status = await administrator.unload(ANNA, MODEL, version.name)
        assert status.requested == Requested(is_unloaded=True) and stage.routes[-1] is None
        status = await administrator.load(ANNA, MODEL, "")
        assert status.is_ready and status.requested == Requested()

    play(stage, scene)


def test_models_of_others_are_neither_seen_nor_changed(play: Any) -> None:
    stage = Stage("1", "2", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        other = Operator("bert", frozenset({"fr-en"}))
        assert administrator.list(other) == [] == await administrator.refresh(other)
        for name in (MODEL, "fr-en"):
            with pytest.raises(NotInRepository, match=f'model: "{name}" is not there; there: none'):
                administrator.list(other, name)
            with pytest.raises(NotInRepository, match=f'model: "{name}" is not there; there: none'):
                await administrator.unload(other, name, "")
        assert stage.serving == "2"

    play(stage, scene)


def test_changes_of_a_model_are_made_one_after_the_other(play: Any) -> None:
    stage = Stage("1", "2", "3", file=NEWEST)
    gate = stage.hold("start", "1")

    async def scene(administrator: Administrator[Any]) -> None:
        first = asyncio.create_task(administrator.load(ANNA, MODEL, "1"))
        await stage.until(lambda: ("start", "1") in stage.told)
        second = asyncio.create_task(administrator.unload(ANNA, MODEL, "1"))
        third = asyncio.create_task(administrator.rollback(ANNA, MODEL, "2"))
        await asyncio.sleep(0)
        assert administrator.list(ANNA)[0].requested == Requested(loaded=("1",)), "others wait, and who only looks does not"
        gate.set()
        assert (await first).requested == Requested(loaded=("1",))
        assert (await second).requested == Requested(unloaded=("1",))
        assert (await third).requested == Requested(unloaded=("1",), pinned="2")
        assert stage.serving == "2"

    play(stage, scene)


def test_who_goes_in_the_middle_ends_nothing_and_who_goes_before_his_turn_asks_for_nothing(play: Any) -> None:
    stage = Stage("1", "2", "3", file=NEWEST)
    gate = stage.hold("start", "1")

    async def scene(administrator: Administrator[Any]) -> None:
        begun = asyncio.create_task(administrator.rollback(ANNA, MODEL, "1"))
        await stage.until(lambda: ("start", "1") in stage.told)
        waiting = asyncio.create_task(administrator.rollback(ANNA, MODEL, "2"))
        await asyncio.sleep(0)
        for task in (begun, waiting):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        gate.set()
        await stage.until(lambda: stage.serving == "1")
        status = await administrator.load(ANNA, MODEL, "2")
        assert status.requested == Requested(loaded=("2",), pinned="1")

    play(stage, scene)


def test_what_fails_after_its_caller_has_gone_is_undone_all_the_same(play: Any) -> None:
    stage = Stage("1", "2", file=NEWEST)
    gate = stage.hold("start", "1")
    stage.fail("start", "1", Refused(Cause.START, "no"))

    async def scene(administrator: Administrator[Any]) -> None:
        begun = asyncio.create_task(administrator.load(ANNA, MODEL, "1"))
        await stage.until(lambda: ("start", "1") in stage.told)
        begun.cancel()
        await asyncio.gather(begun, return_exceptions=True)
        gate.set()
        await stage.until(lambda: administrator.list(ANNA)[0].requested == Requested())

    play(stage, scene)


def test_nothing_is_changed_before_the_server_serves_nor_when_it_ends(play: Any) -> None:
    stage = Stage("1", "2", "3", file=NEWEST)
    stage.hold("start", "1")

    async def scene(begun: Administrator[Any]) -> None:
        early: Administrator[Any] = Administrator(begun._keeper)
        with pytest.raises(NotReady, match="the server is starting"):
            await early.load(ANNA, MODEL, "1")
        assert early.list(ANNA) == begun.list(ANNA)
        hangs = asyncio.create_task(begun.load(ANNA, MODEL, "1"))
        await stage.until(lambda: ("start", "1") in stage.told)
        waits = asyncio.create_task(begun.load(ANNA, MODEL, "2"))
        await asyncio.sleep(0)
        await begun.end()
        for task in (hangs, waits):
            with pytest.raises(Draining, match="the server is shutting down"):
                async with asyncio.timeout(5):
                    await task
        with pytest.raises(Draining):
            await begun.refresh(ANNA)

    play(stage, scene)


def test_a_model_whose_folder_goes_in_the_middle_is_said_to_be_gone(play: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage("1", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        monkeypatch.setattr(keeper_module, "scan", lambda *_: [replace(stage.found, name="other")])
        with pytest.raises(NotPossible, match="model: its folder is gone"):
            async with asyncio.timeout(5):
                await administrator.reload(ANNA, MODEL)

    play(stage, scene)


def test_each_change_is_logged_with_who_asked_for_it(play: Any, logged: Any) -> None:
    stage = Stage("1", "2", file=NEWEST)

    async def scene(administrator: Administrator[Any]) -> None:
        await administrator.load(ANNA, MODEL, "1")
        with pytest.raises(NotInRepository):
            await administrator.set_label(ANNA, MODEL, "canary", "9")

    play(stage, scene)
    lines = [line for line in logged() if line["event"].startswith("a change")]
    assert [(line["event"], line["change"], line["model"], line["version"], line["by"]) for line in lines] == [
        ("a change is asked for", "load", MODEL, "1", "anna"),
        ("a change is made", "load", MODEL, "1", "anna"),
        ("a change is asked for", "set_label", MODEL, "9", "anna"),
        ("a change cannot be made", "set_label", MODEL, "9", "anna"),
    ]
    assert lines[-1]["label"] == "canary" and lines[-1]["reason"] == 'version: "9" is not there; there: 2, 1'


def test_a_model_that_goes_while_its_folder_is_looked_at_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    stage = Stage("1", file=NEWEST)
    other = replace(stage.found, name="other")
    folder = [stage.found, other]
    looking, is_gone = asyncio.Event(), threading.Event()

    async def run() -> None:
        loop = asyncio.get_running_loop()

        def scan(*_: object) -> list[FoundModel]:
            found = list(folder)
            loop.call_soon_threadsafe(looking.set)
            is_gone.wait(10)
            return found

        monkeypatch.setattr(keeper_module, "scan", scan)
        async with stage.led():
            models: Any = {MODEL: stage.keeper, "other": Idle()}
            keeper: Keeper[Any] = Keeper(Path("models"), folder, lambda found: models[found.name], 0.0)
            administrator = Administrator(keeper)
            administrator.begin()
            await administrator.unload(ANNA, MODEL, "")
            await stage.until(lambda: not stage.running())
            folder.remove(stage.found)
            reload = asyncio.create_task(administrator.reload(ANNA, MODEL))
            await looking.wait()
            stage.keeper.lose()
            await stage.until(lambda: stage.keeper.is_gone)
            await asyncio.sleep(0.05)
            is_gone.set()
            async with asyncio.timeout(5):
                with pytest.raises(NotPossible, match="model: its folder is gone"):
                    await reload
            await administrator.end()

    asyncio.run(run())
