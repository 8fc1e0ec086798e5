import mmap
import os
import resource
from pathlib import Path

import pytest

from dragoman.server.telemetry.processes import PAGE_BYTES, TICKS_PER_SECOND, read_process


def test_this_process_is_read_as_the_kernel_has_it(tmp_path: Path) -> None:
    before = read_process(os.getpid())
    assert before is not None
    with mmap.mmap(-1, 64 * 2**20) as ballast, (tmp_path / "file").open("w"):  # fresh pages, whatever other tests have freed
        for start in range(0, len(ballast), PAGE_BYTES):
            ballast[start] = 1
        after = read_process(os.getpid())
    assert after is not None
    assert after.resident_memory_bytes - before.resident_memory_bytes > 32 * 2**20
    assert after.num_open_fds == before.num_open_fds + 1
    usage = resource.getrusage(resource.RUSAGE_SELF)
    assert after.cpu_seconds == pytest.approx(usage.ru_utime + usage.ru_stime, abs=1.0)


def test_a_name_with_parentheses_and_spaces_does_not_shift_the_fields(tmp_path: Path) -> None:
    folder = tmp_path / "7"
    (folder / "fd").mkdir(parents=True)
    (folder / "fd" / "0").touch()
    fields = ["S", *("0" for _ in range(10)), "300", "200", *("0" for _ in range(8)), "5", "0"]
    (folder / "stat").write_text(f"7 (a) b (c)) {' '.join(fields)}\n")
    reading = read_process(7, tmp_path)
    assert reading is not None
    assert reading.cpu_seconds == 500 / TICKS_PER_SECOND
    assert (reading.resident_memory_bytes, reading.num_open_fds) == (5 * PAGE_BYTES, 1)


def test_a_process_that_is_gone_is_nothing(tmp_path: Path) -> None:
    assert read_process(1, tmp_path) is None
