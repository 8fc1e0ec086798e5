"""Our reader of graph files, compared with ONNX's own library."""

from pathlib import Path

import numpy as np
import onnx_ir
import pytest

from dragoman.export.bundle import BundleError
from dragoman.export.graph_file import BFLOAT16, FLOAT, FLOAT16, INT8, INT32, INT64, GraphFile


@pytest.mark.parametrize("name", ["encoder", "decoder", "scorer"])
def test_nodes_and_tensors_are_those_that_onnx_reads(exported: Path, name: str) -> None:
    path = exported / f"{name}.onnx"
    found, model = GraphFile.read(path), onnx_ir.load(path)
    nodes = list(model.graph.all_nodes())
    assert [(node.name, node.op_type, node.domain) for node in found.nodes if node.name] == [
        (node.name, node.op_type, node.domain) for node in _in_order(model.graph)
    ]
    by_name = {node.name: node for node in found.nodes}
    for node in nodes:
        read = by_name[str(node.name)]
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


def _in_order(graph: onnx_ir.Graph) -> list[onnx_ir.Node]:
    """Return a graph's nodes, and after them those of its branches, node by node."""
    own = list(graph)
    inner = [a.value for node in own for a in node.attributes.values() if a.type == onnx_ir.AttributeType.GRAPH]
    return own + [node for branch in inner for node in _in_order(branch)]


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
