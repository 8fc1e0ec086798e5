"""The other way to find the likeliest token answers as TopK does."""

from pathlib import Path

import numpy as np
import onnx_ir
import pytest

from benchmarks.gpu.greedy import put_argmax
from dragoman.export.session import open_session
from tests.export.test_choice import chooser, likeliest


@pytest.mark.parametrize(("num_choices", "num_rows"), [(64, 1), (307, 9), (32000, 3)])
def test_argmax_finds_the_likeliest_and_of_equals_the_lowest(num_choices: int, num_rows: int, tmp_path: Path) -> None:
    model = chooser(num_choices)
    put_argmax(model.graph)
    assert sorted(node.op_type for node in model.graph) == ["ArgMax", "GatherElements"]
    onnx_ir.save(model, tmp_path / "choose.onnx")
    random = np.random.default_rng(num_choices)
    log_probs = random.integers(-6, 0, (num_rows, num_choices)).astype(np.float32)  # hardly anything is the only one of its size
    log_probs[0] = -np.inf
    log_probs[0, -1] = -100.0
    values, ids = open_session(tmp_path / "choose.onnx", 1).run(None, {"x": log_probs, "k": np.array([1], np.int64)})
    expected_ids, expected = likeliest(log_probs)
    assert np.array_equal(ids, expected_ids) and np.array_equal(values, expected)
