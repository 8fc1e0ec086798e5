"""All models of a folder: those that come are led, those that go end, and whatever a look finds, the others are unharmed."""

import asyncio
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import BundleError
from dragoman.server.repository import keeper as keeper_module
from dragoman.server.repository.found import FoundModel
from dragoman.server.repository.keeper import Keeper
from dragoman.server.repository.layout import scan
from dragoman.server.telemetry.version_metrics import VersionReading


class HandModel:
    """A model's keeper that notes what it is told; it is gone when a test says so."""

    def __init__(self, found: FoundModel) -> None:
        self.name, self.found = found.name, [found]
        self.num_lost = 0
        self.num_runs = 0
        self.num_running = 0
        self.is_gone = False
        self.is_stopped = False
        self.gone = asyncio.Event()

    async def run(self) -> None:
        self.num_runs += 1
        self.num_running += 1
        assert self.num_running == 1, "one leads it"
        try:
            await self.gone.wait()
        finally:
            self.num_running -= 1

    def find(self, found: FoundModel) -> None:
        self.found.append(found)
        self.is_gone = False

    def lose(self) -> None:
        self.num_lost += 1

    async def settled(self) -> None: ...

    async def stop(self) -> None:
        assert not self.num_running
        self.is_stopped = True

    def readings(self) -> list[VersionReading]:
        return [VersionReading(self.name, "1", "serving")]


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "bundle.json").write_text(json.dumps({"name": name, "files": {}}))


def play(folder: Path, scene: Callable[[Keeper[Any], dict[str, HandModel]], Awaitable[None]], poll_seconds: float = 0.0) -> None:
    async def run() -> None:
        made: dict[str, HandModel] = {}

        def make(found: FoundModel) -> Any:
            made[found.name] = HandModel(found)
            return made[found.name]

        keeper: Keeper[Any] = Keeper(folder, scan(folder), make, poll_seconds)
        running = asyncio.create_task(keeper.run())
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        try:
            await scene(keeper, made)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await keeper.stop()
        assert all(model.is_stopped for model in keeper.models.values())
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_models_come_and_go(tmp_path: Path) -> None:
    put(tmp_path, "alpha")

    async def scene(keeper: Keeper[Any], made: dict[str, HandModel]) -> None:
        assert made["alpha"].num_running == 1
        put(tmp_path, "beta")
        await keeper.refresh()
        assert list(keeper.models) == ["alpha", "beta"] and made["alpha"].num_lost == 0
        shutil.rmtree(tmp_path / "alpha")
        await keeper.refresh()
        assert made["alpha"].num_lost == 1 and list(keeper.models) == ["alpha", "beta"], "it may have something to finish"
        made["alpha"].is_gone = True
        made["alpha"].gone.set()
        while "alpha" in keeper.models:
            await asyncio.sleep(0)
        assert [reading.model for reading in keeper.readings()] == ["beta"]

    play(tmp_path, scene)


def test_a_folder_that_is_back_when_its_model_has_just_gone_is_led_again(tmp_path: Path) -> None:
    put(tmp_path, "alpha", "beta")

    async def scene(keeper: Keeper[Any], made: dict[str, HandModel]) -> None:
        alpha = made["alpha"]
        alpha.gone.set()
        await keeper.look()
        alpha.gone.clear()
        while alpha.num_runs < 2:
            await asyncio.sleep(0)
        assert keeper.models["alpha"] is alpha

    play(tmp_path, scene)


def test_a_model_that_comes_before_the_others_are_led_is_led_once(tmp_path: Path) -> None:
    put(tmp_path, "alpha")

    async def run() -> None:
        keeper: Keeper[Any] = Keeper(tmp_path, scan(tmp_path), lambda found: HandModel(found), 0.0)  # type: ignore[arg-type, return-value]
        put(tmp_path, "beta")
        await keeper.look()  # by a hangup while the first models start
        running = asyncio.create_task(keeper.run())
        for _ in range(5):
            await asyncio.sleep(0)
        assert [model.num_runs for model in keeper.models.values()] == [1, 1]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await keeper.stop()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_a_folder_that_cannot_be_looked_at_changes_nothing(
    tmp_path: Path, logged: Callable[[], list[dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path, "alpha")
    errors: list[Exception] = [BundleError("gone"), BundleError("gone"), OSError("stale file handle"), ValueError("what is this")]

    async def scene(keeper: Keeper[Any], made: dict[str, HandModel]) -> None:
        def fail(*_: object) -> list[FoundModel]:
            raise errors.pop(0)

        with monkeypatch.context() as context:
            context.setattr(keeper_module, "scan", fail)
            for _ in range(4):
                await keeper.look()
        await keeper.look()
        assert made["alpha"].num_lost == 0 and made["alpha"].num_running == 1

    play(tmp_path, scene)
    told = [line for line in logged() if line["event"] == "cannot look at the models, those that are served stay"]
    assert [line.get("reason") for line in told] == ["gone", "stale file handle", None], "the same reason is told once"


def test_a_folder_in_which_all_at_once_is_nothing_is_not_believed(
    tmp_path: Path, logged: Callable[[], list[dict[str, Any]]]
) -> None:
    put(tmp_path / "models", "alpha", "beta")

    async def scene(keeper: Keeper[Any], made: dict[str, HandModel]) -> None:
        (tmp_path / "models").rename(tmp_path / "elsewhere")
        (tmp_path / "models").mkdir()  # where something was mounted
        await keeper.look()
        await keeper.look()
        assert [model.num_lost for model in made.values()] == [0, 0]
        (tmp_path / "models").rmdir()
        (tmp_path / "elsewhere").rename(tmp_path / "models")
        shutil.rmtree(tmp_path / "models" / "beta")
        await keeper.look()
        assert [model.num_lost for model in made.values()] == [0, 1]

    play(tmp_path / "models", scene)
    told = [line["reason"] for line in logged() if line["event"].startswith("cannot look")]
    assert told == [f"{tmp_path / 'models'}: holds no model any more"]


def test_it_looks_by_itself(tmp_path: Path) -> None:
    put(tmp_path, "alpha")

    async def scene(keeper: Keeper[Any], made: dict[str, HandModel]) -> None:
        put(tmp_path, "beta")
        async with asyncio.timeout(10):
            while "beta" not in made:
                await asyncio.sleep(0.001)

    play(tmp_path, scene, poll_seconds=0.001)


def test_it_looks_on_whatever_a_look_runs_into(tmp_path: Path, logged: Callable[[], list[dict[str, Any]]]) -> None:
    put(tmp_path, "alpha")

    async def scene(keeper: Keeper[Any], made: dict[str, HandModel]) -> None:
        def fail(_: FoundModel) -> None:
            raise ValueError("what is this")

        made["alpha"].find = fail  # type: ignore[method-assign]
        async with asyncio.timeout(10):
            while not logged():
                await asyncio.sleep(0.001)
            del made["alpha"].find  # type: ignore[method-assign]
            put(tmp_path, "beta")
            while "beta" not in made:
                await asyncio.sleep(0.001)

    play(tmp_path, scene, poll_seconds=0.001)


def test_a_file_that_may_be_half_written_is_used_at_once_only_for_who_asks(tmp_path: Path) -> None:
    put(tmp_path, "alpha")

    async def scene(keeper: Keeper[Any], made: dict[str, HandModel]) -> None:
        (tmp_path / "alpha" / "model.toml").write_text("[settings]\nmax_slots = 3")
        await keeper.look(is_at_once=False)
        assert made["alpha"].found[-1].file.settings.max_slots is None
        await keeper.look()
        assert made["alpha"].found[-1].file.settings.max_slots == 3

    play(tmp_path, scene)


def test_what_one_model_cannot_take_note_of_keeps_no_other_from_it(tmp_path: Path) -> None:
    put(tmp_path, "a", "b")

    async def scene(keeper: Keeper[Any], made: dict[str, HandModel]) -> None:
        def raise_it(_: FoundModel) -> None:
            raise RuntimeError("nobody foresaw it")

        made["a"].find = raise_it  # type: ignore[method-assign]
        await keeper.look()
        assert len(made["b"].found) == 2

    play(tmp_path, scene)
