"""Where work is done that is not a decode step: on a thread that gives way to the engine's, or on the engine's own."""

import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any

NICENESS = 10
"""By which the kernel's weight falls to a tenth: enough that decode steps hardly notice, and that scoring goes on."""


def background() -> Executor:
    """Return one thread to which the kernel gives what others leave; what it starts, such as a session's pool, inherits that."""
    return ThreadPoolExecutor(1, thread_name_prefix="scoring", initializer=_give_way)


class Here(Executor):
    """Does everything at once, on the calling thread: what has to take its place in the order of a device's work."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> "Future[Any]":
        """Return a future that is done."""
        future: Future[Any] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def _give_way() -> None:
    """Lower this thread's priority: on Linux niceness is a thread's, and `nice` changes the calling one's."""
    with contextlib.suppress(OSError):  # where it is forbidden, turns are what keeps scoring back
        os.nice(NICENESS)
