"""Work of coroutines on many items at once, its results in the order of the items."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
Output = TypeVar("Output")


def in_async_order(
    items: Iterable[Item] | AsyncIterable[Item], work: Callable[[Item], Awaitable[Output]], concurrency: int = 32
) -> AsyncGenerator[Output, None]:
    """Yield the results of the work on each item, in order; stop at the first that fails, with its error.

    The items are read as results are asked for, at most `2 * concurrency` ahead of the last one yielded. Items that raise end the
    results too, once those before are yielded. Closing the generator cancels what runs.

    Args:
        items: Inputs.
        work: Called with an item, in a task of its own.
        concurrency: Items worked on at once.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency: {concurrency} is less than 1")
    return _in_order(aiter(as_async(items)), work, concurrency)


def as_async(items: Iterable[Item] | AsyncIterable[Item]) -> AsyncIterable[Item]:
    """Return items of either kind as asynchronous ones; what is of neither kind is a `TypeError`."""
    return items if isinstance(items, AsyncIterable) else _each(iter(items))


async def _each(items: Iterator[Item]) -> AsyncIterator[Item]:
    for item in items:
        yield item


async def _in_order(
    items: AsyncIterator[Item], work: Callable[[Item], Awaitable[Output]], concurrency: int
) -> AsyncGenerator[Output, None]:
    places = asyncio.Semaphore(concurrency)

    async def run(item: Item) -> Output:
        async with places:
            return await work(item)

    pending: deque[asyncio.Task[Output]] = deque()
    try:
        while True:
            try:
                item = await anext(items)
            except StopAsyncIteration:
                break
            except Exception:  # answer what came before it
                while pending:
                    yield await pending[0]
                    pending.popleft()
                raise
            pending.append(asyncio.create_task(run(item)))
            if len(pending) == 2 * concurrency:
                yield await pending[0]
                pending.popleft()
        while pending:
            yield await pending[0]
            pending.popleft()
    finally:
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
