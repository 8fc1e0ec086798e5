"""Processor time for the large texts of callers: two threads apart from the server's own, and slices of the event loop."""

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")

# asyncio's own threads read configuration and bundles, which must not wait for callers. Of what has a caller no more run at once.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="texts")
# As long as a slice of work may hold up everything else on the event loop.
SLICE_SECONDS = 0.002


async def on_thread(work: Callable[..., T], *arguments: object) -> T:
    """Return the result of work that is bounded by the size of its arguments; work that has not begun ends with its task."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(work, *arguments))


class Slices:
    """Long work on the event loop in slices, in turns; it ends with the task that awaits it."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def collect(self, items: Iterator[T | None]) -> list[T]:
        """Return all items of an iterator, each of which must cost little, but None."""
        taken: list[T] = []
        while True:
            async with self._turn:
                end = time.perf_counter() + SLICE_SECONDS
                for item in items:
                    if item is not None:
                        taken.append(item)
                    if time.perf_counter() > end:
                        break
                else:
                    return taken
                await asyncio.sleep(0)  # in its turn: of all slices there is one between others' work
