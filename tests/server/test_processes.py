"""Memory and CPU time of processes, from a made-up /proc and the real one."""

import os
import resource
from pathlib import Path

import pytest

from dragoman.server.system import PAGE_BYTES, TICKS_PER_SECOND, read_process


def test_a_process_is_read_as_the_kernel_has_it(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    fields = ["S", *("0" for _ in range(10)), "300", "200", *("0" for _ in range(8)), "5", "0"]
    (tmp_path / "7/stat").write_text(f"7 (a) b (c)) {' '.join(fields)}\n")
    reading = read_process(7, tmp_path)
    assert reading is not None and reading.cpu_seconds == 500 / TICKS_PER_SECOND
    assert reading.resident_memory_bytes == 5 * PAGE_BYTES
    assert read_process(1, tmp_path) is None
    usage, own = resource.getrusage(resource.RUSAGE_SELF), read_process(os.getpid())
    assert own is not None and own.cpu_seconds == pytest.approx(usage.ru_utime + usage.ru_stime, abs=1.0)
    assert own.resident_memory_bytes > 2**20
