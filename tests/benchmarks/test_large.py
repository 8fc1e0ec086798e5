"""What measures the stages of a large model, on processes that do little."""

from pathlib import Path

import pytest

from benchmarks.large.child import memory_mib, result_of, run
from benchmarks.large.steps import NUM_STEPS, least, sources


def test_a_process_is_measured_with_what_it_prints_and_its_peak(tmp_path: Path) -> None:
    idle = run(["-c", "print('[1]')"], tmp_path / "idle.log")
    program = "import time; text = b'x' * (200 << 20); time.sleep(0.5); print('said'); print('{\"a\": 1}')"
    large = run(["-c", program], tmp_path / "large.log")
    assert result_of(large) == {"a": 1} and large.output.startswith("said")
    assert idle.peak_gib < 0.1 < 0.19 < large.peak_gib < 0.3
    assert 0 < idle.seconds < 60


def test_a_failure_is_told_with_the_last_that_was_said(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        run(["-c", "1 / 0"], tmp_path / "log")


def test_memory_in_no_file_is_part_of_all_of_it() -> None:
    found = memory_mib()
    assert 0 < found["anonymous"] <= found["rss"] and 0 < found["pss"] <= found["rss"]


def test_sources_are_the_same_each_time_and_the_least_time_counts() -> None:
    assert sources(3) == sources(3) and len({len(source) for source in sources(5)}) == 1
    times = iter([3.0, 1.0, 2.0])
    assert least(lambda: next(times), most=3) == 1.0
    assert NUM_STEPS > 0
