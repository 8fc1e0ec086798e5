"""The terminal that the process was started in, if it was started in one: a hangup means another thing once that is gone."""

import os


class Terminal:
    """The process's controlling terminal."""

    def __init__(self) -> None:
        """Look whether there is one."""
        self._was_there = _is_there()

    @property
    def is_gone(self) -> bool:
        """Whether there was one and is none any more: its window was closed, or the connection to it has broken."""
        return self._was_there and not _is_there()


def _is_there() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True
