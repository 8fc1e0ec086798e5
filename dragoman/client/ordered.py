"""Work on many items at once, its results in the order of the items."""

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Final, TypeVar

from dragoman.client.scope import Scope

Item = TypeVar("Item")
Output = TypeVar("Output")


class Pause:
    """Stands among the items for "the next one may be long in coming": what is under way is answered first."""


PAUSE: Final = Pause()


def in_order(
    items: Iterable[Item | Pause], work: Callable[[Item, Scope], Output], parent: Scope, concurrency: int = 32
) -> Generator[Output, None, None]:
    """Yield the results of the work on each item, in order; stop at the first that fails, with its error.

    The items are read as results are asked for, at most `2 * concurrency` ahead of the last one yielded: enough that one slow
    item does not leave the others idle. Items that raise end the results too, once those before are yielded.

    Args:
        items: Inputs; after `PAUSE` what is under way is yielded before the next is read.
        work: Called on `concurrency` threads with an item and a scope, which is cancelled when the results end or are dropped.
        parent: Scope of all of it.
        concurrency: Items worked on at once.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency: {concurrency} is less than 1")
    return _in_order(iter(items), work, parent, concurrency)


def _in_order(
    items: Iterator[Item | Pause], work: Callable[[Item, Scope], Output], parent: Scope, concurrency: int
) -> Generator[Output, None, None]:
    pending: deque[Future[Output]] = deque()
    executor = ThreadPoolExecutor(concurrency, thread_name_prefix="client")
    scope = Scope(parent)
    try:
        while True:
            try:
                item = next(items)
            except StopIteration:
                break
            except Exception:
                while pending:
                    yield pending.popleft().result()
                raise
            if not isinstance(item, Pause):
                pending.append(executor.submit(copy_context().run, work, item, scope))  # the active trace goes along
            while pending and (isinstance(item, Pause) or len(pending) == 2 * concurrency):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        scope.cancel()
        executor.shutdown(wait=True, cancel_futures=True)
