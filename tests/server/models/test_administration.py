"""Changes that operators ask for: made completely or not at all, with the reason, in order, and until the server ends."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import BundleError
from dragoman.server.errors import Draining, InvalidRequest, NotInRepository, NotPossible, NotReady
from dragoman.server.models import manager as manager_module
from dragoman.server.models.administration import Administrator
from dragoman.server.models.discovery import FoundModel
from dragoman.server.models.manager import ModelManager
from dragoman.server.models.model_file import ModelFile, Swap, Versions
from dragoman.server.models.use import Outcomes
from dragoman.server.service.administration import ModelStatus, Operator, Requested
from tests.server.conftest import until
from tests.server.models.staged import MODEL, Stage

ANNA = Operator("anna")
AT_ONCE = Swap(probation_seconds=0)


class Idle:
    """A reconciler of another model that does nothing."""

    is_gone = False

    async def run(self) -> None:
        await asyncio.Event().wait()

    def update(self, found: FoundModel) -> None: ...


class World:
    """An administrator of the models that a folder is found to hold, of which a stage is one."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.scan: Callable[[], list[FoundModel]] = lambda: [stage.found]
        make: Any = lambda found: stage.keeper if found.name == MODEL else Idle()  # noqa: E731
        self.keeper: ModelManager = ModelManager(Path("models"), [stage.found], make, 0.0)
        self.administrator: Administrator = Administrator(self.keeper)
        self.administrator.begin()

    def ask(self, change: str, *arguments: str) -> Coroutine[Any, Any, ModelStatus]:
        made: Coroutine[Any, Any, ModelStatus] = getattr(self.administrator, change)(ANNA, MODEL, *arguments)
        return made

    async def refuse(self, change: str, *arguments: str) -> str:
        """Return the reason why a change is not possible; nothing is requested after it that was not before."""
        before = self.status.requested
        with pytest.raises((NotPossible, NotInRepository)) as refused:
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
            monkeypatch.setattr(manager_module, "scan", lambda *_: world.scan())
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
        world.stage.keeper.update(replace(world.stage.found, problem="a", file_problem="b\nc", left_out=("d",)))
        assert world.status.problems[:4] == ("a", "b", "c", "d")


# Versions; changes, each with the version that serves then, or the reason why it is not possible; what is requested in the end.
LAST = "! version: 2 is the last that can be served; unload the model to have none"
NONE_LEFT = "! version 1 is refused: no memory; versions: none can be served of 1, 2"
UNLOADED, REFUSED = "! model: en-de is unloaded; load it first", "! version 2 is refused: another answer"
DAMAGED, NOTHING, SECOND = "! version 1 is refused: damaged", Requested(is_unloaded=True), Requested(pinned="2")
CHANGES = [
    ("1 2 3", "unload 3 > 2", Requested(unloaded=("3",))),
    ("1 2 3", "unload 3 > 2 | load > 3", Requested()),
    ("1 2 3", "unload 3 > 2 | load 3 > 3", Requested(loaded=("3",))),
    ("1 2 3", "unload 3 > 2 | unload 2 > 1", Requested(unloaded=("2", "3"))),
    ("1 2 3", "rollback 1 > 1", Requested(pinned="1")),
    ("1 2 3", "rollback 1 > 1 | unload 1 > 3", Requested(unloaded=("1",))),
    ("1 2 3", "rollback 1 > 1 | rollback 3 > 3", Requested(pinned="3")),
    ("1 2 3", "unload 2 > 3 | rollback 2 > 2", Requested(pinned="2")),
    ("1 2 3", "rollback 2 > 2 | rollback 1 > 1 | load > 3", Requested()),
    ("1 2 3", "unload > None | load > 3", Requested()),
    ("1 2 3", "set_label a 1 > 3 | set_label b 2 > 3 | set_label a 2 > 3", Requested(labels={"a": "2", "b": "2"})),
    ("1 2 3", "set_label a 1 > 3 | set_label a > 3", Requested()),
    ("1 2 3", "set_label stable > 3", Requested(labels={"stable": ""})),
    ("1 2 3", "set_label stable 2 > 3 | set_label stable > 3", Requested(labels={"stable": ""})),
    ("1 2 3", "set_label a 000000000001 > 3", Requested(labels={"a": "1"})),
    # The last version is unloaded with its model only.
    ("1 2", f"fail start 1 | unload 2 > {NONE_LEFT} | unload 2 > {LAST} | unload > None", NOTHING),
    ("1 2", f"unload > None | unload 2 > {UNLOADED} | rollback 2 > {UNLOADED} | set_label a 2 > {UNLOADED}", NOTHING),
    # A rollback without a version goes back, and never forward.
    ("1", "rollback > ! version: none that answered before is there; name one of 1 | put 2 | reload > 2", Requested()),
    ("1", "put 2 | reload > 2 | put 3 | reload > 3 | rollback > 2 | put 4 | reload > 2 | rollback > 1", Requested(pinned="1")),
    ("1", "put 2 | reload > 2 | put 3 | reload > 3 | rollback > 2 | rollback 3 > 3 | load > 3 | rollback > 2", SECOND),
    ("1", "put 2 | reload > 2 | put 3 | reload > 3 | unload 2 > 3 | rollback > 1", Requested(unloaded=("2",), pinned="1")),
    # A version may just have come; one that is refused is no longer requested, and is tried again on request.
    ("1 2", "load 1 > 2 | put 0 | load 0 > 2 | load 1 > 2", Requested(loaded=("0", "1"))),
    ("1 2", 'load 1 > 2 | remove 1 | reload > 2 | unload 1 > 2 | unload 1 > ! version: "1" is not there; there: 2', Requested()),
    ("1", f"fail prove 2 | put 2 | load 2 > {REFUSED} | rollback 2 > {REFUSED} | mend | load 2 > 2", Requested(loaded=("2",))),
    ("1", f"fail prove 2 | put 2 | reload > {REFUSED} | reload > {REFUSED} | mend | reload > 2", Requested()),
    # A change is not done while the version whose files were replaced still answers.
    ("1", f"fail open 1 | put 1 | reload > {DAMAGED} | load 1 > {DAMAGED} | rollback 1 > {DAMAGED}", Requested()),
    ("1", f"fail open 1 | put 1 | reload > {DAMAGED} | mend | reload > 1", Requested()),
]


@pytest.mark.parametrize(("versions", "changes", "requested"), CHANGES, ids=[" ".join(row[:2]) for row in CHANGES])
async def test_serving_and_requested_after(serve: Any, versions: str, changes: str, requested: Requested) -> None:
    labels = {"labels": {"stable": "1"}} if "3" in versions else {}
    async with serve(*versions.split(), **labels) as world:
        for change, _, outcome in (part.partition(" > ") for part in changes.split(" | ")):
            name, *arguments = change.split()
            match name:
                case "put":
                    world.stage.put(*arguments)
                case "remove":
                    world.stage.remove(*arguments)
                case "fail":
                    world.stage.fail(*arguments)
                case "mend":
                    world.stage.faults.clear()
                case _:
                    given = arguments if name == "reload" else [*arguments, *[""] * (1 + (name == "set_label") - len(arguments))]
                    if outcome.startswith("! "):
                        assert await world.refuse(name, *given) == outcome[2:]
                    else:
                        await world.ask(name, *given)
                        assert str(world.stage.serving) == outcome
        status = world.status
        assert status.requested == requested
        for label, version in requested.labels.items():
            assert [one.name for one in status.versions if label in one.labels] == ([version] if version else [])
        assert all(states(status)[name] == "serving" for name in requested.loaded)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (("set_label", "1", "2"), InvalidRequest, "label: 1 is what a version is called"),
        (("set_label", "000000000002", "2"), InvalidRequest, "label: 000000000002 is what a version is called"),
        (("set_label", "a b", "2"), InvalidRequest, 'label: "a b" is no name'),
        (("set_label", "", "2"), InvalidRequest, "label: "),
        (("set_label", "x" * 65, "2"), InvalidRequest, "label: "),
        (("set_label", "canary", "9"), NotInRepository, 'version: "9" is not there; there: 3, 2, 1'),
        (("set_label", "canary", "1"), NotPossible, "version 1 is refused: damaged"),
        (("set_label", "canary", "3"), NotPossible, "version: 3 was unloaded; load it first"),
        (("set_label", "canary", ""), NotInRepository, "label: canary is not there; there: stable"),
        *((("version", name), NotInRepository, f"version: {told}") for name, told in {
            "9\x1b[2J\n": '"9\\u001b[2J\\n" is not there; there: 3, 2, 1',
            "stable": '"stable" is not there; there: 3, 2, 1',
            "é" * 128: '"',
        }.items()),
        (("version", "x" * 129), InvalidRequest, "version: 129 characters; at most 128 are allowed"),
        (("version", "0" * 12), InvalidRequest, "version: 000000000000 may be 1 or 2; ask for one by its name"),
        (("model", "de-en"), NotInRepository, 'model: "de-en" is not there; there: en-de'),
        (("model", ""), NotInRepository, 'model: "" is not there; there: en-de'),
        (("model", "x" * 129), InvalidRequest, "model: 129 characters; at most 128 are allowed"),
    ],
)  # fmt: skip
async def test_impossible_change_changes_nothing(serve: Any, change: tuple[str, ...], error: type[Exception], message: str) -> None:
    async with serve("1", "2", "3", labels={"stable": "2"}) as world:
        world.stage.fail("open", "1")
        await world.ask("unload", "3")
        kind, *arguments = change
        if arguments[0] == "0" * 12:
            await world.refuse("load", "1")
            world.stage.version("1").content = world.stage.version("2").content = arguments[0]
        changes = [change] if kind == "set_label" else [(name, *arguments) for name in ("load", "unload", "rollback")]
        for name, *given in changes:
            with pytest.raises(error) as caught:
                await (getattr(world.administrator, name)(ANNA, *given, "") if kind == "model" else world.ask(name, *given))
            assert str(caught.value).startswith(message) and len(str(caught.value)) < 300
        assert world.status.requested == Requested(unloaded=("3",))


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


async def test_problem_of_the_folder_is_reported_and_changes_nothing(serve: Any) -> None:
    async with serve("1", "2") as world:
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


async def test_changes_of_a_model_are_made_one_after_the_other_also_if_their_callers_go(serve: Any) -> None:
    async with serve("1", "2", "3") as world:
        gate = world.stage.hold("start", "1")
        first = asyncio.create_task(world.ask("load", "1"))
        await until(lambda: ("start", "1") in world.stage.told)
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


async def test_nothing_is_changed_before_the_server_serves_nor_once_it_ends(serve: Any) -> None:
    async with serve("1", "2", "3") as world:
        world.stage.hold("start", "1")
        early: Administrator = Administrator(world.keeper)
        with pytest.raises(NotReady, match="the server is starting"):
            await early.load(ANNA, MODEL, "1")
        assert early.list(ANNA) == [world.status]
        hangs = asyncio.create_task(world.ask("load", "1"))
        await until(lambda: ("start", "1") in world.stage.told)
        waits = asyncio.create_task(world.ask("load", "2"))
        await asyncio.sleep(0)
        await world.administrator.end()
        for task in (hangs, waits, asyncio.create_task(world.ask("load", "2"))):
            async with asyncio.timeout(5):
                with pytest.raises(Draining, match="the server is shutting down"):
                    await task
        with pytest.raises(Draining):
            await world.administrator.refresh(ANNA)
