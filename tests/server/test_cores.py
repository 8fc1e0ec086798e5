import os
from pathlib import Path

import pytest

from dragoman.server.cores import TooFewCores, available_cores, divide_cores

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


def test_engines_get_the_last_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 2, 4, 5, 7, 8})
    assert divide_cores(2, 2) == [(5, 7), (8, 9)]
    assert divide_cores(5, 1) == [(4,), (5,), (7,), (8,), (9,)]


@pytest.mark.parametrize(("num_engines", "num_threads"), [(2, 3), (6, 1), (1, 7)])
def test_the_front_end_is_left_a_core(monkeypatch: pytest.MonkeyPatch, num_engines: int, num_threads: int) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    with pytest.raises(TooFewCores, match=f"need {num_engines * num_threads + 1} cores; there are 6"):
        divide_cores(num_engines, num_threads)
