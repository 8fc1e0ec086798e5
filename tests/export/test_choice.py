"""A step that is asked for one candidate finds the one that it would name first of many, in less time."""

from pathlib import Path

import numpy as np
import onnx_ir
import pytest
from numpy.typing import NDArray

from dragoman.export.choice import block_size, choose_one_in_blocks
from dragoman.export.choice_parity import check_one_candidate
from dragoman.export.parity import ParityError, drive
from dragoman.export.row import Row
from dragoman.export.running import OnnxRunner
from dragoman.export.session import open_session
from dragoman.model.checkpoint import Checkpoint


def chooser(num_choices: int) -> onnx_ir.Model:
    """Return a graph that is a TopK of its input and nothing else."""
    log_probs = onnx_ir.Value(name="x", shape=onnx_ir.Shape(["N", num_choices]), type=onnx_ir.TensorType(onnx_ir.DataType.FLOAT))
    count = onnx_ir.Value(name="k", shape=onnx_ir.Shape([1]), type=onnx_ir.TensorType(onnx_ir.DataType.INT64))
    node = onnx_ir.node("TopK", [log_probs, count], {"axis": -1}, num_outputs=2)
    for value, name, dtype in zip(node.outputs, ("v", "i"), (onnx_ir.DataType.FLOAT, onnx_ir.DataType.INT64), strict=True):
        value.name, value.shape, value.type = name, onnx_ir.Shape(["N", "K"]), onnx_ir.TensorType(dtype)
    graph = onnx_ir.Graph([log_probs, count], node.outputs, nodes=[node], opset_imports={"": 20}, name="main")
    return onnx_ir.Model(graph, ir_version=10)


def likeliest(log_probs: NDArray[np.float32]) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    ids = log_probs.argmax(1, keepdims=True)
    return ids, np.take_along_axis(log_probs, ids, 1)


@pytest.mark.parametrize(("num_choices", "num_rows"), [(64, 1), (300, 5), (5000, 33), (32000, 3), (307, 4)])
def test_one_candidate_is_the_likeliest_and_of_equals_the_lowest(num_choices: int, num_rows: int, tmp_path: Path) -> None:
    model = chooser(num_choices)
    choose_one_in_blocks(model)
    onnx_ir.save(model, tmp_path / "choose.onnx")
    session = open_session(tmp_path / "choose.onnx", 2)
    random = np.random.default_rng(num_choices)
    log_probs = random.integers(-6, 0, (num_rows, num_choices)).astype(np.float32)  # hardly anything is the only one of its size
    log_probs[:, random.integers(0, num_choices, 9)] = -np.inf
    log_probs[0] = -np.inf
    log_probs[0, -1] = -100.0
    values, ids = session.run(None, {"x": log_probs, "k": np.array([1], np.int64)})
    expected_ids, expected = likeliest(log_probs)
    assert np.array_equal(ids, expected_ids) and np.array_equal(values, expected)
    values, ids = session.run(None, {"x": log_probs, "k": np.array([4], np.int64)})
    order = np.argsort(-log_probs, axis=1, kind="stable")[:, :4]
    assert np.array_equal(ids, order) and np.array_equal(values, np.take_along_axis(log_probs, order, 1))


def test_blocks_are_equal_and_about_as_many_as_they_are_long() -> None:
    assert [block_size(number) for number in (64, 5000, 32000)] == [8, 50, 160]
    assert block_size(307) is None  # a prime
    assert block_size(2 * 307) is None
    model = chooser(307)
    choose_one_in_blocks(model)
    assert [node.op_type for node in model.graph] == ["TopK"], "a vocabulary without equal blocks is searched as before"


@pytest.mark.parametrize("what", ["id", "log-probability"])
def test_gate_finds_a_step_whose_one_candidate_is_another(exported: Path, checkpoint: Checkpoint, what: str) -> None:
    config = checkpoint.model.config
    runner = OnnxRunner(exported, config)
    row = Row([7, 8, config.eos_id], [config.decoder_start_id, 5, 6], 3)
    drive(runner, [row], 1, 5, False)
    check_one_candidate(runner, [row], 2)
    if what == "id":
        row.choices[1] ^= 1
    else:
        row.log_probs[2] = float(np.nextafter(np.float32(row.log_probs[2]), np.float32(0)))
    with pytest.raises(ParityError, match="another first candidate"):
        check_one_candidate(runner, [row], 2)
