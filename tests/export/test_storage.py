"""Weights in files: each stored once, whichever graph reads it; and graph files, read as ONNX's own library reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir
import pytest
from onnx_ir import ExternalTensor

from dragoman.export.bundle import DECODER_FILE, ENCODER_FILE, SCORER_FILE, SCORER_WEIGHTS_FILE, BundleError
from dragoman.export.graph_file import BFLOAT16, FLOAT, FLOAT16, INT8, INT32, INT64, GraphFile
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


@pytest.mark.parametrize("name", ["encoder", "decoder", "scorer"])
def test_nodes_and_tensors_are_those_that_onnx_reads(exported: Path, name: str) -> None:
    path = exported / f"{name}.onnx"
    found, model = GraphFile.read(path), onnx_ir.load(path)
    nodes = list(model.graph.all_nodes())
    by_name = {node.name: node for node in found.nodes if node.name}
    assert by_name.keys() == {node.name for node in nodes}
    for node in nodes:
        read = by_name[str(node.name)]
        assert (read.op_type, read.domain) == (node.op_type, node.domain)
        assert read.inputs == tuple("" if value is None else value.name for value in node.inputs)
        assert read.outputs == tuple(value.name for value in node.outputs)
        numbers = {
            a.name: a.value for a in node.attributes.values() if a.type in (onnx_ir.AttributeType.INT, onnx_ir.AttributeType.FLOAT)
        }
        assert {name: read.attributes[name] for name in numbers} == pytest.approx(numbers)
        for value in (*node.inputs, *node.outputs):
            if value is not None and value.shape is not None and value.dtype is not None:
                info = found.tensors[str(value.name)]
                assert info.dtype == int(value.dtype)
                assert info.shape == tuple(size if isinstance(size, int) else size.value for size in value.shape)
    weights = [value.const_value for value in model.graph.initializers.values()]
    assert found.num_weight_bytes == sum(weight.nbytes for weight in weights if weight is not None) > 1000


def test_types_are_those_of_onnx() -> None:
    names = ("FLOAT", "INT8", "INT32", "INT64", "FLOAT16", "BFLOAT16")
    assert tuple(int(onnx_ir.DataType[name]) for name in names) == (FLOAT, INT8, INT32, INT64, FLOAT16, BFLOAT16)


def test_weights_of_every_width_are_counted(tmp_path: Path) -> None:
    arrays = [np.zeros((3, 5), dtype) for dtype in (np.float32, np.float16, np.int8, np.uint8, np.int64, np.float64)]
    values = [onnx_ir.Value(name=str(i), const_value=onnx_ir.tensor(array)) for i, array in enumerate(arrays)]
    graph = onnx_ir.Graph([], [], nodes=[], initializers=values, opset_imports={"": 20}, name="main")
    onnx_ir.save(onnx_ir.Model(graph, ir_version=10), tmp_path / "graph.onnx")
    assert GraphFile.read(tmp_path / "graph.onnx").num_weight_bytes == 15 * (4 + 2 + 1 + 1 + 8 + 8)


def test_file_that_is_no_graph_or_not_there_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "graph.onnx"
    with pytest.raises(BundleError, match=r"graph\.onnx: No such file"):
        GraphFile.read(path)
    for content in (b"\xff" * 64, b"\x3a\xff\xff\xff\x0f", b"\x3a\x06\x0a\x04\x1a\x02\xc3\x28"):
        path.write_bytes(content)
        with pytest.raises(BundleError, match=r"graph\.onnx: not an ONNX graph"):
            GraphFile.read(path)
