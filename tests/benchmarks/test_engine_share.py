"""Shares of a step, and the bare loop that makes the engine's calls again."""

from pathlib import Path

import numpy as np

from benchmarks.engine_share import MAX_NEW_TOKENS, RecordingRunner, measure_share
from dragoman.export.bundle import Bundle
from dragoman.server.runtime.onnx import OnnxRunner


def test_calls_are_passed_on_and_can_be_made_again(endless: tuple[Path, Path]) -> None:
    bundle = Bundle.open(endless[1])
    runner = OnnxRunner(bundle, 3, 1)
    recorder = RecordingRunner(runner)
    tokens, positions = np.array([2, 2]), np.array([0, 0])
    recorder.prefill([[5, 9, 1], [7, 1]], [0, 1])
    first = recorder.step(tokens, positions, 4).ids.copy()
    tokens[:], positions[:] = (30, 40), 1  # the engine's own arrays, which go on
    second = recorder.step(tokens, positions, 4)
    expected = second.ids.copy(), second.log_probs.copy()
    recorder.copy_row(1, 2, 2)
    recorder.copy_positions(0, 1, 0, 2)
    assert not np.array_equal(first, expected[0])
    runner.prefill([[11, 12, 13, 1]] * 3, [0, 1, 2])  # nothing of before is left
    recorder.replay()
    again = runner.step(np.array([30, 40, 40]), np.array([1, 1, 1]), 4)
    assert runner.cache.source_lengths.tolist() == [3, 2, 2]
    np.testing.assert_array_equal(again.ids[[0, 2]], expected[0])
    np.testing.assert_array_equal(again.log_probs[[0, 2]], expected[1])


def test_a_share_is_measured_with_all_rows_in_use(endless: tuple[Path, Path]) -> None:
    share = measure_share(endless[1], 3, num_threads=1, num_rounds=2)
    assert share.num_rows == 3 and MAX_NEW_TOKENS > 0
    assert 0 < share.share_inside < 1 and share.step_seconds > 0
    assert share.engine_tokens_per_second > 0 and share.bare_tokens_per_second > 0 and share.ratio > 0
    assert share.row("tiny")["rows"] == 3
