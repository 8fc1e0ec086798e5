"""Two ways to find the likeliest token on a GPU: TopK with K = 1, as bundles for CUDA have it, and ArgMax with what it points to.

CUDA's TopK works through a row with one block; ArgMax is a reduction. Which is faster depends on rows and vocabulary, so it is for
a device to say. A captured step can have no branch, so the other way is another graph, of the same weights and for K = 1 alone. On
the CPU, bundles look for the likeliest in blocks (`export/choice.py`), which takes a branch.
"""

from dataclasses import replace
from pathlib import Path

import onnx_ir

from dragoman.server.runtime.device.model import DeviceModel

WAYS = ("topk", "argmax")
FILE = "decoder.argmax.onnx"


def with_argmax(model: DeviceModel) -> DeviceModel:
    """Return a model whose decode step, written beside the other, finds one candidate by ArgMax; of equals the lowest id."""
    path = model.decoder_path.with_name(FILE)
    graph = onnx_ir.load(model.decoder_path)
    put_argmax(graph.graph)
    onnx_ir.save(graph, path)  # weights stay in the file where they are
    return replace(model, decoder_path=Path(path))


def put_argmax(graph: onnx_ir.Graph) -> None:
    """Take ArgMax and GatherElements in the place of a decode step's TopK; the number of candidates is no longer read."""
    top = next(node for node in graph if node.op_type == "TopK")
    (log_probs, _), (values, ids) = top.inputs, top.outputs
    assert log_probs is not None
    found = onnx_ir.node("ArgMax", [log_probs], {"axis": -1, "keepdims": 1}, name="ArgMax_0")
    picked = onnx_ir.node("GatherElements", [log_probs, found.outputs[0]], {"axis": -1}, name="GatherElements_0")
    for old, new in ((ids, found.outputs[0]), (values, picked.outputs[0])):
        new.name, new.shape, new.type = old.name, old.shape, old.type
        old.name = f"{old.name}.former"
    graph.insert_before(top, [found, picked])
    onnx_ir.convenience.replace_all_uses_with([values, ids], [picked.outputs[0], found.outputs[0]], replace_graph_outputs=True)
    graph.remove(top, safe=True)
