"""What a process does that answers callers: how it keeps its memory once it serves, and how it ends."""

import contextlib
import gc
import os
import sys
from typing import NoReturn


def keep_what_is_there() -> None:
    """Have the garbage collector not look at what is there now while requests wait: it stays."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


def end_process(code: int) -> NoReturn:
    """End at once, with everything written that was to be written.

    Not through the gRPC server's own shutdown: gRPC core would end calls that it has not handed over yet as CANCELLED, which nobody
    retries. A connection that breaks ends them as UNAVAILABLE.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal may be gone
            if stream is not None:  # as it is where the process was started without one
                stream.flush()
    os._exit(code)
