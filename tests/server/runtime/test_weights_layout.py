"""Graphs whose weights lie in one file: the same tensors, each block once and aligned, read by ONNX's own library."""

import re
from pathlib import Path

import onnx
import pytest

from dragoman.export.bundle import Bundle
from dragoman.export.session import WRITTEN_SUFFIX, open_session
from dragoman.server.runtime.weights_layout import ALIGNMENT, WEIGHTS_FILE, Layout

NAMES = ("encoder.onnx", "decoder.onnx")


@pytest.fixture(scope="module")
def written(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of graphs as ONNX Runtime writes them, with weights in its own order one right behind the other."""
    bundle, folder = Bundle.open(tiny_bundle), tmp_path_factory.mktemp("written")
    for path in (bundle.encoder_path, bundle.decoder_path):
        open_session(str(path), 1, write_to=folder / path.name)
    return folder


@pytest.fixture(scope="module")
def laid_out(written: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("laid-out")
    with Layout(folder) as layout:
        for name in NAMES:
            layout.add(written / name, (written / name).with_suffix(WRITTEN_SUFFIX))
    return folder


Places = dict[tuple[str, str], list[tuple[int, int]]]


def read(path: Path) -> tuple[onnx.ModelProto, Places, dict[tuple[str, str], list[bytes]]]:
    """Return a graph without what it says of its weights' places, and of each order of each tensor its places and its bytes."""
    model, places, contents = onnx.load(path, load_external_data=False), Places(), {}
    for tensor in model.graph.initializer:
        texts = {entry.key: entry.value for entry in tensor.external_data}
        tensor.ClearField("external_data")
        for key, text in texts.items():
            if key == "offset":
                places[tensor.name, key] = [(int(text), int(texts["length"]))]
            elif key.startswith("prepacked"):
                places[tensor.name, f"{key} {re.sub('[0-9]+;', ';', text)}"] = [
                    (int(start), int(length)) for start, length in re.findall(r"\|(\d+);(\d+);", text)
                ]
        if texts:
            content = (path.parent / texts["location"]).read_bytes()
            contents |= {
                key: [content[start : start + length] for start, length in found]
                for key, found in places.items()
                if key[0] == tensor.name
            }
    return model, places, contents


@pytest.mark.parametrize("name", NAMES)
def test_graphs_and_their_weights_in_every_order_stay(written: Path, laid_out: Path, name: str) -> None:
    (before, _, old), (after, places, new) = read(written / name), read(laid_out / name)
    assert before == after and old == new
    assert any(key.startswith("prepacked") for _, key in places), "ONNX Runtime wrote an order of its own"


def test_every_block_is_aligned_and_there_once(laid_out: Path) -> None:
    found = [place for name in NAMES for blocks in read(laid_out / name)[1].values() for place in blocks]
    different, content = sorted(set(found)), (laid_out / WEIGHTS_FILE).read_bytes()
    assert len(different) < len(found), "both graphs have some in common"
    assert all(start % ALIGNMENT == 0 for start, _ in different)
    assert len({content[start : start + length] for start, length in different}) == len(different)
    ends = [0, *(-(-(start + length) // ALIGNMENT) * ALIGNMENT for start, length in different)]
    assert [start for start, _ in different] == ends[:-1] and len(content) == sum(different[-1]), "no gaps, no overlaps"


@pytest.mark.parametrize("content", [None, b"\xff" * 20, b"\x3a\x7f", b"\x3b", b"\x3a\x04\x2a\x02\x6a\x40"])
def test_truncated_weights_and_malformed_graphs_are_refused(written: Path, tmp_path: Path, content: bytes | None) -> None:
    graph, weights = tmp_path / "a.onnx", tmp_path / "a.data"
    graph.write_bytes((written / NAMES[0]).read_bytes() if content is None else content)
    weights.write_bytes((written / NAMES[0]).with_suffix(WRITTEN_SUFFIX).read_bytes()[:-1])
    (tmp_path / "into").mkdir()
    with Layout(tmp_path / "into") as layout, pytest.raises(ValueError, match="ends before" if content is None else "."):
        layout.add(graph, weights)
