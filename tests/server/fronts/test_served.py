"""What a front end has of the versions that are served: read, attached to and given up as it is told."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import Bundle, BundleError
from dragoman.server.config import load
from dragoman.server.engine_plan import EnginePlan
from dragoman.server.engines import engine_settings
from dragoman.server.errors import Unavailable
from dragoman.server.fronts import served
from dragoman.server.fronts.messages import Desk, Released, Serve, Served, Serving, Used
from dragoman.server.fronts.served import ServedVersions
from dragoman.server.repository.models import Repository
from dragoman.server.repository.use import Outcomes
from tests.server.repository.copies import copy


class HandEngine:
    """An attachment that is as ready as it is told to be."""

    def __init__(self, desk: Desk) -> None:
        self.desk, self.settings, self.num_replicas = desk, desk.settings, desk.num_replicas
        self.device = "cpu"
        self.is_begun = self.is_stopped = False
        self.attached = asyncio.Event()
        self.attached.set()

    def begin(self) -> None:
        self.is_begun = True

    async def until_ready(self) -> None:
        await self.attached.wait()

    async def stop(self) -> None:
        self.is_stopped = True


class Bench:
    """What is served, and what was said of it."""

    def __init__(self, folder: Path, tiny_bundle: Path) -> None:
        self.folder, self._tiny = folder, tiny_bundle
        self.repository: Repository[Any] = Repository()
        self.said: list[Any] = []
        self.engines: dict[str, HandEngine] = {}
        self.prepared: list[str] = []
        self.num_changes = 0
        self._config = load({"models": tiny_bundle})

        def attach(name: str, desk: Desk) -> Any:
            self.engines[desk.endpoint] = HandEngine(desk)
            return self.engines[desk.endpoint]

        def note_change() -> None:
            self.num_changes += 1

        self.served = ServedVersions(
            self.repository,
            attach,
            prepare=lambda model: self.prepared.append(model.label),
            on_change=note_change,
            say=self.said.append,
        )

    def desk(self, label: str, *, is_ready: bool = True) -> Desk:
        """Put down a bundle, and return the desk of a version that is made of it."""
        directory = self.folder / label
        if not directory.exists():
            copy(self._tiny, directory, "tiny")
        (settings,) = engine_settings(self._config, Bundle.open(directory), EnginePlan(1, ((),)))
        return Desk(f"desk-{label}", label, str(directory), settings, 1, is_ready)

    def damaged_desk(self, label: str) -> Desk:
        desk = self.desk(label)
        (tokenizer, *_) = (Path(desk.bundle) / "tokenizer").iterdir()
        tokenizer.write_bytes(b"?" * tokenizer.stat().st_size)
        return desk

    def serve(self, serial: int, *desks: Desk, kept: list[str] | None = None) -> Serve:
        models = [Served("tiny", desks[0].endpoint, list(desks), {}, {}, "request")] if desks else []
        return Serve(serial, models, kept or [])

    async def take(self, serve: Serve) -> Any:
        """Tell it what to serve, and return what it says to that."""
        self.served.take(serve)
        await self.until(lambda: any(isinstance(one, Serving) and one.serial == serve.serial for one in self.said))
        return next(one for one in self.said if isinstance(one, Serving) and one.serial == serve.serial)

    async def until(self, is_so: Callable[[], object]) -> None:
        async with asyncio.timeout(20):
            while not is_so():
                await asyncio.sleep(0.001)

    @property
    def labels(self) -> list[str]:
        return [model.label for model in self.repository.versions()]


@pytest.fixture
def play(tmp_path: Path, tiny_bundle: Path) -> Callable[[Callable[[Bench], Awaitable[None]]], None]:
    def run(scene: Callable[[Bench], Awaitable[None]]) -> None:
        async def on_the_bench() -> None:
            await scene(Bench(tmp_path, tiny_bundle))

        asyncio.run(on_the_bench())

    return run


Play = Callable[[Callable[[Bench], Awaitable[None]]], None]


def test_what_is_served_from_the_start_is_there_before_anybody_listens(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        serve = bench.serve(0, bench.desk("1"))
        bench.served.read(serve)
        assert bench.labels == ["1"] and not bench.engines["desk-1"].is_begun
        await bench.served.begin(serve)
        assert bench.engines["desk-1"].is_begun and bench.said == []

    play(scene)


def test_a_new_version_is_attached_to_before_it_is_served_and_the_old_one_released(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.served.read(bench.serve(0, bench.desk("1")))
        two = bench.desk("2")
        assert await bench.take(bench.serve(1, two)) == Serving(1)
        assert bench.labels == ["2"] and bench.prepared == ["2"] and bench.engines["desk-2"].is_begun
        await bench.until(lambda: Released("desk-1") in bench.said)
        assert bench.engines["desk-1"].is_stopped and not bench.engines["desk-2"].is_stopped
        assert bench.num_changes == 1

    play(scene)


def test_what_may_have_to_answer_again_is_kept_and_not_read_again(play: Play) -> None:
    """In a flat folder its files are gone when it has to."""

    async def scene(bench: Bench) -> None:
        one = bench.desk("1")
        bench.served.read(bench.serve(0, one))
        await bench.take(bench.serve(1, bench.desk("2"), kept=["desk-1", "desk-2"]))
        (bench.folder / "1" / "bundle.json").unlink()
        engine = bench.engines["desk-1"]
        assert not engine.is_stopped
        assert await bench.take(bench.serve(2, one, kept=["desk-1"])) == Serving(2)
        assert bench.labels == ["1"] and bench.engines["desk-1"] is engine
        await bench.until(lambda: Released("desk-2") in bench.said)
        assert Released("desk-1") not in bench.said

    play(scene)


def test_a_version_is_released_once_no_request_holds_it_and_told_once(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.served.read(bench.serve(0, bench.desk("1")))
        async with bench.repository.hold("tiny"):
            two = bench.desk("2")
            for serial in (1, 2, 3):
                await bench.take(bench.serve(serial, two))
            assert Released("desk-1") not in bench.said
        await bench.until(lambda: Released("desk-1") in bench.said)
        assert bench.said.count(Released("desk-1")) == 1
        (used,) = (one for one in bench.said if isinstance(one, Used))
        assert used.outcomes["desk-1"][:2] == (1, 0), "what became of its last request is told before"
        assert bench.said.index(used) < bench.said.index(Released("desk-1"))

    play(scene)


def test_a_damaged_copy_is_not_served(play: Play, logged: Any) -> None:
    async def scene(bench: Bench) -> None:
        bench.served.read(bench.serve(0, bench.desk("1")))
        answer = await bench.take(bench.serve(1, bench.damaged_desk("2")))
        assert answer.serial == 1 and "SHA-256" in answer.problem
        assert bench.labels == ["1"] and bench.num_changes == 0
        await bench.until(lambda: Released("desk-2") in bench.said)
        assert not bench.engines["desk-2"].is_begun and not bench.engines["desk-1"].is_stopped
        assert await bench.take(bench.serve(2, bench.desk("1"))) == Serving(2)

    play(scene)


def test_of_two_of_which_one_cannot_be_read_none_is_served_and_both_are_released(play: Play, logged: Any) -> None:
    async def scene(bench: Bench) -> None:
        one, good, bad = bench.desk("1"), bench.desk("2"), bench.desk("3")
        (bench.folder / "3" / "bundle.json").write_text(json.dumps({"name": "tiny"}))
        bench.served.read(bench.serve(0, one))
        assert (await bench.take(bench.serve(1, good, bad))).problem
        assert bench.labels == ["1"]
        assert await bench.take(bench.serve(2, one)) == Serving(2)
        await bench.until(
            lambda: {Released("desk-2"), Released("desk-3")} <= {one for one in bench.said if isinstance(one, Released)}
        )

    play(scene)


def test_at_the_start_such_a_copy_is_refused(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        with pytest.raises(BundleError, match="SHA-256"):
            bench.served.read(bench.serve(0, bench.damaged_desk("1")))

    play(scene)


def test_who_does_not_attach_in_time_is_served_all_the_same(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served, "ATTACH_SECONDS", 0.01)

    async def scene(bench: Bench) -> None:
        bench.served.read(bench.serve(0, bench.desk("1")))
        taking = bench.desk("2")
        attach = bench.served._attach

        def slowly(name: str, desk: Desk) -> Any:
            engine = attach(name, desk)
            bench.engines[desk.endpoint].attached.clear()
            return engine

        bench.served._attach = slowly  # type: ignore[method-assign, assignment]
        assert await bench.take(bench.serve(1, taking)) == Serving(1)
        assert bench.labels == ["2"]

    play(scene)


def test_the_same_bundle_at_another_desk_is_not_read_again(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        one = bench.desk("1")
        bench.served.read(bench.serve(0, one))
        again = Desk("desk-again", "1", one.bundle, one.settings, 2, True)
        before = bench.repository.get("tiny")
        await bench.take(bench.serve(1, again))
        after = bench.repository.get("tiny")
        assert (
            after.tokenizers is before.tokenizers and after.engine is not before.engine and after.max_slots == 2 * before.max_slots
        )

    play(scene)


def test_a_model_that_is_no_longer_served_is_unknown(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.served.read(bench.serve(0, bench.desk("1")))
        assert await bench.take(bench.serve(1)) == Serving(1)
        assert bench.repository.all() == []
        await bench.until(lambda: Released("desk-1") in bench.said)

    play(scene)


def test_what_became_of_requests_is_told_once(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        bench.served.read(bench.serve(0, bench.desk("1")))
        bench.served.tell_used()
        assert bench.said == []
        with pytest.raises(Unavailable):
            async with bench.repository.hold("tiny"):
                raise Unavailable("the engine ended")
        async with bench.repository.hold("tiny"):
            pass
        bench.served.tell_used()
        bench.served.tell_used()
        (used,) = bench.said
        assert Outcomes(*used.outcomes["desk-1"])._replace(seconds=0.0) == Outcomes(1, 1, 0.0)

    play(scene)
