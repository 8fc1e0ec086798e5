"""The end of a run names what its tests cost, wherever they ran."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
TESTS = """
import os

def work(ticks):
    while sum(os.times()[:2]) < work.begun + ticks / 100:
        pass

work.begun = sum(os.times()[:2])

def test_cheap():
    pass

def test_dear():
    work(30)
"""


@pytest.mark.parametrize("workers", [[], ["-n", "1"]], ids=["serial", "parallel"])
def test_the_dearest_tests_are_named(tmp_path: Path, workers: list[str]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "tests.cost",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(tmp_path),
        "--costs",
        "1",
    ]
    done = subprocess.run(
        [*command, *workers, str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout
    assert " CPU seconds, of which 0 in 2 tests" in done.stdout
    (named,) = [line.split() for line in done.stdout.splitlines() if "test_it.py::" in line]
    assert named[1].endswith("test_it.py::test_dear") and named[2] == "call"
    assert float(named[0]) == float(named[3]) >= 0.2
