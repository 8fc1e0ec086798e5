"""How the C library keeps memory that is free again."""

import contextlib
import ctypes

# Blocks of at least this size are mapped by themselves; smaller ones lie among others, which keep them from being given back.
LARGE_BYTES = 2**20
_M_MMAP_THRESHOLD = -3  # of malloc.h


def give_back_large_blocks() -> None:
    """Have every large block given back to the system when it is free; does nothing where the C library is not glibc.

    glibc raises the limit to the size of what was freed, up to 32 MiB: a few messages of megabytes, and those that come after them
    are kept for ever.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, LARGE_BYTES)
