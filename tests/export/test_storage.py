"""Weights in files: each stored once, whichever graph reads it, and mapped again once it is written."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from onnx_ir import ExternalTensor

from dragoman.export.bundle import DECODER_FILE, ENCODER_FILE, SCORER_FILE, SCORER_WEIGHTS_FILE
from dragoman.export.storage import ALIGNMENT, write_graphs
from dragoman.export.tracing import MAX_INLINE_BYTES
from tests.export.conftest import Export

GRAPHS = (ENCODER_FILE, DECODER_FILE, SCORER_FILE)


def graph_of(**tensors: np.ndarray) -> onnx_ir.Model:
    """Return a graph that has some weights, and nothing else."""
    values = [onnx_ir.Value(name=name, const_value=onnx_ir.tensor(array, name=name)) for name, array in tensors.items()]
    graph = onnx_ir.Graph([], [], nodes=[], opset_imports={"": 20}, name="main")
    for value in values:
        graph.register_initializer(value)
    return onnx_ir.Model(graph, ir_version=10)


def weights(path: Path) -> dict[str, Any]:
    return {str(value.name): value.const_value for value in onnx_ir.load(path).graph.initializers.values()}


def table(seed: int, rows: int = 300, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(rows, 32)).astype(dtype)


def test_weights_of_two_graphs_lie_in_the_file_of_the_first(tmp_path: Path) -> None:
    shared, own = table(0), table(1)
    graphs = [graph_of(a=shared, b=own), graph_of(c=shared.copy(), d=table(2)), graph_of(e=own.copy(), f=shared.copy())]
    write_graphs(graphs, tmp_path)
    found = [weights(tmp_path / name) for name in GRAPHS]
    places = {name: (tensor.location, tensor.offset) for tensors in found for name, tensor in tensors.items()}
    assert places["a"] == places["c"] == places["f"] and places["b"] == places["e"]
    assert {name: place[0] for name, place in places.items() if name in "ad"} == {"a": "encoder.weights", "d": "decoder.weights"}
    assert not (tmp_path / SCORER_WEIGHTS_FILE).exists()
    for tensors in found:
        for name, tensor in tensors.items():
            np.testing.assert_array_equal(tensor.numpy(), {"a": shared, "c": shared, "f": shared, "d": table(2)}.get(name, own))


def test_weights_of_other_type_shape_or_last_number_are_stored_apart(tmp_path: Path) -> None:
    first = table(0)
    last = first.copy()
    last[-1, -1] += 1
    bits, longer = first.view(np.int32), np.concatenate([first, first])
    write_graphs([graph_of(a=first), graph_of(b=last, c=bits, d=longer, e=first.reshape(32, 300)), graph_of()], tmp_path)
    found = weights(tmp_path / DECODER_FILE)
    assert {tensor.location for tensor in found.values()} == {"decoder.weights"}
    assert len({tensor.offset for tensor in found.values()}) == 4
    np.testing.assert_array_equal(found["b"].numpy(), last)


def test_small_tensors_stay_in_the_graph_and_large_ones_begin_a_page(tmp_path: Path) -> None:
    inline, small = np.zeros(MAX_INLINE_BYTES // 4, np.float32), np.ones(MAX_INLINE_BYTES // 4 + 1, np.float32)
    write_graphs([graph_of(i=inline, s=small, a=table(0), t=small * 2, b=table(1)), graph_of(), graph_of()], tmp_path)
    found = weights(tmp_path / ENCODER_FILE)
    assert not isinstance(found["i"], ExternalTensor)
    assert isinstance(found["s"], ExternalTensor) and isinstance(found["t"], ExternalTensor)
    assert [found[name].offset % ALIGNMENT for name in "ab"] == [0, 0]


def test_graphs_keep_mapped_weights_and_can_be_written_again(tmp_path: Path) -> None:
    shared = table(0)
    graphs = [graph_of(a=shared), graph_of(b=shared), graph_of(c=table(1))]
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        write_graphs(graphs, folder)
        for graph in graphs:
            for value in graph.graph.initializers.values():
                assert isinstance(value.const_value, ExternalTensor) and Path(value.const_value.path).parent == folder
    first, second = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("first", "second"))
    assert first == second and SCORER_WEIGHTS_FILE in first


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_scorer_has_a_file_of_its_own_for_weights_that_a_shortlist_leaves_out(export: Export, precision: str) -> None:
    bundle = export("tiny", precision, is_short=True)
    num_bytes = bundle.manifest.files[SCORER_WEIGHTS_FILE].size
    # In single precision the projection is the table of tokens, and its bias alone is missing.
    assert num_bytes == 4 * 300 if precision == "fp32" else 300 * 32 < num_bytes < 2 * 300 * 32
    own = [tensor for tensor in weights(bundle.scorer_path).values() if not isinstance(tensor, ExternalTensor)]
    assert max(tensor.nbytes for tensor in own) <= MAX_INLINE_BYTES
