"""The picture: a panel for each head, with its weights and tokens, that overlaps no other."""

from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure
from PIL import Image

from dragoman.attention.maps import Kind, Look
from dragoman.attention.picture import draw
from tests.attention.examples import READ, SAID, SOURCE, look, part


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Figures that are drawn, as matplotlib makes them."""
    made: list[Figure] = []
    original = Figure.__init__

    def keep(self: Figure, *arguments: object, **options: object) -> None:
        original(self, *arguments, **options)
        made.append(self)

    monkeypatch.setattr(Figure, "__init__", keep)
    return made


def test_every_head_has_a_panel_with_its_weights_and_tokens(figures: list[Figure], tmp_path: Path) -> None:
    draw(tmp_path / "a.png.tmp", look())
    (figure,) = figures
    *panels, _scale = figure.axes
    drawn = [drawn for part in look().parts for drawn in part.maps]
    assert len(panels) == len(drawn) == 21
    for panel, expected in zip(panels, drawn, strict=True):
        assert panel.images[0].get_array().tolist() == [pytest.approx(row) for row in expected.weights]
    headings = [text.get_text() for text in figure.texts]
    assert "Encoder self-attention, layer 2" in headings and headings.count("head 2") == 7
    for first, rows, columns in ((0, SOURCE, SOURCE), (9, READ, READ), (15, SAID, SOURCE)):
        assert tuple(label.get_text() for label in panels[first].get_yticklabels()) == rows
        for panel in panels[first : first + 3]:
            assert tuple(label.get_text() for label in panel.get_xticklabels()) == columns
    with Image.open(tmp_path / "a.png.tmp") as image:
        assert image.format == "PNG" and image.width > 300 and image.height > 800
        assert len(image.convert("RGB").getcolors(1 << 24)) > 20


def test_many_heads_take_several_rows_and_do_not_overlap(figures: list[Figure], tmp_path: Path) -> None:
    draw(tmp_path / "a.png", Look("m", "s", "t", (part(Kind.CROSS, SAID, SOURCE, 2, 11),)))
    boxes = [axes.get_position() for axes in figures[0].axes]
    assert len(boxes) == 23
    for i, one in enumerate(boxes):
        assert 0 <= one.x0 < one.x1 <= 1 and 0 <= one.y0 < one.y1 <= 1
        for other in boxes[:i]:
            assert one.x0 >= other.x1 or other.x0 >= one.x1 or one.y0 >= other.y1 or other.y0 >= one.y1
