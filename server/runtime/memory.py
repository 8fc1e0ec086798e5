"""Arrays that take memory only where they have been written."""

import contextlib
import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray


def sparse_zeros(shape: tuple[int, ...], dtype: type[np.number[Any]]) -> NDArray[np.number[Any]]:
    """Return zeros that the operating system backs with memory page by page, as they are written.

    NumPy asks for huge pages. A cache of which a few positions in each row are in use would then take most of what it reserves,
    and the first step that writes to it would wait for all of that to be cleared: 50 to 120 ms for one of 200 MB.

    Raises:
        MemoryError: If there is no room for it.
    """
    count = math.prod(shape)
    num_bytes = count * np.dtype(dtype).itemsize
    try:
        memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no room for {num_bytes} bytes of caches") from error
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages knows no such advice
            memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype, count).reshape(shape)
