"""Commands that a kill ends as Ctrl-C does: what they were writing beside its place is taken away again."""

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, NoReturn

EXIT_CODE: Final = 128 + signal.SIGTERM


@contextmanager
def tidy_when_terminated() -> Iterator[None]:
    """Take SIGTERM as an exit, which cleans up; also a decorator of functions."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _exit)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _exit(_number: int, _frame: FrameType | None) -> NoReturn:
    sys.exit(EXIT_CODE)
