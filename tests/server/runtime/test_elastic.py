"""Steps with more threads: taken while no other engine computes and they are faster, with the same bits."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dragoman.export.bundle import Bundle
from dragoman.server.engine.loading import load_runner
from dragoman.server.engine.settings import DeviceSettings, Limits
from dragoman.server.runtime.elastic import MAX_PAUSE_SECONDS, MIN_PAUSE_SECONDS, BusyMark, Elastic, WideSteps, open_mark
from dragoman.server.runtime.onnx import OnnxRunner, OnnxScorer
from tests.clock import Clock
from tests.export.conftest import Export

HOLD = """
import sys
from pathlib import Path
from dragoman.server.runtime.elastic import BusyMark
mark = BusyMark(Path(sys.argv[1]))
mark.set()
for line in sys.stdin:
    {"set": mark.set, "clear": mark.clear}[line.strip()]()
    print(flush=True)
"""


def test_marks_of_other_processes_are_seen_until_they_are_removed_or_the_process_is_killed(tmp_path: Path) -> None:
    mark = BusyMark(tmp_path / "busy")
    mark.set()
    assert not mark.is_another_set, "its own mark is none of another"
    command = [sys.executable, "-c", HOLD, str(tmp_path / "busy")]
    others = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(2)]

    def tell(other: Any, word: str) -> None:
        other.stdin.write(f"{word}\n")
        other.stdin.flush()
        other.stdout.readline()

    for other in others:
        tell(other, "set")
    assert mark.is_another_set
    tell(others[0], "clear")
    mark.clear()
    assert mark.is_another_set, "one is left"
    others[1].kill()
    others[1].wait()
    assert not mark.is_another_set
    tell(others[0], "set")
    assert mark.is_another_set
    for other in others:
        other.kill()
        other.communicate()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def mark() -> Any:
    return SimpleNamespace(set=lambda: None, clear=lambda: None, is_another_set=False)


@pytest.fixture
def elastic(mark: Any, clock: Clock) -> Elastic:
    return Elastic(mark, WideSteps(2, {1: 1.0, 4: 2.0}), clock)


def test_steps_are_wide_where_that_is_faster_and_nobody_else_computes(elastic: Elastic, mark: Any) -> None:
    assert [num_rows for num_rows in range(1, 10) if elastic.is_wide(num_rows)] == [1, 3, 4]
    mark.is_another_set = True
    assert not elastic.is_wide(1)


def test_wide_steps_pause_longer_and_longer_while_they_are_slow(elastic: Elastic, clock: Clock) -> None:
    pause, begin = MIN_PAUSE_SECONDS, clock.now
    while clock.now < begin + 10:
        assert elastic.is_wide(1)
        elastic.note(1, True, 1.5)
        clock.now += 0.9 * pause
        assert not elastic.is_wide(1) and not elastic.is_wide(4)
        clock.now += 0.2 * pause
        pause = min(2 * pause, MAX_PAUSE_SECONDS)
    assert pause == MAX_PAUSE_SECONDS
    elastic.note(1, True, 0.5)
    elastic.note(1, True, 1.5)
    clock.now += 1.1 * MIN_PAUSE_SECONDS
    assert elastic.is_wide(1), "a fast one makes good for the slow ones"


def test_wide_steps_are_compared_with_narrow_ones_of_late(elastic: Elastic) -> None:
    for _ in range(100):
        elastic.note(1, False, 3.0)
        elastic.note(2, False, 0.1)
    elastic.note(1, True, 2.5)
    assert elastic.is_wide(1), "steps far into a text take longer"


def test_without_a_place_for_marks_there_are_none(tmp_path: Path) -> None:
    assert open_mark(None) is None and open_mark(tmp_path / "missing") is None
    (tmp_path / "busy").symlink_to(tmp_path / "elsewhere")
    assert open_mark(tmp_path) is None and not (tmp_path / "elsewhere").exists()


def test_every_engine_with_shared_weights_is_marked_while_it_computes(export: Export, tmp_path: Path) -> None:
    """Also one without wide steps, and one that scores."""
    bundle: Bundle = export("tiny", "fp32")
    runner = load_runner(bundle, Limits(4), 1, DeviceSettings("cpu", 0, str(tmp_path)), is_warmed_up=False)
    assert isinstance(runner, OnnxRunner)
    folder = runner.weights.folder
    assert folder is not None

    def is_marked() -> bool:
        code = "import sys; from pathlib import Path; from dragoman.server.runtime.elastic import BusyMark as B"
        command = [sys.executable, "-c", f"{code}; sys.exit(B(Path(sys.argv[1])).is_another_set)", str(folder / "busy")]
        return bool(subprocess.run(command, check=False).returncode)

    assert not is_marked()
    runner.prefill([[4, bundle.manifest.eos_id]], [0])
    assert is_marked()
    runner.rest()
    assert not is_marked()

    class Session:
        def run(self, outputs: list[str], *_: object) -> list[Any]:
            assert is_marked()
            return [np.zeros((1, 1, *([1, 1] * number))) for number in range(len(outputs))]

    opened: Any = Session()
    scorer = OnnxScorer(bundle, 1, lambda path: opened, runner.weights)
    scorer.open()
    scorer.score([4], [bundle.manifest.eos_id])
    assert not is_marked()


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_answers_have_the_same_bits_whichever_steps_are_wide(export: Export, elastic: Elastic, mark: Any, precision: str) -> None:
    bundle: Bundle = export("tiny", precision)
    plain, other = OnnxRunner(bundle, 4, 1), OnnxRunner(bundle, 4, 1, elastic=elastic)
    random, is_wide = np.random.default_rng(0), []
    for number in range(12):
        sources = [[*random.integers(4, 280, 1 + (number + row) % 9).tolist(), bundle.manifest.eos_id] for row in range(4)]
        mark.is_another_set = number % 3 == 0
        is_wide.append(elastic.is_wide(4))
        tokens = random.integers(4, 280, (6, 4))
        found = []
        for runner in (plain, other):
            runner.prefill(sources, range(4))
            for position in range(6):
                step = runner.step(tokens[position], np.full(4, position), 5)
                found.append((step.ids.tobytes(), step.log_probs.tobytes()))
        assert found[:6] == found[6:]
        other.rest()
    assert {True, False} <= set(is_wide)
