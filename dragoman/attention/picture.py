"""A picture of attention: a panel for each head, by matplotlib; layers below each other, the heads of one side by side."""

import unicodedata
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure
from PIL import Image

from dragoman.attention.maps import NAMES, Look, Map, Part

MAX_COLUMNS: Final = 8
DOTS_PER_INCH: Final = 110
# Inches: of a cell and of a panel at the least, of a token's character, of what lies between and above panels.
_CELL, _LEAST, _CHARACTER, _GAP, _TITLE, _HEADING, _MARGIN = 0.125, 1.05, 0.055, 0.16, 0.2, 0.32, 0.15
_SCALE: Final = 0.55
_LEAST_WIDTH: Final = 3.6
_TOKEN_POINTS: Final = 7


@dataclass(frozen=True, slots=True)
class _Row:
    """Panels side by side; lengths in inches."""

    part: Part  # kinds of the drawn maps
    maps: tuple[Map, ...]  # one for each
    heading: str  # title
    width: float  # of a panel
    height: float  # of a panel
    beside: float  # room for the tokens on the left
    above: float  # room for those above each panel

    @property
    def whole_width(self) -> float:
        """Of all panels."""
        return self.beside + len(self.maps) * (self.width + _GAP)

    @property
    def top(self) -> float:
        """Of all that is above the panels."""
        return self.above + _TITLE + (_HEADING if self.heading else 0)


def draw(path: Path, look: Look) -> None:
    """Draw all maps into a PNG file."""
    rows = [row for part in look.parts for row in _rows(part)]
    width = max(_LEAST_WIDTH, *(row.whole_width + 2 * _MARGIN for row in rows))
    height = sum(row.top + row.height + _GAP for row in rows) + _SCALE + _MARGIN
    figure = Figure(figsize=(width, height), facecolor="white")
    figure.set_dpi(DOTS_PER_INCH)
    canvas = FigureCanvasAgg(figure)
    norm = PowerNorm(0.5, 0.0, 1.0)
    top = height - _MARGIN
    for row in rows:
        if row.heading:
            figure.text(_MARGIN / width, (top - 0.05) / height, row.heading, fontsize=10, va="top", weight="bold", parse_math=False)
        top -= row.top
        for number, drawn in enumerate(row.maps):
            left = _MARGIN + row.beside + number * (row.width + _GAP)
            place = (left / width, (top - row.height) / height, row.width / width, row.height / height)
            axes = figure.add_axes(place)
            image = axes.imshow(drawn.weights, cmap="Blues", norm=norm, aspect="auto", interpolation="nearest")
            figure.text(left / width, (top + row.above + 0.04) / height, drawn.head_name, fontsize=8, parse_math=False)
            _label(axes, row.part, has_rows=number == 0)
        top -= row.height + _GAP
    bar = figure.add_axes((2 * _MARGIN / width, 0.32 / height, 2.2 / width, 0.09 / height))
    figure.colorbar(image, cax=bar, orientation="horizontal", ticks=[0, 0.05, 0.25, 0.5, 1])
    bar.tick_params(labelsize=7, length=2)
    figure.text((2 * _MARGIN + 2.35) / width, 0.32 / height, "weight", fontsize=8)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing", UserWarning)  # of scripts that the font lacks; boxes are drawn
        canvas.draw()  # type: ignore[no-untyped-call]
    whole = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba())  # type: ignore[no-untyped-call]
    whole.convert("RGB").quantize(method=Image.Quantize.MAXCOVERAGE).save(path, format="PNG", optimize=True)


def _rows(part: Part) -> Iterator[_Row]:
    """Give a kind's panels in rows: a layer has one, and more where it has many heads."""
    sizes = (max(_LEAST, _CELL * len(part.columns)), max(_LEAST, _CELL * len(part.rows)))
    beside, above = _length(part.rows), _length(part.columns)
    for maps in part.layers():
        for start in range(0, len(maps), MAX_COLUMNS):
            heading = f"{NAMES[part.kind]}, {maps[0].layer_name}" if start == 0 else ""
            yield _Row(part, maps[start : start + MAX_COLUMNS], heading, *sizes, beside, above)


def _label(axes: Axes, part: Part, has_rows: bool) -> None:
    """Put tokens on the axes."""
    rows = list(part.rows) if has_rows else []
    axes.set_xticks(range(len(part.columns)), list(part.columns), rotation=90, fontsize=_TOKEN_POINTS, parse_math=False)
    axes.set_yticks(range(len(rows)), rows, fontsize=_TOKEN_POINTS, parse_math=False)
    axes.tick_params(top=True, labeltop=True, bottom=False, labelbottom=False, length=2, pad=1.5, color="0.6")
    for spine in axes.spines.values():
        spine.set_color("0.8")


def _length(tokens: Sequence[str]) -> float:
    """Return how long the longest token is, in inches."""
    wide = (sum(1.7 if unicodedata.east_asian_width(c) in "WF" or c in "mwMW—…⟨⟩" else 1 for c in token) for token in tokens)
    return max(wide, default=0.0) * _CHARACTER + 0.08
