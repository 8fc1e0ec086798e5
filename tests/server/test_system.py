"""Memory of large blocks: given back to the system, or kept for the next ones; memory and CPU time of processes."""

import os
import platform
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman.server.system import PAGE_BYTES, TICKS_PER_SECOND, read_process

PROGRAM = """
import resource
from dragoman.server.system import trim_memory, return_large_blocks, keep_freed_memory

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) // 1024

def use():
    blocks = [bytearray(b"x") * 16_000_000 for _ in range(4)]

return_large_blocks()
del_first = bytes(b"x" * 20_000_000)
del del_first
before, behind = resident(), []
blocks = [(b"y" * 4_000_000, behind.append(bytearray(100_000))) for _ in range(20)]
del blocks
given_back = resident() - before

keep_freed_memory()
for _ in range(3):
    use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(10):
    use()
kept, num_faults = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
trim_memory()
print(given_back, num_faults, kept - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory in other ways")
def test_large_blocks_are_given_back_or_kept() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    megabytes, num_faults, megabytes_kept = map(int, done.stdout.split())
    assert megabytes < 10, "glibc would keep them"
    assert num_faults < 1000, "640 MB are 160,000 pages, or 320 huge ones"
    assert megabytes_kept > 50


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
