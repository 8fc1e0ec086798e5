"""Graphs whose weights lie in one file: the same tensors, each block once and aligned, read by ONNX's own library."""

import re
from pathlib import Path

import onnx
import pytest

from dragoman.export.bundle import Bundle
from dragoman.export.session import WRITTEN_SUFFIX, open_session
from dragoman.server.runtime.weights import ALIGNMENT, WEIGHTS_FILE, Layout

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


def blocks(path: Path) -> list[tuple[tuple[int, int], bytes]]:
    """Return the place and the bytes of all weights of a graph, in every order that ONNX Runtime wrote."""
    found = []
    for tensor in onnx.load(path, load_external_data=False).graph.initializer:
        texts = {entry.key: entry.value for entry in tensor.external_data}
        packed = [re.findall(r"\|(\d+);(\d+);", text) for key, text in texts.items() if key.startswith("prepacked")]
        own = [[(texts["offset"], texts["length"])]] if texts else []
        content = (path.parent / texts["location"]).read_bytes() if texts else b""
        for start, length in ((int(start), int(length)) for places in (*own, *packed) for start, length in places):
            found.append(((start, length), content[start : start + length]))
    return found


def test_every_block_stays_is_aligned_and_there_once(written: Path, laid_out: Path) -> None:
    for name in NAMES:
        assert [content for _, content in blocks(written / name)] == [content for _, content in blocks(laid_out / name)]
    found = [place for name in NAMES for place, _ in blocks(laid_out / name)]
    different, content = sorted(set(found)), (laid_out / WEIGHTS_FILE).read_bytes()
    assert len(different) < len(found), "both graphs have some in common"
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
