"""The runner with caches in 8 bits: a quarter of the memory, and rows that give the same bits wherever they stand."""

from pathlib import Path

import numpy as np
import pytest

from dragoman.export.bundle import Bundle
from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.server.runtime.onnx import OnnxRunner
from dragoman.server.runtime.weights import Weights

MAX_ROWS, LENGTH = 5, 9
SOURCES = [[5, 9, 200, 31, 1], [77, 1], [*range(30, 53), 1]]
FED = [[2, *(3 + (row * 50 + i * 17) % 270 for i in range(LENGTH - 1))] for row in range(3)]


@pytest.fixture(scope="module")
def bundles(tiny_checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> tuple[Bundle, Bundle]:
    """Return one bundle with caches in single precision and one with caches in 8 bits."""
    folder, calibration = tmp_path_factory.mktemp("caches"), ["a dog and a cat run", "the cat sat"]
    tiny_checkpoint.save(folder / "checkpoint")
    single = export_checkpoint(folder / "checkpoint", folder / "single", "int8", calibration=calibration)
    return single, export_checkpoint(
        folder / "checkpoint", folder / "integer", "int8", calibration=calibration, cache_precision="int8"
    )


def answers(runner: OnnxRunner, rows: list[int], first: int = 0, last: int = LENGTH) -> list[bytes]:
    """Feed rows their tokens; return the bits of their candidates, row by row."""
    found = [b""] * len(rows)
    for position in range(first, last):
        tokens = np.array([FED[row][position] for row in rows])
        candidates = runner.step(tokens, np.full(len(rows), position), 4)
        for i in range(len(rows)):
            found[i] += candidates.ids[i].tobytes() + candidates.log_probs[i].tobytes()
    return found


def alone(bundle: Bundle, row: int) -> bytes:
    runner = OnnxRunner(bundle, 1, 1)
    runner.prefill([SOURCES[row]], [0])
    return answers(runner, [row])[0]


def test_rows_give_the_same_bits_alone_and_together(bundles: tuple[Bundle, Bundle]) -> None:
    runner = OnnxRunner(bundles[1], MAX_ROWS, 2)
    runner.prefill(SOURCES, [0, 1, 2])
    assert answers(runner, [0, 1, 2]) == [alone(bundles[1], row) for row in range(3)]


def test_copied_row_goes_on_as_the_row_it_was_copied_from(bundles: tuple[Bundle, Bundle]) -> None:
    runner = OnnxRunner(bundles[1], MAX_ROWS, 1)
    runner.prefill([SOURCES[0], SOURCES[2]], [0, 1])
    answers(runner, [0, 2], last=4)
    runner.copy_row(1, 0, 4)
    ends = answers(runner, [2, 2], first=4)
    assert ends[0] == ends[1] == alone(bundles[1], 2)[-len(ends[0]) :]


def test_sources_encoded_ahead_are_those_encoded_into_rows(bundles: tuple[Bundle, Bundle]) -> None:
    runner, other = OnnxRunner(bundles[1], MAX_ROWS, 1), OnnxRunner(bundles[1], MAX_ROWS, 1)
    holder = runner.holder
    assert holder is not None
    held = holder.encode(SOURCES)
    assert {each.tokens.dtype for each in held} == {np.dtype(np.int8)}
    holder.encode([[50, 1]])
    holder.place(held, [2, 0, 1])
    other.prefill(SOURCES, [2, 0, 1])
    assert answers(runner, [1, 2, 0]) == answers(other, [1, 2, 0]) == [alone(bundles[1], row) for row in (1, 2, 0)]


def test_shared_weights_give_the_same_bits(bundles: tuple[Bundle, Bundle], tmp_path: Path) -> None:
    weights = Weights.of(bundles[1], str(tmp_path))
    assert weights.is_shared
    runner = OnnxRunner(bundles[1], 1, 1, weights)
    runner.prefill([SOURCES[2]], [0])
    assert answers(runner, [2])[0] == alone(bundles[1], 2)


def test_caches_take_a_quarter_and_change_answers_little(bundles: tuple[Bundle, Bundle]) -> None:
    runners = [OnnxRunner(bundle, MAX_ROWS, 1) for bundle in bundles]
    first, second = (runner.cache_bytes()[0] for runner in runners)
    assert first == 4 * second
    for runner in runners:
        runner.prefill(SOURCES, [0, 1, 2])
    tokens = [np.array([FED[row][position] for row in range(3)]) for position in range(LENGTH)]
    differences: list[float] = []
    for position, fed in enumerate(tokens):
        single, integer = (runner.step(fed, np.full(3, position), 280) for runner in runners)
        places = [np.argsort(candidates.ids) for candidates in (single, integer)]
        by_id = [
            np.take_along_axis(candidates.log_probs, place, 1) for candidates, place in zip((single, integer), places, strict=True)
        ]
        is_possible = np.isfinite(by_id[0])
        differences += np.abs(by_id[0][is_possible] - by_id[1][is_possible]).tolist()
    assert 0 < np.mean(differences) < 0.1
    assert runners[0].cache_bytes()[1] == 4 * runners[1].cache_bytes()[1]
