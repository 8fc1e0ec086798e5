"""Changes that operators ask for: made completely or not at all, with the reason, in order, and until the server ends."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import BundleError
from dragoman.server.core.administration import ModelStatus, Operator, Requested
from dragoman.server.errors import Draining, InvalidRequest, NotInRepository, NotPossible, NotReady
from dragoman.server.repository import keeper as keeper_module
from dragoman.server.repository.administration import Administrator
from dragoman.server.repository.found import FoundModel
from dragoman.server.repository.keeper import Keeper
from dragoman.server.repository.model_file import ModelFile, Swap, Versions
from dragoman.server.repository.use import Outcomes
from dragoman.server.repository.versions import Cause, Refused
from tests.server.repository.staged import MODEL, Stage

ANNA = Operator("anna")
AT_ONCE = Swap(probation_seconds=0)
DAMAGED, WRONG = Refused(Cause.BUNDLE, "damaged"), Refused(Cause.PROOF, "another answer")


class Idle:
    """A reconciler of another model that does nothing."""

    is_gone = False

    async def run(self) -> None:
        await asyncio.Event().wait()

    def find(self, found: FoundModel) -> None: ...


class World:
    """An administrator of the models that a folder is found to hold, of which a stage is one."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.scan: Callable[[], list[FoundModel]] = lambda: [stage.found]
        make: Any = lambda found: stage.keeper if found.name == MODEL else Idle()  # noqa: E731
        self.keeper: Keeper[Any] = Keeper(Path("models"), [stage.found], make, 0.0)
        self.administrator: Administrator[Any] = Administrator(self.keeper)
        self.administrator.begin()

    def ask(self, change: str, *arguments: str) -> Coroutine[Any, Any, ModelStatus]:
        made: Coroutine[Any, Any, ModelStatus] = getattr(self.administrator, change)(ANNA, MODEL, *arguments)
        return made

    async def refuse(self, change: str, *arguments: str) -> str:
        """Return the reason why a change is not possible; nothing is requested after it that was not before."""
        before = self.status.requested
        with pytest.raises(NotPossible) as refused:
            await self.ask(change, *arguments)
        assert self.status.requested == before
        return str(refused.value)

    @property
    def status(self) -> ModelStatus:
        [status] = self.administrator.list(ANNA)
        return status


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Callable[..., AbstractAsyncContextManager[World]]:
    """Start a stage's versions with an administrator."""

    @asynccontextmanager
    async def serve(*names: str, stage: Stage | None = None, **tables: Any) -> AsyncIterator[World]:
        async with (stage or Stage(*names, file=ModelFile(swap=AT_ONCE, **tables))).led() as led:
            world = World(led)
            monkeypatch.setattr(keeper_module, "scan", lambda *_: world.scan())
            yield world
            await world.administrator.end()
            tasks = list(world.keeper._running.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    return serve


def states(status: ModelStatus) -> dict[str, str]:
    return {one.name: one.state for one in status.versions}


def default(status: ModelStatus) -> str | None:
    return next((one.name for one in status.versions if one.is_default), None)


async def test_status_lists_every_version_and_every_problem(serve: Any) -> None:
    tables = {"versions": Versions(latest=2), "labels": {"canary": "3", "old": "9"}, "weights": {"canary": 0.25}}
    async with serve("1", "2", "3", **tables) as world:
        world.stage.outcomes_of["3"] = Outcomes(7, 2, 1.0)
        status = world.status
        assert (status.name, status.is_ready, default(status)) == (MODEL, True, "2")
        assert status.problems == ("labels.old: there is no version '9'",)
        three, two, one = status.versions
        assert (three.labels, three.share, three.num_answered, three.num_failed) == (("canary",), 0.25, 7, 2)
        assert (two.share, two.version, two.state) == (0.75, "000000000002", "serving") and two.since > 1e9
        assert (one.name, one.state, one.since) == ("1", "serving", pytest.approx(two.since, abs=60))
        assert world.administrator.list(ANNA, MODEL) == [status]
        world.stage.keeper.find(replace(world.stage.found, problem="a", file_problem="b\nc", left_out=("d",)))
        assert world.status.problems[:4] == ("a", "b", "c", "d")


async def test_version_is_loaded_beside_those_of_the_policy_also_if_it_has_just_come(serve: Any) -> None:
    async with serve("1", "2") as world:
        assert states(world.status) == {"2": "serving", "1": "found"}
        status = await world.ask("load", "1")
        assert (states(status), default(status)) == ({"2": "serving", "1": "serving"}, "2")
        assert status.requested == Requested(loaded=("1",)) == (await world.ask("load", "1")).requested
        world.stage.put("0")
        assert states(await world.ask("load", "0")) == {"2": "serving", "1": "serving", "0": "serving"}
        world.stage.remove("0", "1")
        await world.administrator.refresh(ANNA)
        assert world.status.problems == ("load: there is no version '0'", "load: there is no version '1'")
        for name in ("0", "1"):
            status = await world.ask("unload", name)
        assert (status.problems, status.requested, default(status)) == ((), Requested(), "2")
        with pytest.raises(NotInRepository, match='version: "1" is not there; there: 2'):
            await world.ask("unload", "1")


async def test_version_that_cannot_be_loaded_is_no_longer_requested_and_retried_on_request(serve: Any) -> None:
    async with serve("1", "2") as world:
        world.stage.fail("prove", "1", WRONG)
        for change in ("load", "rollback"):
            assert await world.refuse(change, "1") == "version 1 is refused: another answer"
            assert world.stage.serving == "2"
        [refused] = [one for one in world.status.versions if one.state == "refused"]
        assert (refused.name, refused.cause, refused.reason) == ("1", "proof", "another answer")
        world.stage.faults.clear()
        assert states(await world.ask("load", "1")) == {"2": "serving", "1": "serving"}


async def test_change_is_not_done_while_the_version_whose_files_were_replaced_still_answers(serve: Any) -> None:
    async with serve("1") as world:
        world.stage.fail("open", "1", DAMAGED)
        world.stage.put("1")
        for change in (("reload",), ("load", "1"), ("rollback", "1")):
            assert await world.refuse(*change) == "version 1 is refused: damaged"
        assert [one.state for one in world.status.versions] == ["refused", "serving"]
        world.stage.faults.clear()
        assert (await world.ask("reload")).versions[0].version == "000000000002"


@pytest.mark.parametrize(
    ("changes", "serving", "requested"),
    [
        ("unload 3", "2", Requested(unloaded=("3",))),
        ("unload 3, load ", "3", Requested()),
        ("unload 3, load 3", "3", Requested(loaded=("3",))),
        ("unload 3, unload 2", "1", Requested(unloaded=("2", "3"))),
        ("rollback 1", "1", Requested(pinned="1")),
        ("rollback 1, unload 1", "3", Requested(unloaded=("1",))),
        ("rollback 1, rollback 3", "3", Requested(pinned="3")),
        ("unload 2, rollback 2", "2", Requested(pinned="2")),
        ("rollback 2, rollback 1, load ", "3", Requested()),
        ("unload , load ", "3", Requested()),
        ("unload ", None, Requested(is_unloaded=True)),
        ("set_label a 1, set_label b 2, set_label a 2", "3", Requested(labels={"a": "2", "b": "2"})),
        ("set_label a 1, set_label a ", "3", Requested()),
        ("set_label stable ", "3", Requested(labels={"stable": ""})),
        ("set_label stable 2, set_label stable ", "3", Requested(labels={"stable": ""})),
        ("set_label a 000000000001", "3", Requested(labels={"a": "1"})),
    ],
)
async def test_requested_and_serving_after(serve: Any, changes: str, serving: str | None, requested: Requested) -> None:
    async with serve("1", "2", "3", labels={"stable": "1"}) as world:
        for change in changes.split(", "):
            status = await world.ask(*change.split(" "))
        assert (world.stage.serving, status.requested) == (serving, requested)
        for label, version in requested.labels.items():
            assert [one.name for one in status.versions if label in one.labels] == ([version] if version else [])


async def test_last_version_is_unloaded_with_its_model_only(serve: Any) -> None:
    async with serve("1", "2") as world:
        world.stage.fail("start", "1", Refused(Cause.MEMORY, "no room"))
        assert (await world.refuse("unload", "2")).startswith("version 1 is refused: no room")
        assert await world.refuse("unload", "2") == "version: 2 is the last that can be served; unload the model to have none"
        assert world.stage.serving == "2"
        status = await world.ask("unload", "")
        assert world.stage.routes[-1] is None and not status.is_ready
        await world.stage.until(lambda: not world.stage.running())
        for change in (("unload", "2"), ("rollback", "2"), ("set_label", "stable", "2")):
            assert await world.refuse(*change) == "model: en-de is unloaded; load it first"


async def test_rollback_without_a_version_goes_back_and_never_forward(serve: Any) -> None:
    async with serve("1") as world:
        assert (await world.refuse("rollback", "")).endswith("none that answered before is there; name one of 1")
        await world.stage.deploy("2")
        await world.stage.deploy("3")
        assert (await world.ask("rollback", "")).requested.pinned == "2"
        world.stage.put("4")
        await world.ask("reload")
        assert world.stage.serving == "2", "newer ones do not count"
        await world.ask("rollback", "")
        assert world.stage.serving == "1"
        await world.ask("rollback", "3")
        await world.ask("load", "")
        assert world.stage.serving == "4"
        await world.ask("unload", "3")
        assert (await world.ask("rollback", "")).requested == Requested(unloaded=("3",), pinned="1")


@pytest.mark.parametrize(
    ("label", "version", "error", "message"),
    [
        ("1", "2", InvalidRequest, "label: 1 is what a version is called"),
        ("000000000002", "2", InvalidRequest, "label: 000000000002 is what a version is called"),
        ("a b", "2", InvalidRequest, 'label: "a b" is no name'),
        ("", "2", InvalidRequest, "label: "),
        ("x" * 65, "2", InvalidRequest, "label: "),
        ("canary", "9", NotInRepository, 'version: "9" is not there; there: 3, 2, 1'),
        ("canary", "1", NotPossible, "version 1 is refused: damaged"),
        ("canary", "3", NotPossible, "version: 3 was unloaded; load it first"),
        ("canary", "", NotInRepository, "label: canary is not there; there: none"),
    ],
)
async def test_impossible_label_changes_nothing(serve: Any, label: str, version: str, error: type[Exception], message: str) -> None:
    async with serve("1", "2", "3") as world:
        world.stage.fail("open", "1", DAMAGED)
        await world.ask("unload", "3")
        with pytest.raises(error) as caught:
            await world.ask("set_label", label, version)
        assert str(caught.value).startswith(message) and world.status.requested == Requested(unloaded=("3",))


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
async def test_unknown_name_is_refused(serve: Any, model: str, version: str, error: type[Exception], message: str) -> None:
    async with serve("1", "2", labels={"canary": "2"}) as world:
        for change in (world.administrator.load, world.administrator.unload, world.administrator.rollback):
            with pytest.raises(error) as caught:
                await change(ANNA, model, version)
            assert str(caught.value).startswith(message) and len(str(caught.value)) < 300
        assert world.status.requested == Requested()


async def test_content_that_two_versions_have_is_ambiguous(serve: Any) -> None:
    async with serve("1", "2", versions=Versions(latest=2)) as world:
        content = world.stage.version("2").content = world.stage.version("1").content
        with pytest.raises(InvalidRequest, match=f"version: {content} may be 1 or 2; ask for one by its name"):
            await world.ask("unload", content)


async def test_flat_folder_has_one_version_without_a_name(serve: Any) -> None:
    async with serve("") as world:
        [version] = world.status.versions
        assert (version.name, version.version, version.is_default) == ("000000000001", "000000000001", True)
        for change in ("rollback", "load", "unload"):
            with pytest.raises(NotInRepository, match='version: "1" is not there; there: 000000000001'):
                await world.ask(change, "1")
        assert "holds one version" in await world.refuse("rollback", version.name)
        assert "needs no label" in await world.refuse("set_label", "canary", version.name)
        status = await world.ask("unload", version.name)
        assert status.requested == Requested(is_unloaded=True) and world.stage.routes[-1] is None
        status = await world.ask("load", "")
        assert status.is_ready and status.requested == Requested()


async def test_reload_retries_and_reports_what_still_cannot_be_served(serve: Any) -> None:
    async with serve("1") as world:
        world.stage.fail("prove", "2", WRONG)
        world.stage.put("2")
        for _ in range(2):
            assert await world.refuse("reload") == "version 2 is refused: another answer"
        assert world.stage.steps("2").count("prove") == 2 and world.stage.serving == "1"
        world.stage.faults.clear()
        assert default(await world.ask("reload")) == "2"
        world.scan = lambda: [replace(world.stage.found, file_problem="model.toml: weights: no")]
        assert await world.refuse("reload") == "model.toml: weights: no"
        world.scan = lambda: [world.stage.found]
        world.stage.put("3")
        [status] = await world.administrator.refresh(ANNA)
        assert default(status) == "3"

        def fail() -> list[FoundModel]:
            raise BundleError("models: no such folder")

        world.scan = fail
        reason = "the folder of models cannot be looked at: models: no such folder"
        assert await world.refuse("reload") == reason
        with pytest.raises(NotPossible, match=reason):
            await world.administrator.refresh(ANNA)
        assert world.administrator.problem == "models: no such folder" and world.stage.serving == "3"
        world.scan = lambda: [replace(world.stage.found, name="other")]
        async with asyncio.timeout(5):
            with pytest.raises(NotPossible, match="model: its folder is gone"):
                await world.ask("reload")


async def test_models_of_others_are_neither_listed_nor_changed(serve: Any) -> None:
    async with serve("1", "2") as world:
        other, administrator = Operator("bert", frozenset({"fr-en"})), world.administrator
        assert administrator.list(other) == [] == await administrator.refresh(other)
        for name in (MODEL, "fr-en"):
            reason = f'model: "{name}" is not there; there: none'
            with pytest.raises(NotInRepository, match=reason):
                administrator.list(other, name)
            with pytest.raises(NotInRepository, match=reason):
                await administrator.unload(other, name, "")
        assert world.stage.serving == "2"


async def test_changes_of_a_model_are_made_one_after_the_other_also_if_their_callers_go(serve: Any) -> None:
    async with serve("1", "2", "3") as world:
        gate = world.stage.hold("start", "1")
        first = asyncio.create_task(world.ask("load", "1"))
        await world.stage.until(lambda: ("start", "1") in world.stage.told)
        gone = asyncio.create_task(world.ask("unload", "3"))
        await asyncio.sleep(0)
        second = asyncio.create_task(world.ask("unload", "1"))
        third = asyncio.create_task(world.ask("rollback", "2"))
        await asyncio.sleep(0)
        assert world.status.requested == Requested(loaded=("1",)), "others wait, and listing does not"
        for task in (first, gone):
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        gate.set()
        assert (await second).requested == Requested(unloaded=("1",)), "the first was made; that which had not begun was not"
        assert (await third).requested == Requested(unloaded=("1",), pinned="2") and world.stage.serving == "2"
        world.stage.gates.clear()
        gate = world.stage.hold("start", "3")
        world.stage.fail("start", "3", Refused(Cause.START, "no"))
        await world.stage.until(lambda: world.stage.running() == ["2"])
        asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # the failed change has no caller any more
        failing = asyncio.create_task(world.ask("load", "3"))
        await asyncio.sleep(0.01)
        failing.cancel()
        await asyncio.gather(failing, return_exceptions=True)
        gate.set()
        await world.stage.until(lambda: world.status.requested == Requested(unloaded=("1",), pinned="2"))


async def test_nothing_is_changed_before_the_server_serves_nor_once_it_ends(serve: Any) -> None:
    async with serve("1", "2", "3") as world:
        world.stage.hold("start", "1")
        early: Administrator[Any] = Administrator(world.keeper)
        with pytest.raises(NotReady, match="the server is starting"):
            await early.load(ANNA, MODEL, "1")
        assert early.list(ANNA) == [world.status]
        hangs = asyncio.create_task(world.ask("load", "1"))
        await world.stage.until(lambda: ("start", "1") in world.stage.told)
        waits = asyncio.create_task(world.ask("load", "2"))
        await asyncio.sleep(0)
        await world.administrator.end()
        for task in (hangs, waits, asyncio.create_task(world.ask("load", "2"))):
            async with asyncio.timeout(5):
                with pytest.raises(Draining, match="the server is shutting down"):
                    await task
        with pytest.raises(Draining):
            await world.administrator.refresh(ANNA)


async def test_each_change_is_logged_with_its_operator(serve: Any, logged: Any) -> None:
    async with serve("1", "2") as world:
        await world.ask("load", "1")
        with pytest.raises(NotInRepository):
            await world.ask("set_label", "canary", "9")
    lines = [line for line in logged() if line["event"].startswith("a change")]
    assert [(line["event"], line["change"], line["model"], line["version"], line["by"]) for line in lines] == [
        ("a change is asked for", "load", MODEL, "1", "anna"),
        ("a change is made", "load", MODEL, "1", "anna"),
        ("a change is asked for", "set_label", MODEL, "9", "anna"),
        ("a change cannot be made", "set_label", MODEL, "9", "anna"),
    ]
    assert lines[-1]["label"] == "canary" and lines[-1]["reason"] == 'version: "9" is not there; there: 2, 1'


async def test_reload_ends_although_its_model_goes_while_the_folder_is_scanned(serve: Any) -> None:
    async with serve("1") as world:
        other, loop = replace(world.stage.found, name="other"), asyncio.get_running_loop()
        scanning, is_gone = asyncio.Event(), threading.Event()

        def scan() -> list[FoundModel]:
            loop.call_soon_threadsafe(scanning.set)
            is_gone.wait(10)
            return [other]

        await world.ask("unload", "")
        await world.stage.until(lambda: not world.stage.running())
        world.scan = scan
        reload = asyncio.create_task(world.ask("reload"))
        await scanning.wait()
        world.stage.keeper.lose()
        await world.stage.until(lambda: world.stage.keeper.is_gone)
        await asyncio.sleep(0.02)
        is_gone.set()
        async with asyncio.timeout(5):
            with pytest.raises(NotPossible, match="model: its folder is gone"):
                await reload
