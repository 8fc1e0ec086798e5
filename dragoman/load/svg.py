"""Plots as SVG text: axes, lines, columns of cells. Colours are classes of the page's style sheet; it knows nothing of load."""

import html
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dragoman.load.show import number

WIDTH, HEIGHT = 720, 270
LEFT, RIGHT, TOP, BOTTOM = 70, 28, 18, 44
NUM_COLOURS = 6


@dataclass(frozen=True, slots=True)
class Line:
    """Points that belong together.

    Attributes:
        label: What they are.
        points: In order of x; a y of None breaks the line.
        colour: Number of the colour.
    """

    label: str
    points: Sequence[tuple[float, float | None]]
    colour: int


@dataclass(frozen=True, slots=True)
class Axis:
    """One direction of a plot.

    Attributes:
        label: What it shows, with the unit.
        low: Least value.
        high: Greatest value.
        ticks: Values with a mark, and their texts.
        is_log: Whether equal distances are equal ratios.
    """

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value is: 0 at the low end, 1 at the high one."""
        if self.is_log:
            return math.log(max(value, self.low) / self.low) / math.log(self.high / self.low)
        return (value - self.low) / (self.high - self.low)


def linear_axis(label: str, high: float, low: float = 0.0) -> Axis:
    """Return an axis with about five round marks."""
    high = high if high > low else low + 1
    rough = (high - low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(size * power for size in (1, 2, 5, 10) if size * power >= rough * 0.999)
    top = math.ceil((high - low) / step - 1e-9) * step + low
    count = round((top - low) / step)
    return Axis(label, low, top, [(low + i * step, number(low + i * step)) for i in range(count + 1)])


def log_axis(label: str, low: float, high: float) -> Axis:
    """Return an axis from and to round numbers, marked at 1, 2 and 5, where it spans much at the powers of ten."""
    sizes = (1, 2, 5) if high / low < 2000 else (1,)
    marks = [s * 10.0**p for p in range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 2) for s in sizes]
    first = max((mark for mark in marks if mark <= low * 1.001), default=marks[0])
    last = min((mark for mark in marks if mark >= high * 0.999 and mark > first), default=marks[-1])
    return Axis(label, first, last, [(m, number(m)) for m in marks if first <= m <= last], is_log=True)


def x_of(axis: Axis, value: float) -> float:
    """Return the abscissa of a value in the picture."""
    return LEFT + axis.place(value) * (WIDTH - LEFT - RIGHT)


def y_of(axis: Axis, value: float) -> float:
    """Return the ordinate of a value in the picture."""
    return TOP + (1 - axis.place(value)) * (HEIGHT - TOP - BOTTOM)


def plot(title: str, x: Axis, y: Axis, lines: Sequence[Line], cells: str = "", marks: str = "") -> str:
    """Return a picture of lines, over cells and under marks that are SVG already; its legend is HTML above it."""
    parts = [_axes(x, y), cells, *(_path(x, y, line) for line in lines), marks]
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{html.escape(title, quote=True)}">{"".join(parts)}</svg>'
    keys = "".join(f'<span class="key k{line.colour}">{html.escape(line.label)}</span>' for line in lines if line.label)
    return f'<figure><figcaption>{html.escape(title)}</figcaption><div class="keys">{keys}</div>{svg}</figure>'


def tips(x: Axis, centres: Sequence[float], width: float, text: Callable[[int], str]) -> str:
    """Return invisible columns, each with a text that browsers show where the mouse rests."""
    parts = []
    for i, centre in enumerate(centres):
        left = max(LEFT, x_of(x, centre - width / 2))
        right = min(WIDTH - RIGHT, x_of(x, centre + width / 2))
        if right > left:
            parts.append(
                f'<rect class="tip" x="{left:.1f}" y="{TOP}" width="{right - left:.1f}" height="{HEIGHT - TOP - BOTTOM}">'
                f"<title>{html.escape(text(i))}</title></rect>"
            )
    return "".join(parts)


def upright(x: Axis, value: float, label: str) -> str:
    """Return a dashed line at a value of x, with its label."""
    at = x_of(x, value)
    anchor = "end" if at > WIDTH * 0.75 else "start"
    shift = -5 if anchor == "end" else 5
    return (
        f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}"/>'
        f'<text x="{at + shift:.1f}" y="{TOP + 12}" text-anchor="{anchor}">{html.escape(label)}</text>'
    )


def level(y: Axis, value: float, label: str) -> str:
    """Return a dashed line at a value of y, with its label; nothing where it is off the axis."""
    if not y.low <= value <= y.high:
        return ""
    at = y_of(y, value)
    return (
        f'<line class="mark" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>'
        f'<text x="{WIDTH - RIGHT - 4}" y="{at - 4:.1f}" text-anchor="end">{html.escape(label)}</text>'
    )


def _axes(x: Axis, y: Axis) -> str:
    bottom = HEIGHT - BOTTOM
    parts = []
    for value, text in y.ticks:
        at = y_of(y, value)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{html.escape(text)}</text>')
    for value, text in x.ticks:
        at = x_of(x, value)
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{bottom}"/>')
        parts.append(f'<text x="{at:.1f}" y="{bottom + 17}" text-anchor="middle">{html.escape(text)}</text>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">{html.escape(x.label)}</text>')
    parts.append(f'<text transform="translate(14 {middle}) rotate(-90)" text-anchor="middle">{html.escape(y.label)}</text>')
    return "".join(parts)


def _path(x: Axis, y: Axis, line: Line) -> str:
    commands, is_down, num_runs = [], False, 0
    for at, value in line.points:
        if value is None:
            is_down = False
            continue
        commands.append(f"{'L' if is_down else 'M'}{x_of(x, at):.1f} {y_of(y, value):.1f}")
        num_runs += not is_down
        is_down = True
    if not commands:
        return ""
    if num_runs == len(commands):  # single points would not be seen
        dots = [(x_of(x, at), y_of(y, value)) for at, value in line.points if value is not None]
        return "".join(f'<circle class="dot k{line.colour}" cx="{a:.1f}" cy="{b:.1f}" r="3"/>' for a, b in dots)
    return f'<path class="line k{line.colour}" d="{"".join(commands)}"/>'
