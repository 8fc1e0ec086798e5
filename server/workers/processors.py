"""Process-wide facilities: usable cores, the C allocator, the controlling terminal, process exit."""

import asyncio
import contextlib
import ctypes
import gc
import os
import sys
from pathlib import Path
from typing import NoReturn

CGROUP_QUOTA = Path("/sys/fs/cgroup/cpu.max")


class TooFewCores(Exception):
    """There are not enough cores for every engine to have its own and the front end one that is nobody's."""


def divide_cores(num_engines: int, num_threads: int) -> list[tuple[int, ...]]:
    """Give each engine the last cores of this process's affinity that are left, one for each of its threads.

    Raises:
        TooFewCores: If none would be left over for the front end.
    """
    cores = sorted(os.sched_getaffinity(0))
    num_taken = num_engines * num_threads
    if num_taken >= len(cores):
        wanted = f"{num_engines} x {num_threads} threads and the front end"
        raise TooFewCores(f"{wanted} need {num_taken + 1} cores; there are {len(cores)}")
    return [tuple(cores[start : start + num_threads]) for start in range(len(cores) - num_taken, len(cores), num_threads)]


def available_cores(quota_file: Path = CGROUP_QUOTA) -> int:
    """Return the cores of this process's affinity, or fewer where its container has a smaller CPU quota; at least 1.

    Args:
        quota_file: Of cgroup v2: quota and period in microseconds, or `max` for no quota.
    """
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file outside a container, and `max` is not a number
        return cores


# Blocks of at least this size are mapped by themselves; smaller ones lie among others, which keep them from being given back.
LARGE_BYTES = 2**20
# The largest limit that glibc takes, and how much may be free before it is given back by itself.
KEPT_BLOCK_BYTES, KEPT_BYTES = 2**25, 2**28
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of malloc.h


def give_back_large_blocks() -> None:
    """Have every large block given back to the system when it is free; does nothing where the C library is not glibc.

    glibc raises the limit to the size of what was freed, up to 32 MiB: a few messages of megabytes, and those that come after them
    are kept for ever.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def keep_blocks() -> None:
    """Have blocks kept for the next ones when they are free, as far as the C library does that; nothing where it is not glibc.

    An engine takes and frees the same megabytes with every batch that it encodes. Given back each time, they take the system longer
    to clear again than the products of a small model take. `give_back_blocks` does it when there is nothing to do.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def give_back_blocks_soon() -> None:
    """Do so once what calls it is over; in an event loop, which it holds up for less than a millisecond."""
    asyncio.get_running_loop().call_later(1.0, give_back_blocks)


def give_back_blocks() -> None:
    """Give what is free back to the system; does nothing where the C library is not glibc."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


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
