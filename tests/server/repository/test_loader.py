"""Loading one version after the other; rollouts are tested in `test_model_keeper.py`."""

import asyncio
from typing import Any

import pytest

from dragoman.server.repository.loader import Loader
from dragoman.server.repository.versions import Cause, Refused, State
from tests.server.repository.staged import Stage


async def bring_up(stage: Stage, name: str = "1") -> Any:
    versions = stage.keeper.versions
    loader: Loader[Any] = Loader(versions, stage, lambda: stage, lambda version: version.note_death(), stage.placement)
    version = versions.begin(next(one for one in stage.versions if one.name == name))
    is_up = await loader.bring_up(version, stage.file, lambda: None, None)
    assert is_up == (version.state is State.STANDBY) == (version.loaded is not None)
    return version


async def test_versions_are_loaded_one_after_the_other_and_observed_once_they_are_proved() -> None:
    """Requests of a proof are nobody's, and memory can be reckoned of one at a time."""
    stage = Stage("1", "2")
    proving = stage.hold("prove", "1")
    both = [asyncio.create_task(bring_up(stage, name)) for name in "12"]
    await stage.until(lambda: "prove" in stage.steps("1"))
    assert not stage.engine("1").is_observed() and stage.steps("2") == []
    proving.set()
    await asyncio.gather(*both)
    assert stage.engine("1").is_observed() and stage.told.index(("adopt", "1")) < stage.told.index(("open", "2"))


async def test_failure_and_cancellation_leave_no_engine_and_let_others_load() -> None:
    stage = Stage("1", "2")
    stage.fail("prove", "1", Refused(Cause.PROOF, "another answer"))
    version = await bring_up(stage)
    assert (version.state, version.cause, version.replicas) == (State.REFUSED, Cause.PROOF, range(0, 1))
    assert not stage.turn.locked() and stage.freed == [range(0, 1)] and not stage.running()
    stage.hold("start", "2")
    loading = asyncio.create_task(bring_up(stage, "2"))
    await stage.until(lambda: "start" in stage.steps("2"))
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    assert not stage.turn.locked()
