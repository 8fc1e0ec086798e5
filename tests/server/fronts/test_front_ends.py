"""Publication of routes to frontend workers, which are fakes that answer as a test says."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dragoman.export.bundle import Bundle
from dragoman.server.config import LATENCY_BUCKETS, load
from dragoman.server.engine_plan import EnginePlan
from dragoman.server.engines import make_engine
from dragoman.server.fronts import front_ends
from dragoman.server.fronts.front_ends import FrontEnds
from dragoman.server.fronts.handed_bundles import HandedBundles
from dragoman.server.fronts.kept import endpoints
from dragoman.server.fronts.messages import Serve, Serving, State, Used
from dragoman.server.fronts.served import route_of
from dragoman.server.repository.loaded import LoadedModel
from dragoman.server.repository.models import CannotServe, Repository, Route
from dragoman.server.repository.use import Outcomes
from dragoman.server.telemetry.metrics import Metrics


class FakeFrontEnd:
    """A `KeptFrontEnd` that refuses some labels, or does not answer."""

    def __init__(self, number: int, on_change: Callable[[], None]) -> None:
        self.number, self._on_change = number, on_change
        self.state = State(is_listening=True, is_ready=True)
        self.serving = Serving(0)
        self.holding: set[str] = set()
        self.told: list[Serve] = []
        self.refused: set[str] = set()
        self.is_silent = False
        self.counted: dict[Any, Any] = {}

    @property
    def is_listening(self) -> bool:
        return self.state.is_listening

    def has_served(self, serial: int) -> bool:
        return self.serving.serial >= serial

    def serve(self, serve: Serve) -> None:
        self.told.append(serve)
        self.holding |= endpoints(serve)
        if not self.is_silent:
            asyncio.get_running_loop().call_soon(self.answer, serve)

    def answer(self, serve: Serve) -> None:
        labels = {desk.label for served in serve.models for desk in served.desks}
        self.serving = Serving(serve.serial, "another bundle" if labels & self.refused else "")
        self._on_change()

    def release(self, endpoint: str) -> None:
        self.holding.discard(endpoint)
        self._on_change()

    @property
    def labels(self) -> list[str]:
        return [desk.label for served in self.told[-1].models for desk in served.desks]


class World:
    def __init__(self, tiny_bundle: Path, folder: Path) -> None:
        self.config = load({"models": tiny_bundle, "front_ends": 2, "host": "127.0.0.1", "port": 0})
        self.metrics = Metrics(CollectorRegistry(), LATENCY_BUCKETS)
        self.metrics.add_engines("tiny", range(1))
        self.repository: Repository[Any] = Repository()
        self.bundle = Bundle.open(tiny_bundle)
        self.fronts = FrontEnds(self.config, self.repository, self.metrics, "1")
        self.fronts._folder = str(folder)
        self.fronts._handed = HandedBundles(folder / "bundles")
        self.fakes = [FakeFrontEnd(number, self.fronts._publish) for number in range(2)]
        self.fronts._front_ends = self.fakes  # type: ignore[assignment]

    async def versions(self, *labels: str) -> list[LoadedModel[Any]]:
        nothing: Any = None
        found = []
        for label in labels:
            engine = make_engine(self.config, self.bundle, EnginePlan(1, ((),)), self.metrics, on_change=lambda: None)
            found.append(LoadedModel(self.bundle, nothing, nothing, engine, label))
            await self.fronts.adopt(found[-1])
        return found

    async def publish(self, model: LoadedModel[Any], name: str = "tiny", **fields: Any) -> None:
        await self.fronts.publish(name, Route.to(model, **fields))

    def endpoint(self, model: LoadedModel[Any]) -> str:
        return self.fronts._desks[model].endpoint


@asynccontextmanager
async def world_of(bundle: Path, folder: Path) -> AsyncIterator[World]:
    world = World(bundle, folder)
    try:
        async with asyncio.timeout(20):
            yield world
    finally:
        world.fronts._front_ends = []
        await world.fronts.flush()


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_route_is_published_when_all_serve_it(tiny_bundle: Path, tmp_path: Path) -> None:
    async with world_of(tiny_bundle, tmp_path) as world:
        [one] = await world.versions("1")
        first, second = world.fakes
        second.is_silent = True
        publishing = asyncio.create_task(world.publish(one))
        await turns()
        assert not publishing.done()
        second.answer(second.told[-1])
        await publishing
        assert world.repository.get("tiny") is one and first.labels == second.labels == ["1"]
        assert not first.told[-1].models[0].is_stand_in
        second.is_silent = False
        await world.publish(one, is_stand_in=True)
        assert first.told[-1].models[0].is_stand_in
        assert route_of(first.told[-1].models[0], {world.endpoint(one): one}) == world.repository.find("tiny")
        for _ in world.fakes:
            world.fronts._note_used(Used({world.endpoint(one): (3, 1, 0.5), "ipc://gone": (9, 9, 9.0)}))
        assert world.fronts.outcomes(one) == Outcomes(6, 2, 1.0)


async def test_refused_route_is_not_published_and_blamed_on_no_other_model(tiny_bundle: Path, tmp_path: Path) -> None:
    async with world_of(tiny_bundle, tmp_path) as world:
        old, one, bad, good = await world.versions("0", "1", "bad", "good")
        await world.publish(old)
        await world.publish(one)
        world.fakes[1].refused.add("bad")
        publishing = asyncio.create_task(world.publish(bad))
        await asyncio.sleep(0)
        releasing = asyncio.create_task(world.fronts.until_released(old))  # told meanwhile, it hides no problem
        with pytest.raises(CannotServe, match="front end 1: another bundle"):
            await publishing
        releasing.cancel()
        await asyncio.gather(releasing, return_exceptions=True)
        assert world.repository.get("tiny") is one
        await world.publish(one)
        assert [fake.labels for fake in world.fakes] == [["1"], ["1"]]
        both = asyncio.gather(world.publish(bad), world.publish(good, "other"), return_exceptions=True)
        refused, published = await both
        assert isinstance(refused, CannotServe) and published is None


async def test_worker_that_does_not_answer_cannot_serve_unless_it_is_down(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front_ends, "SERVE_SECONDS", 0.01)
    async with world_of(tiny_bundle, tmp_path) as world:
        one, two = await world.versions("1", "2")
        world.fakes[0].is_silent = True
        with pytest.raises(CannotServe, match="front end 0 does not answer"):
            await world.publish(one)
        world.fakes[0].state = State()
        await world.publish(two)


async def test_version_is_kept_everywhere_until_it_ends_and_ends_when_all_have_released_it(
    tiny_bundle: Path, tmp_path: Path
) -> None:
    async with world_of(tiny_bundle, tmp_path) as world:
        one, two = await world.versions("1", "2")
        await world.publish(one)
        await world.publish(two)
        first = world.endpoint(one)
        assert all(first in fake.told[-1].kept for fake in world.fakes)
        releasing = asyncio.create_task(world.fronts.until_released(one))
        await asyncio.sleep(0)
        assert all(first not in fake.told[-1].kept and fake.labels == ["2"] for fake in world.fakes)
        for fake in world.fakes:
            await turns()
            assert not releasing.done()
            fake.release(first)
        await releasing
        assert world.fronts.outcomes(one) == Outcomes()
