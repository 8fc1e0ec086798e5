"""Rewrites for the CPU: they have their effect, and results keep their bits."""

from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest

from dragoman.export.cpu import keep_sums_apart, keep_time_axis
from dragoman.export.graphs.transformer_step import StepGraph
from dragoman.export.parity import Row, drive
from dragoman.export.quantize import quantize
from dragoman.export.running import OnnxRunner
from dragoman.export.tracing import trace, write
from dragoman.model.checkpoint import Checkpoint


def operators(path: Path) -> list[str]:
    return [node.op_type for node in onnx.load(path, load_external_data=False).graph.node]


@pytest.fixture
def directory(exported: Path, tmp_path: Path) -> Path:
    """Return a copy of the graphs in single precision."""
    for name in ("scorer.onnx", "encoder.onnx", "encoder.weights", "decoder.onnx", "decoder.weights"):
        (tmp_path / name).write_bytes((exported / name).read_bytes())
    return tmp_path


def digests(directory: Path, checkpoint: Checkpoint) -> list[str]:
    config = checkpoint.model.config
    random = np.random.default_rng(0)
    rows = [
        Row([*random.integers(3, 300, length).tolist(), config.eos_id], [config.decoder_start_id, *range(5, 4 + length)], length)
        for length in (3, 1, 9, 5)
    ]
    drive(OnnxRunner(directory, config), rows, 3, 20, False)
    return [row.digest for row in rows]


def test_exported_graphs_leave_nothing_to_fuse_with_a_layer_norm(exported: Path) -> None:
    for name in ("encoder.onnx", "decoder.onnx"):
        graph = onnx.load(exported / name, load_external_data=False).graph
        sums = {node.output[0] for node in graph.node if node.op_type == "Add"}
        assert not [node for node in graph.node if node.op_type == "LayerNormalization" and node.input[0] in sums]


@pytest.mark.parametrize("is_apart", [False, True])
def test_runtime_fuses_sums_and_norms_unless_they_are_apart(checkpoint: Checkpoint, tmp_path: Path, is_apart: bool) -> None:
    """If ONNX Runtime no longer fuses what is left as it was, keeping sums apart has lost its purpose."""
    model = trace(StepGraph(checkpoint.model))
    if is_apart:
        keep_sums_apart(model)
    quantize(model, {})
    keep_time_axis(model)  # what has no axis but rows and features is not fused, either
    write(model, tmp_path / "step.onnx", "step.weights")
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.optimized_model_filepath = str(tmp_path / "optimised.onnx")
    onnxruntime.InferenceSession(tmp_path / "step.onnx", options, providers=["CPUExecutionProvider"])
    assert ("SkipLayerNormalization" in operators(tmp_path / "optimised.onnx")) is not is_apart


def test_time_axis_gives_the_same_bits_with_fewer_nodes(checkpoint: Checkpoint, directory: Path) -> None:
    found = []
    for is_kept in (False, True):
        model = trace(StepGraph(checkpoint.model))
        keep_sums_apart(model)
        quantize(model, {})
        if is_kept:
            keep_time_axis(model)
        write(model, directory / "decoder.onnx", "step.weights")
        names = operators(directory / "decoder.onnx")
        found.append((digests(directory, checkpoint), names.count("Squeeze") + names.count("Unsqueeze")))
    (before, num_before), (after, num_after) = found
    assert before == after
    assert num_after == 3 < num_before == 8, "token ids, positions and the last hidden state"
