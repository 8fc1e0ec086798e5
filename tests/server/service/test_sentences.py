"""Large texts of callers on the event loop: one slice in turn, however many callers there are."""

import asyncio
import time
from collections.abc import Iterator
from itertools import pairwise

from dragoman.server.service.sentences import SLICE_SECONDS, Slices


async def test_callers_take_turns_however_many_texts_each_has() -> None:
    slices, done = Slices(), list[str]()

    def slow(owner: str) -> Iterator[None]:
        for _ in range(2):
            time.sleep(SLICE_SECONDS)
            done.append(owner)
            yield None

    await asyncio.gather(*(slices.collect(slow(owner), owner) for owner in ("many",) * 20 + ("one",)))
    assert [i for i, owner in enumerate(done) if owner == "one"][-1] < 6 and len(done) == 42


async def test_others_work_between_any_two_slices() -> None:
    done = list[str]()
    slices = Slices()

    def slow(name: str) -> Iterator[None]:
        for _ in range(3):
            time.sleep(SLICE_SECONDS)
            done.append(name)
            yield None

    async def other() -> None:
        while len(done) < 100:
            done.append("other")
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    await asyncio.gather(*(slices.collect(slow(name), name) for name in "abc"))
    task.cancel()
    assert done.index("b") < [i for i, name in enumerate(done) if name == "a"][1], "in turns"
    assert all("other" in pair for pair in pairwise(done)), done
