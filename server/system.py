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


def available_cores(quota_file: Path = CGROUP_QUOTA) -> int:
    """Return the number of cores by affinity and cgroup v2 CPU quota; at least 1."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = quota_file.read_text(encoding="ascii").split()
        return max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):  # no such file outside a container, and `max` is not a number
        return cores


# Blocks of at least this size are mapped separately, and returned to the system when freed.
LARGE_BYTES = 2**20
# The largest threshold that glibc accepts, and the free memory above which it trims by itself.
KEPT_BLOCK_BYTES, KEPT_BYTES = 2**25, 2**28
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1  # of malloc.h


def return_large_blocks() -> None:
    """Make the allocator return large freed blocks to the system; no effect without glibc.

    glibc raises its threshold to the size of freed blocks, up to 32 MiB: after a few large messages, later ones would be kept.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)


def keep_freed_memory() -> None:
    """Make the allocator keep free blocks for reuse; no effect without glibc.

    An engine allocates and frees the same megabytes with every batch; for a small model, clearing new pages would take longer than
    the computation. `trim_memory` returns them when the engine is idle.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        library = ctypes.CDLL(None)
        library.mallopt(_M_MMAP_THRESHOLD, KEPT_BLOCK_BYTES)
        library.mallopt(_M_TRIM_THRESHOLD, KEPT_BYTES)


def trim_memory_soon() -> None:
    """Schedule `trim_memory` in a second on the event loop, which it blocks for less than a millisecond."""
    asyncio.get_running_loop().call_later(1.0, trim_memory)


def trim_memory() -> None:
    """Return free memory to the system; no effect without glibc."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


class Terminal:
    """The process's controlling terminal."""

    def __init__(self) -> None:
        self._was_there = _is_there()

    @property
    def is_gone(self) -> bool:
        """Whether the terminal existed at the start and has been closed."""
        return self._was_there and not _is_there()


def _is_there() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def freeze_heap() -> None:
    """Exempt startup objects from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


def end_process(code: int) -> NoReturn:
    """Flush the standard streams and exit at once.

    gRPC's own shutdown would end calls not yet passed on as CANCELLED, which clients do not retry; a broken connection ends them as
    UNAVAILABLE.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the terminal may be gone
            if stream is not None:  # None where the process was started without it
                stream.flush()
    os._exit(code)
