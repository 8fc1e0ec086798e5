"""Replicas under supervision: real processes with a tiny model before a desk, and what is left when some are gone."""

import asyncio
import os
import signal
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dragoman.server.dispatch.replicated_engine import ReplicatedEngine
from dragoman.server.engine.messages import Finished, Request, ScoreRequest, Statistics
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.errors import Unavailable
from dragoman.server.workers.supervisor import EngineCannotStart, RestartPolicy
from tests.server.conftest import until
from tests.server.test_supervisor import folder as folder

QUICK = RestartPolicy(initial_backoff_seconds=0.05, max_backoff_seconds=0.2)
LONG = 20


class Watched:
    """A replicated engine and what it told."""

    def __init__(self, *bundles: Path, policy: RestartPolicy = QUICK) -> None:
        settings = EngineSettings("", "", 1, 2, 100, 1000, 100, False, "critical", "json")
        self.statistics: list[Statistics] = []
        self.engine_statistics: dict[int, Statistics] = {}
        self.readiness: list[bool] = []
        self.restarts: list[int] = []
        self.engine = ReplicatedEngine(
            "tiny",
            [msgspec.structs.replace(settings, bundle=str(bundle)) for bundle in bundles],
            policy,
            on_statistics=self.statistics.append,
            on_engine_statistics=self.engine_statistics.__setitem__,
            on_change=lambda: self.readiness.append(self.engine.is_ready),
            on_engine_change=lambda _: None,
            on_restart=self.restarts.append,
        )

    async def started(self) -> "Watched":
        await self.engine.start()
        await self.until_all_ready()
        return self

    @property
    def process_ids(self) -> list[int | None]:
        return [replica.process_id for replica in self.engine.pool.replicas]

    def kill(self, index: int, number: signal.Signals = signal.SIGKILL) -> None:
        process_id = self.process_ids[index]
        assert process_id is not None
        os.kill(process_id, number)

    async def generate(self, source: tuple[int, ...] = (5, 1), max_new_tokens: int = LONG) -> Finished:
        request = Request(self.engine.next_id(), list(source), max_new_tokens, time.monotonic())
        return await self.engine.generate(request)

    async def until_all_ready(self) -> None:
        await until(lambda: all(replica.is_ready for replica in self.engine.pool.replicas))


def answers(outcomes: list[Any]) -> list[Any]:
    return [one.answers if isinstance(one, Finished) else type(one) for one in outcomes]


async def test_replicas_answer_as_one_engine_does_and_stop(tiny_bundle: Path) -> None:
    sources = [(4 + i, 7 + i % 5, 1) for i in range(30)]

    async def ask(*bundles: Path) -> list[Any]:
        watched = await Watched(*bundles).started()
        outcomes = await asyncio.gather(*(watched.generate(source) for source in sources))
        scored = await asyncio.gather(
            *(watched.engine.score(ScoreRequest(watched.engine.next_id(), [5, 1], [6 + i, 1], 0.0)) for i in range(5))
        )
        used = {index for index, one in watched.engine_statistics.items() if one.num_slots or one.cache_bytes_used or one.steps}
        await watched.engine.stop()
        assert watched.readiness == [True, False] and watched.restarts == [] and watched.process_ids == [None] * len(bundles)
        assert used <= set(range(len(bundles)))
        with pytest.raises(Unavailable):
            await watched.generate()
        return [*answers(outcomes), *(one.log_probs for one in scored)]

    one, two = await ask(tiny_bundle), await ask(tiny_bundle, tiny_bundle)
    assert one == two


async def test_a_replica_that_cannot_start_is_tried_again_and_does_not_keep_the_model_down(
    tiny_bundle: Path, bundle_copy: Path
) -> None:
    manifest = bundle_copy / "bundle.json"
    content = manifest.read_text()
    manifest.write_text("{}")
    watched = Watched(bundle_copy, tiny_bundle)
    await watched.engine.start()
    assert watched.engine.is_ready
    assert (await watched.generate()).num_generated == LONG
    await until(lambda: len(watched.restarts) >= 2)
    assert set(watched.restarts) == {0}
    manifest.write_text(content)
    await watched.until_all_ready()
    await watched.engine.stop()


async def test_a_model_of_which_no_replica_can_start_says_why(bundle_copy: Path) -> None:
    (bundle_copy / "decoder.onnx").write_bytes(b"")
    watched = Watched(bundle_copy, bundle_copy)
    with pytest.raises(EngineCannotStart, match=r"model 'tiny': the engine cannot start: .*decoder\.onnx"):
        await watched.engine.start()
    assert not watched.engine.is_ready and watched.process_ids == [None, None]


@pytest.mark.parametrize("num_turns", [1, 50])
async def test_an_engine_stopped_while_it_starts_leaves_no_process(tiny_bundle: Path, num_turns: int) -> None:
    watched = Watched(tiny_bundle, tiny_bundle)
    starting = asyncio.create_task(watched.engine.start())
    for _ in range(num_turns):
        await asyncio.sleep(0)
    starting.cancel()
    await asyncio.gather(starting, return_exceptions=True)
    await watched.engine.stop()
    assert watched.process_ids == [None, None]
