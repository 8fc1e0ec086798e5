"""Graphs whose weights lie in one file: the same tensors, as ONNX's own library reads them, each once and aligned."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from dragoman.server.runtime.weights_layout import ALIGNMENT, WEIGHTS_FILE, Layout

RANDOM = np.random.default_rng(0)
SHARED = RANDOM.standard_normal((7, 5)).astype(np.float32)  # 140 bytes: what follows it is not aligned
OWN = {name: RANDOM.integers(-128, 128, 33, np.int8) for name in ("one", "two")}
ORDERS = RANDOM.bytes(300)


def written(folder: Path, name: str) -> tuple[Path, Path]:
    """Write a graph as ONNX Runtime does: raw weights and those in an order of their own one right behind the other."""
    data = bytearray(b"###")
    tensors = []
    for tensor_name, array in (("shared", SHARED), ("own", OWN[name])):
        tensor = numpy_helper.from_array(array, tensor_name)
        content = tensor.raw_data
        tensor.ClearField("raw_data")
        tensor.data_location = TensorProto.EXTERNAL
        places = {"location": f"{name}.data", "offset": str(len(data)), "length": str(len(content))}
        data += content
        blocks = []
        for i in range(2):
            blocks.append(f"{len(data)};{100 + i};0")
            data += ORDERS[: 100 + i]
        places["prepacked_0"] = "|".join(["MatMul+123", *blocks])
        for key, value in places.items():
            tensor.external_data.add(key=key, value=value)
        tensors.append(tensor)
    inside = numpy_helper.from_array(np.arange(4, dtype=np.int64), "inside")
    values = [helper.make_tensor_value_info(value, TensorProto.FLOAT, None) for value in ("x", "y")]
    node = helper.make_node("MatMul", ["x", "shared"], ["y"], alpha=1.5)
    graph = helper.make_graph([node], "g", values[:1], values[1:], [*tensors, inside])
    path = folder / f"{name}.onnx"
    path.write_bytes(helper.make_model(graph).SerializeToString())
    path.with_suffix(".data").write_bytes(data)
    return path, path.with_suffix(".data")


@pytest.fixture
def laid_out(tmp_path: Path) -> Path:
    into = tmp_path / "into"
    into.mkdir()
    with Layout(into) as layout:
        for name in OWN:
            layout.add(*written(tmp_path, name))
    return into


def places(path: Path) -> dict[str, dict[str, str]]:
    """Return what a graph says of each tensor's bytes."""
    model = onnx.load(path, load_external_data=False)
    return {tensor.name: {entry.key: entry.value for entry in tensor.external_data} for tensor in model.graph.initializer}


def blocks(path: Path) -> list[tuple[int, int]]:
    """Return where the blocks of a graph lie, those in an order of their own too."""
    found = []
    for texts in places(path).values():
        if texts:
            found.append((int(texts["offset"]), int(texts["length"])))
            found += [(int(start), int(length)) for start, length, _ in (b.split(";") for b in texts["prepacked_0"].split("|")[1:])]
    return found


@pytest.mark.parametrize("name", OWN)
def test_tensors_orders_of_their_own_and_all_else_stay(laid_out: Path, tmp_path: Path, name: str) -> None:
    content = (laid_out / WEIGHTS_FILE).read_bytes()
    for texts in places(laid_out / f"{name}.onnx").values():
        for i, text in enumerate(texts.get("prepacked_0", "").split("|")[1:]):
            start, length, rest = text.split(";")
            assert content[int(start) : int(start) + int(length)] == ORDERS[: 100 + i] and rest == "0"
        assert not texts or (texts["location"], texts["prepacked_0"].split("|")[0]) == (WEIGHTS_FILE, "MatMul+123")
    before, after = (onnx.load(folder / f"{name}.onnx", load_external_data=False) for folder in (tmp_path, laid_out))
    for tensor in after.graph.initializer:  # ONNX's library knows of no other order, and warns
        known = [entry for entry in tensor.external_data if not entry.key.startswith("prepacked")]
        tensor.ClearField("external_data")
        tensor.external_data.extend(known)
    read = onnx.ModelProto()
    read.CopyFrom(after)
    onnx.external_data_helper.load_external_data_for_model(read, str(laid_out))
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in read.graph.initializer}
    for tensor_name, array in (("shared", SHARED), ("own", OWN[name]), ("inside", np.arange(4))):
        np.testing.assert_array_equal(found[tensor_name], array)
    for model in (before, after):
        for tensor in model.graph.initializer:
            tensor.ClearField("external_data")
    assert before == after


def test_every_block_is_aligned_and_there_once(laid_out: Path) -> None:
    found = [block for name in OWN for block in blocks(laid_out / f"{name}.onnx")]
    assert len(found) == 12 and all(start % ALIGNMENT == 0 for start, _ in found)
    content = (laid_out / WEIGHTS_FILE).read_bytes()
    different = sorted(set(found))
    assert len(different) == 5, "one shared tensor, two others, and an order of each length"
    assert len({content[start : start + length] for start, length in different}) == len(different)
    assert all(end <= start for end, start in zip([a + n for a, n in different], [a for a, _ in different[1:]], strict=False))


@pytest.mark.parametrize("content", [None, b"\xff" * 20, b"\x3a\x7f", b"\x3b", b"\x3a\x04\x2a\x02\x6a\x40"])
def test_truncated_weights_and_malformed_graphs_are_refused(tmp_path: Path, content: bytes | None) -> None:
    graph, weights = written(tmp_path, "one")
    if content is None:
        weights.write_bytes(weights.read_bytes()[:-1])
    else:
        graph.write_bytes(content)
    (tmp_path / "into").mkdir()
    with Layout(tmp_path / "into") as layout, pytest.raises(ValueError, match="ends before" if content is None else "."):
        layout.add(graph, weights)
