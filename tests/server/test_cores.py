import os
from pathlib import Path

import pytest

from server.cores import available_cores

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("content", "expected"),
    [("max 100000", CORES), ("100000 100000", 1), ("50000 100000", 1), (f"{1000 * 100000} 100000", CORES), ("nonsense", CORES)],
)
def test_a_quota_lowers_the_number_of_cores(tmp_path: Path, content: str, expected: int) -> None:
    quota = tmp_path / "cpu.max"
    quota.write_text(content + "\n")
    assert available_cores(quota) == expected


def test_without_a_quota_affinity_decides(tmp_path: Path) -> None:
    assert available_cores(tmp_path / "absent") == CORES
