"""Memory of several engines: real processes, all of which have answered and scored."""

import os
from pathlib import Path

from benchmarks.replica_memory import memory_mib, rows


def test_memory_that_was_written_is_private_and_in_no_file() -> None:
    before = memory_mib(os.getpid())
    block = bytearray(os.urandom(1 << 16) * 512)
    after = memory_mib(os.getpid())
    for name in ("pss", "private", "anonymous"):
        assert 24 < after[name] - before[name] < 100, name
    assert len(block) == 1 << 25


def test_a_row_for_each_number_of_engines(endless: tuple[Path, Path], tmp_path: Path) -> None:
    found = rows(endless[1], [1, 2], 1, str(tmp_path))
    assert [row["engines"] for row in found] == [1, 2]
    assert all(float(row[f"{side}: MiB"]) > 20 for row in found for side in ("copies", "shared"))
    assert list(tmp_path.glob("*/*/weights.data")), "they did share"
