"""Arrays that take memory only where they are written: how large the process is says so."""

import os
from pathlib import Path

import numpy as np
import pytest

from dragoman.server.runtime.cache import sparse_zeros

MEBIBYTE = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_array_is_zero_and_of_the_shape_asked_for() -> None:
    array = sparse_zeros((3, 2, 5), np.float16)
    assert array.shape == (3, 2, 5) and array.dtype == np.float16 and array.flags.c_contiguous and not array.any()
    array[1, :, 2] = 7
    assert array.sum() == 14
    with pytest.raises(MemoryError, match="no room for"):
        sparse_zeros((1 << 46,), np.float32)


def test_memory_is_taken_where_it_is_written_and_given_back_with_the_last_view() -> None:
    """With huge pages 64 KiB written takes all of 128 MiB, and the write waits until that is cleared."""
    before = resident_bytes()
    array = sparse_zeros((64, 2 * MEBIBYTE // 4), np.float32)
    array[:, :256] = 1.0
    assert resident_bytes() - before < 8 * MEBIBYTE
    array[:32] = 1.0
    view = array[10, 10:20]
    del array
    assert view.sum() == 10 and resident_bytes() - before > 48 * MEBIBYTE
    del view
    assert resident_bytes() - before < 16 * MEBIBYTE
