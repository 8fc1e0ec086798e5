"""Memory of large blocks: given back to the system, or kept for the next ones."""

import platform
import subprocess
import sys

import pytest

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
