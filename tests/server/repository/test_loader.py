"""From a version that was found to one that can serve; what a model makes of it is in `test_model_keeper.py`."""

import asyncio
from typing import Any

import pytest

from dragoman.server.repository.loader import Loader
from dragoman.server.repository.model_versions import ModelVersions
from dragoman.server.repository.versions import Cause, Opened, Refused, State
from tests.server.repository.staged import MODEL, Stage


def loader_of(stage: Stage) -> tuple[Loader[Any], ModelVersions[Any]]:
    versions = stage.keeper.versions
    return Loader(versions, stage, lambda: stage, lambda version: version.note_death(), stage.placement), versions


async def bring_up(stage: Stage, make_way: Any = None) -> Any:
    loader, versions = loader_of(stage)
    version = versions.begin(stage.versions[-1])
    is_up = await loader.bring_up(version, stage.file, lambda: None, make_way)
    assert is_up == (version.state is State.STANDBY) == (version.loaded is not None)
    return version


def test_its_engine_is_observed_once_it_is_proved() -> None:
    """What an engine is asked to prove itself is nobody's request."""
    stage = Stage("1")
    proving = stage.hold("prove", "1")

    async def run() -> None:
        loading = asyncio.create_task(bring_up(stage))
        await stage.until(lambda: "prove" in stage.steps("1"))
        assert not stage.engine("1").is_observed()
        proving.set()
        await loading
        assert stage.engine("1").is_observed()

    asyncio.run(run())


def test_versions_are_loaded_one_after_the_other_so_that_memory_can_be_reckoned() -> None:
    stage = Stage("1", "2")
    gate = stage.hold("start", "1")

    async def run() -> None:
        loader, versions = loader_of(stage)
        one, two = map(versions.begin, stage.versions)
        both = [asyncio.create_task(loader.bring_up(version, stage.file, lambda: None, None)) for version in (one, two)]
        await stage.until(lambda: "start" in stage.steps("1"))
        assert stage.steps("2") == []
        gate.set()
        assert await asyncio.gather(*both) == [True, True]
        assert stage.told.index(("adopt", "1")) < stage.told.index(("open", "2"))

    asyncio.run(run())


def test_way_is_made_between_opening_and_the_memory_and_measured_before() -> None:
    stage = Stage("1")

    async def make_way(opened: Opened, label: str) -> None:
        stage.tell("way", label)

    asyncio.run(bring_up(stage, make_way))
    assert [step for step, _ in stage.told][:5] == ["open", "measure", "way", "memory", "start"]


def test_another_may_load_after_one_that_failed() -> None:
    stage = Stage("1")
    stage.fail("prove", "1", Refused(Cause.PROOF, "another answer"))

    async def run() -> None:
        version = await bring_up(stage)
        assert (version.state, version.cause, version.replicas) == (State.REFUSED, Cause.PROOF, range(0, 1))
        assert not stage.turn.locked() and stage.freed == [range(0, 1)] and not stage.running()

    asyncio.run(run())


def test_an_interruption_leaves_the_turn_to_others() -> None:
    stage = Stage("1")
    stage.hold("start", "1")

    async def run() -> None:
        loading = asyncio.create_task(bring_up(stage))
        await stage.until(lambda: "start" in stage.steps("1"))
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        assert not stage.turn.locked()

    asyncio.run(run())


def test_ending_what_has_no_engine_does_nothing() -> None:
    stage = Stage("1")
    loader, versions = loader_of(stage)
    asyncio.run(loader.end(versions.begin(stage.versions[0])))
    assert stage.told == [] and versions.model == MODEL
