"""Memory of large blocks: given back to the system, or kept for the next ones."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import resource, sys
from dragoman.server.allocator import give_back_blocks, give_back_large_blocks, keep_blocks

def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) // 1024

def use():
    blocks = [bytearray(b"x") * 16_000_000 for _ in range(4)]

kind, is_asked = sys.argv[1:]
if is_asked:
    (keep_blocks if kind == "keep" else give_back_large_blocks)()
if kind == "keep":
    for _ in range(3):
        use()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(10):
        use()
    kept, num_faults = resident(), resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    give_back_blocks()
    print(num_faults, kept - resident())
else:
    del_first = bytes(b"x" * 20_000_000)
    del del_first
    before, kept, blocks = resident(), [], []
    for _ in range(20):
        blocks.append(b"y" * 4_000_000)
        kept.append(bytearray(100_000))  # lies behind the block
    blocks.clear()
    print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries keep memory in other ways")
@pytest.mark.parametrize("is_asked", [True, False])
def test_large_blocks_are_given_back_or_kept_only_if_asked(is_asked: bool) -> None:
    def run(kind: str) -> list[int]:
        command = [sys.executable, "-c", PROGRAM, kind, "yes" * is_asked]
        return [*map(int, subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split())]

    [megabytes] = run("give back")
    assert (megabytes < 10) is is_asked, "glibc would keep them"
    num_faults, megabytes = run("keep")
    assert (num_faults < 1000) is is_asked, "640 MB are 160,000 pages, or 320 huge ones"
    assert (megabytes > 50) is is_asked
