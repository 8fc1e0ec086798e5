"""Versions in a frontend worker: read, attached to, served, kept and released as it is told."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import Bundle, BundleError
from dragoman.server.config import load
from dragoman.server.engine_plan import EnginePlan
from dragoman.server.engines import engine_settings
from dragoman.server.errors import Unavailable
from dragoman.server.fronts.messages import Desk, Released, Serve, Served, Serving, Used
from dragoman.server.fronts.served import ServedVersions
from dragoman.server.repository.models import Repository
from dragoman.server.repository.use import Outcomes
from tests.server.conftest import until
from tests.server.repository.copies import copy


class FakeEngine:
    """An attachment that is ready."""

    device = "cpu"

    def __init__(self, desk: Desk) -> None:
        self.settings, self.num_replicas = desk.settings, desk.num_replicas
        self.is_begun = self.is_stopped = False

    def begin(self) -> None:
        self.is_begun = True

    async def until_ready(self) -> None: ...

    async def stop(self) -> None:
        self.is_stopped = True


class Worker:
    """A frontend worker's versions, and the messages that it has sent."""

    def __init__(self, folder: Path, tiny_bundle: Path) -> None:
        self.folder, self._tiny = folder, tiny_bundle
        self.repository: Repository[Any] = Repository()
        self.said: list[Any] = []
        self.engines: dict[str, FakeEngine] = {}
        self.prepared: list[str] = []
        self.changes: list[list[str]] = []
        self._config = load({"models": tiny_bundle})

        def attach(name: str, desk: Desk) -> Any:
            self.engines[desk.endpoint] = FakeEngine(desk)
            return self.engines[desk.endpoint]

        self.served = ServedVersions(
            self.repository,
            attach,
            prepare=lambda model: self.prepared.append(model.label),
            on_change=lambda: self.changes.append(self.labels),
            say=self.said.append,
        )

    def desk(self, label: str, *, damaged: bool = False, endpoint: str = "", num_replicas: int = 1) -> Desk:
        directory = self.folder / label
        if not directory.exists():
            copy(self._tiny, directory, "tiny")
        (settings,) = engine_settings(self._config, Bundle.open(directory), EnginePlan(1, ((),)))
        if damaged:
            (tokenizer, *_) = (directory / "tokenizer").iterdir()
            tokenizer.write_bytes(b"?" * tokenizer.stat().st_size)
        return Desk(endpoint or f"desk-{label}", label, str(directory), settings, num_replicas, True)

    def serve(self, serial: int, *desks: Desk, kept: tuple[str, ...] = ()) -> Serve:
        models = [Served("tiny", desks[0].endpoint, list(desks), {}, {}, "request")] if desks else []
        return Serve(serial, models, list(kept))

    async def take(self, serve: Serve) -> Any:
        """Tell it what to serve, and return its answer."""
        self.served.take(serve)
        answers: Callable[[], list[Any]] = lambda: [  # noqa: E731
            one for one in self.said if isinstance(one, Serving) and one.serial == serve.serial
        ]
        await until(answers)
        return answers()[0]

    @property
    def released(self) -> set[str]:
        return {one.endpoint for one in self.said if isinstance(one, Released)}

    @property
    def labels(self) -> list[str]:
        return [model.label for model in self.repository.versions()]


@pytest.fixture
def worker(tmp_path: Path, tiny_bundle: Path) -> Worker:
    return Worker(tmp_path, tiny_bundle)


async def test_new_version_is_attached_to_before_it_is_served_and_the_old_one_released(worker: Worker) -> None:
    first = worker.serve(0, worker.desk("1"))
    worker.served.read(first)
    assert worker.labels == ["1"] and not worker.engines["desk-1"].is_begun, "it is served from the start"
    await worker.served.begin(first)
    assert worker.engines["desk-1"].is_begun and worker.said == []
    assert await worker.take(worker.serve(1, worker.desk("2"))) == Serving(1)
    assert worker.labels == ["2"] == worker.prepared and worker.engines["desk-2"].is_begun and worker.changes == [["2"]]
    await until(lambda: worker.released == {"desk-1"})
    assert worker.engines["desk-1"].is_stopped and not worker.engines["desk-2"].is_stopped
    assert await worker.take(worker.serve(2)) == Serving(2)
    assert worker.repository.all() == []
    await until(lambda: "desk-2" in worker.released)


async def test_kept_version_answers_again_without_being_read(worker: Worker) -> None:
    """In a flat folder its files are gone by then."""
    one = worker.desk("1")
    worker.served.read(worker.serve(0, one))
    await worker.take(worker.serve(1, worker.desk("2"), kept=("desk-1", "desk-2")))
    (worker.folder / "1" / "bundle.json").unlink()
    engine = worker.engines["desk-1"]
    assert not engine.is_stopped
    assert await worker.take(worker.serve(2, one, kept=("desk-1",))) == Serving(2)
    assert worker.labels == ["1"] and worker.engines["desk-1"] is engine
    await until(lambda: worker.released == {"desk-2"})


async def test_outcomes_are_reported_once_and_before_the_release_of_their_version(worker: Worker) -> None:
    worker.served.read(worker.serve(0, worker.desk("1")))
    worker.served.tell_used()
    assert worker.said == []
    with pytest.raises(Unavailable):
        async with worker.repository.hold("tiny"):
            raise Unavailable("the engine ended")
    async with worker.repository.hold("tiny"):
        pass
    for _ in range(2):
        worker.served.tell_used()
    (used,) = worker.said
    assert Outcomes(*used.outcomes["desk-1"])._replace(seconds=0.0) == Outcomes(1, 1, 0.0)
    two = worker.desk("2")
    async with worker.repository.hold("tiny"):
        for serial in (1, 2, 3):
            await worker.take(worker.serve(serial, two))
        assert not worker.released
    await until(lambda: worker.released)
    assert worker.said.count(Released("desk-1")) == 1
    (_, used) = (message for message in worker.said if isinstance(message, Used))
    assert used.outcomes["desk-1"][:2] == (1, 0) and worker.said.index(used) < worker.said.index(Released("desk-1"))


async def test_damaged_copy_is_not_served_nor_the_versions_published_with_it(worker: Worker, logged: Any) -> None:
    with pytest.raises(BundleError, match="SHA-256"):
        worker.served.read(worker.serve(0, worker.desk("0", damaged=True)))
    worker.served.read(worker.serve(0, worker.desk("1")))
    answer = await worker.take(worker.serve(1, worker.desk("2"), worker.desk("3", damaged=True)))
    assert answer.serial == 1 and "SHA-256" in answer.problem
    assert worker.labels == ["1"] and worker.changes == []
    assert not worker.engines["desk-2"].is_begun and not worker.engines["desk-1"].is_stopped
    assert await worker.take(worker.serve(2, worker.desk("1"))) == Serving(2)
    await until(lambda: worker.released == {"desk-2", "desk-3"})
