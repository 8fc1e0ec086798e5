"""What front ends are told of versions, and what is made of what they say; they themselves are played by hand."""

import asyncio
from collections.abc import Awaitable, Callable
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


class HandFrontEnd:
    """A front end that takes what it is told when a test says so, see `KeptFrontEnd`."""

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


class Bench:
    def __init__(self, tiny_bundle: Path, folder: Path) -> None:
        self.config = load({"models": tiny_bundle, "front_ends": 2, "host": "127.0.0.1", "port": 0})
        self.metrics = Metrics(CollectorRegistry(), LATENCY_BUCKETS)
        self.repository: Repository[Any] = Repository()
        self.bundle = Bundle.open(tiny_bundle)
        self.fronts = FrontEnds(self.config, self.repository, self.metrics, "1")
        self.fronts._folder = str(folder)
        self.fronts._handed = HandedBundles(folder / "bundles")
        self.hands = [HandFrontEnd(number, self.fronts._publish) for number in range(2)]
        self.fronts._front_ends = self.hands  # type: ignore[assignment]

    async def version(self, label: str) -> LoadedModel[Any]:
        nothing: Any = None
        self.metrics.add_engines("tiny", range(1))
        engine = make_engine(self.config, self.bundle, EnginePlan(1, ((),)), self.metrics, on_change=lambda: None)
        model: LoadedModel[Any] = LoadedModel(self.bundle, nothing, nothing, engine, label)
        await self.fronts.adopt(model)
        return model

    def endpoint(self, model: LoadedModel[Any]) -> str:
        return self.fronts._desks[model].endpoint


@pytest.fixture
def play(tiny_bundle: Path, tmp_path: Path) -> Callable[[Callable[[Bench], Awaitable[None]]], None]:
    def run(scene: Callable[[Bench], Awaitable[None]]) -> None:
        async def on_the_bench() -> None:
            bench = Bench(tiny_bundle, tmp_path)
            try:
                async with asyncio.timeout(20):
                    await scene(bench)
            finally:
                bench.fronts._front_ends = []
                await bench.fronts.flush()

        asyncio.run(on_the_bench())

    return run


Play = Callable[[Callable[[Bench], Awaitable[None]]], None]


def test_a_route_is_published_when_all_serve_it(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        one = await bench.version("1")
        bench.hands[1].is_silent = True
        publishing = asyncio.create_task(bench.fronts.publish("tiny", Route.to(one)))
        while not bench.hands[1].told:
            await asyncio.sleep(0)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not publishing.done()
        bench.hands[1].answer(bench.hands[1].told[-1])
        await publishing
        assert bench.repository.get("tiny") is one and [hand.labels for hand in bench.hands] == [["1"], ["1"]]
        assert not bench.hands[0].told[-1].models[0].is_stand_in
        bench.hands[1].is_silent = False
        await bench.fronts.publish("tiny", Route.to(one, is_stand_in=True))
        assert bench.hands[0].told[-1].models[0].is_stand_in
        assert route_of(bench.hands[0].told[-1].models[0], {bench.endpoint(one): one}) == bench.repository.find("tiny")

    play(scene)


def test_what_one_cannot_serve_is_not_published(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        one, two = await bench.version("1"), await bench.version("2")
        await bench.fronts.publish("tiny", Route.to(one))
        bench.hands[1].refused.add("2")
        with pytest.raises(CannotServe, match="front end 1: another bundle"):
            await bench.fronts.publish("tiny", Route.to(two))
        assert bench.repository.get("tiny") is one
        await bench.fronts.publish("tiny", Route.to(one))
        assert [hand.labels for hand in bench.hands] == [["1"], ["1"]]

    play(scene)


def test_one_models_route_that_cannot_be_served_is_not_blamed_on_another_published_with_it(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        one, bad, good = await bench.version("1"), await bench.version("bad"), await bench.version("good")
        await bench.fronts.publish("tiny", Route.to(one))
        for hand in bench.hands:
            hand.refused.add("bad")
        results = await asyncio.gather(
            bench.fronts.publish("tiny", Route.to(bad)), bench.fronts.publish("other", Route.to(good)), return_exceptions=True
        )
        assert isinstance(results[0], CannotServe) and results[1] is None

    play(scene)


def test_one_that_does_not_answer_cannot_serve(play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(front_ends, "SERVE_SECONDS", 0.01)

    async def scene(bench: Bench) -> None:
        bench.hands[0].is_silent = True
        with pytest.raises(CannotServe, match="front end 0 does not answer"):
            await bench.fronts.publish("tiny", Route.to(await bench.version("1")))
        bench.hands[0].state = State()
        await bench.fronts.publish("tiny", Route.to(await bench.version("2")))

    play(scene)


def test_a_version_is_kept_everywhere_until_it_is_to_end_and_ends_when_all_have_released_it(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        one, two = await bench.version("1"), await bench.version("2")
        await bench.fronts.publish("tiny", Route.to(one))
        await bench.fronts.publish("tiny", Route.to(two))
        first = bench.endpoint(one)
        assert all(first in hand.told[-1].kept for hand in bench.hands)
        releasing = asyncio.create_task(bench.fronts.until_released(one))
        await asyncio.sleep(0)
        assert all(first not in hand.told[-1].kept and hand.labels == ["2"] for hand in bench.hands)
        bench.hands[0].release(first)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not releasing.done()
        bench.hands[1].release(first)
        await releasing
        assert one not in bench.fronts._desks and bench.fronts.outcomes(one) == Outcomes()

    play(scene)


def test_a_release_that_is_told_while_a_route_is_published_hides_no_problem(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        old, one, two = [await bench.version(label) for label in ("0", "1", "2")]
        await bench.fronts.publish("tiny", Route.to(old))
        await bench.fronts.publish("tiny", Route.to(one))
        bench.hands[0].refused.add("2")
        publishing = asyncio.create_task(bench.fronts.publish("tiny", Route.to(two)))
        await asyncio.sleep(0)
        releasing = asyncio.create_task(bench.fronts.until_released(old))
        with pytest.raises(CannotServe, match="front end 0"):
            await publishing
        releasing.cancel()
        await asyncio.gather(releasing, return_exceptions=True)

    play(scene)


def test_what_front_ends_tell_of_requests_is_added_up(play: Play) -> None:
    async def scene(bench: Bench) -> None:
        one = await bench.version("1")
        for _ in bench.hands:
            bench.fronts._note_used(Used({bench.endpoint(one): (3, 1, 0.5), "ipc://gone": (9, 9, 9.0)}))
        assert bench.fronts.outcomes(one) == Outcomes(6, 2, 1.0)

    play(scene)
