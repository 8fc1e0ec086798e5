"""Starting a call of grpc where nothing can break in."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


def opened(start: Callable[[], Any]) -> Any:
    """Return what `start` returns: a call with a `cancel`.

    Python runs signal handlers on the main thread, between any two lines. Ctrl-C while grpc starts a call leaves that call without
    the thread that serves it: closing the channel then waits for ever (grpc issue 19973 is of that kind), and later calls
    can lose their answers. So the main thread has its calls started by another, and whoever is interrupted here cancels the call.
    """
    if threading.current_thread() is not threading.main_thread():
        return start()
    opening: Future[Any] = Future()

    def run() -> None:
        try:
            opening.set_result(start())
        except BaseException as error:  # for the caller
            opening.set_exception(error)

    try:
        threading.Thread(target=run, name="client-open").start()
        return opening.result()
    except BaseException:
        opening.add_done_callback(_cancel)
        raise


def _cancel(opening: Future[Any]) -> None:
    if opening.exception() is None:
        opening.result().cancel()
