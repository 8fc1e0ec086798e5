"""How the C library keeps memory that is free again."""

import asyncio
import contextlib
import ctypes

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
