"""Reconciliation of a folder of models: models come and go, and no failure of a scan or of one model harms the others."""

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import BundleError
from dragoman.server.models import manager as manager_module
from dragoman.server.models.discovery import FoundModel, scan
from dragoman.server.models.manager import ModelManager
from dragoman.server.telemetry.server_metrics import VersionReading
from tests.server.conftest import until


class FakeModel:
    """A reconciler of one model that notes what it is told."""

    def __init__(self, found: FoundModel) -> None:
        self.name, self.found = found.name, [found]
        self.num_lost = self.num_runs = self.num_running = 0
        self.is_gone = self.is_stopped = False
        self.error: Exception | None = None
        self.ended = asyncio.Event()

    async def run(self) -> None:
        self.num_runs += 1
        self.num_running += 1
        assert self.num_running == 1
        try:
            await self.ended.wait()
        finally:
            self.num_running -= 1

    def update(self, found: FoundModel) -> None:
        if self.error is not None:
            raise self.error
        self.found.append(found)

    def note_removed(self) -> None:
        self.num_lost += 1

    async def settled(self) -> None: ...

    async def stop(self) -> None:
        assert not self.num_running
        self.is_stopped = True

    def readings(self) -> list[VersionReading]:
        return [VersionReading(self.name, "1", "serving")]


async def refresh(manager: ModelManager) -> None:
    await manager.scan()
    await manager.settled()


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / "bundle.json").write_text(json.dumps({"name": name, "files": {}}))


@asynccontextmanager
async def reconciled(folder: Path, *names: str, poll_seconds: float = 0.0, early: str = "") -> AsyncIterator[tuple[Any, Any]]:
    """Reconcile a folder of models; yield the reconciler and its models. `early` comes before they are led."""
    put(folder, *names)
    keeper: ModelManager = ModelManager(folder, scan(folder), lambda found: FakeModel(found), poll_seconds)  # type: ignore[arg-type, return-value]
    if early:
        put(folder, early)
        await keeper.scan()
    running = asyncio.create_task(keeper.run())
    for _ in range(5):
        await asyncio.sleep(0)
    try:
        yield keeper, keeper.models
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await keeper.stop()
    assert all(model.is_stopped for model in keeper.models.values())  # type: ignore[attr-defined]


async def test_models_come_and_go_and_come_back(tmp_path: Path) -> None:
    async with reconciled(tmp_path, "alpha", early="beta") as (keeper, models):
        assert [model.num_runs for model in models.values()] == [1, 1]
        put(tmp_path, "gamma")
        await refresh(keeper)
        assert list(models) == ["alpha", "beta", "gamma"] and models["alpha"].num_lost == 0
        alpha = models["alpha"]
        alpha.ended.set()
        await until(lambda: alpha.num_running == 0)
        alpha.ended.clear()
        await until(lambda: alpha.num_runs > 1)
        assert models["alpha"] is alpha, "its folder was back when it had just ended"
        shutil.rmtree(tmp_path / "alpha")
        await refresh(keeper)
        assert alpha.num_lost == 1 and "alpha" in models, "its requests may have to finish"
        alpha.is_gone = True
        alpha.ended.set()
        await until(lambda: "alpha" not in models)
        assert [reading.model for reading in keeper.readings()] == ["beta", "gamma"]


async def test_scan_that_fails_or_finds_nothing_changes_nothing(
    tmp_path: Path, logged: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    errors = [BundleError("gone"), BundleError("gone"), OSError("stale file handle"), ValueError("unforeseen")]

    def fail(*_: object) -> list[FoundModel]:
        raise errors.pop(0)

    folder = tmp_path / "models"
    async with reconciled(folder, "alpha", "beta") as (keeper, models):
        with monkeypatch.context() as context:
            context.setattr(manager_module, "scan", fail)
            for _ in range(4):
                await keeper.scan()
        await keeper.scan()
        folder.rename(tmp_path / "elsewhere")
        folder.mkdir()  # as where a file system was unmounted
        for _ in range(2):
            await keeper.scan()
        assert keeper.problem == f"{folder}: holds no model any more"
        assert [(model.num_lost, model.num_running) for model in models.values()] == [(0, 1), (0, 1)]
        folder.rmdir()
        (tmp_path / "elsewhere").rename(folder)
        shutil.rmtree(folder / "beta")
        await keeper.scan()
        assert [model.num_lost for model in models.values()] == [0, 1] and keeper.problem == ""
    told = [line.get("reason") for line in logged() if line["event"] == "the models folder cannot be scanned, served versions stay"]
    assert told == ["gone", "stale file handle", None, f"{folder}: holds no model any more"], "the same reason is told once"


async def test_folder_is_polled_whatever_one_model_raises(tmp_path: Path, logged: Any) -> None:
    async with reconciled(tmp_path, "alpha", "beta", poll_seconds=0.001) as (_, models):
        models["alpha"].error = ValueError("unforeseen")
        await until(lambda: [line for line in logged() if line["event"] == "a model cannot be updated, the others go on"])
        num_found = len(models["beta"].found)
        put(tmp_path, "gamma")
        await until(lambda: "gamma" in models and len(models["beta"].found) > num_found)
