"""Charts of a report, drawn by matplotlib as SVG that stands in the page: text is text, and takes the page's colour."""

import io
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter

from dragoman.load.histogram import Histogram, middle_of
from dragoman.load.plan import KINDS
from dragoman.load.result import Result
from dragoman.load.scrape import ServerSeries
from dragoman.load.show import number

_MAX_COLUMNS, _ROWS = 120, 34
_PERCENTS = (0.0, 50.0, 90.0, 95.0, 99.0, 99.9, 99.99)
# Colours that can be told apart with any eyes (Okabe and Ito), on light and dark ground.
_COLOURS = ("#0072b2", "#d98200", "#008f6b", "#a6588a", "#c8460a", "#7a828e")
_INK = "#5c6470"  # becomes the page's text colour
_SETTINGS: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "dragoman",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.xmargin": 0.0,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    **dict.fromkeys(("axes.edgecolor", "axes.labelcolor", "grid.color", "legend.labelcolor", "text.color"), _INK),
    **dict.fromkeys(("xtick.color", "ytick.color"), _INK),
}


class Chart(NamedTuple):
    """A chart: its title, and an SVG element."""

    title: str
    svg: str


Points = Sequence[tuple[float, float]]


def latency_charts(result: Result) -> list[Chart]:
    """Return the latency by percentile and over time."""
    return [*_percentiles(result), *_latency_over_time(result)]


def request_charts(result: Result) -> list[Chart]:
    """Return rates of requests and tokens, and calls in flight, over time."""
    rates = {"due": "num_due", "answered": "num_done", "good": "num_good", "failed": "num_failed"}
    if not result.slos:
        del rates["good"]
    kinds = (
        ("Requests a second", "requests a second", rates, True),
        ("Calls under way", "calls", {"most under way": "in_flight"}, False),
        ("Tokens a second", "tokens a second", {"tokens of the answers": "tokens"}, True),
    )
    return [chart for kind in kinds for chart in _over_time(result, *kind)]


def sweep_charts(result: Result) -> list[Chart]:
    """Return throughput and latency by offered rate."""
    assert result.sweep is not None
    steps, knee = sorted(result.sweep.steps, key=lambda step: step.rate), result.sweep.knee

    def mark(axes: Axes) -> None:
        if knee is not None:
            _mark(axes, knee, f"knee {number(knee)}/s")

    rates: dict[str, Points] = {
        "answers": [(step.rate, step.requests_per_second) for step in steps],
        "good answers": [(step.rate, step.goodput) for step in steps],
    }
    times: dict[str, Points] = {
        name: [(step.rate, _milli(step.times["e2e"].figure(name))) for step in steps if "e2e" in step.times]
        for name in ("p50", "p95", "p99")
    }
    offered, limit = "calls a second, offered", _milli(result.slos.get("e2e"))
    return [
        *_lines("Throughput by offered rate", offered, "a second", rates, mark),
        *_lines("Latency by offered rate", offered, "milliseconds", times, mark, limit=limit, is_log=True),
    ]


def server_charts(series: ServerSeries, seconds: float) -> list[Chart]:
    """Return the server's own metrics from one address while calls were sent."""
    points = [point for point in series.points if 0 <= point.at <= seconds]
    kinds: tuple[tuple[str, str, dict[str, str], float], ...] = (
        ("Requests in the server", "requests", {"waiting": "waiting", "running": "running"}, 1),
        ("Decode batch", "rows", {"slots in use": "slots_in_use", "rows in a step": "rows_per_step"}, 1),
        ("Step and queue", "milliseconds", {"step": "step_seconds", "queue": "queue_seconds"}, 1e3),
        ("Tokens the server generated", "tokens a second", {"tokens": "tokens_per_second"}, 1),
        ("Processor", "cores", {"all processes of the server": "cpu_cores"}, 1),
        ("Memory", "MiB", {"all processes of the server": "rss_bytes"}, 1 / (1024 * 1024)),
    )
    charts: list[Chart] = []
    for title, unit, names, factor in kinds:
        lines = {
            label: [(point.at, point.values.get(name, math.nan) * factor) for point in points] for label, name in names.items()
        }
        charts += _lines(title, "seconds since the start", unit, lines, end=seconds)
    return charts


def _percentiles(result: Result) -> Iterator[Chart]:
    """Yield the latency at each percentile, stretched to the right so that the tail can be seen."""
    histograms = {"end to end": result.total.counts.times.get("e2e"), "first token": result.total.counts.times.get("ttft")}
    kinds = [name for name in (*KINDS, "slow") if name in result.groups]
    if len(kinds) > 1:
        histograms |= {name: result.groups[name].counts.times.get("e2e") for name in kinds}
    present = {name: histogram for name, histogram in histograms.items() if histogram is not None and histogram.num}
    if not present:
        return
    end = min(5.0, max(1.0, math.log10(max(histogram.num for histogram in present.values()))))
    places = np.linspace(0, end, 161).tolist()
    lines: dict[str, Points] = {}
    for name, histogram in list(present.items())[: len(_COLOURS)]:
        last = max(math.log10(histogram.num) + 1e-9, 0.3)  # beyond it there is no sample
        lines[name] = [(place, _milli(histogram.percentile(100 * (1 - 10**-place)))) for place in places if place <= last]

    def draw(axes: Axes) -> None:
        ticks = {-math.log10(1 - percent / 100): f"{percent:g}" for percent in _PERCENTS}
        axes.set_xticks([place for place in ticks if place <= end], [text for place, text in ticks.items() if place <= end])

    label = "percent of the requests that were not slower"
    limit = _milli(result.slos.get("e2e"))
    yield from _lines("Latency by percentile", label, "milliseconds", lines, draw, limit=limit, is_log=True)


def _latency_over_time(result: Result) -> Iterator[Chart]:
    """Yield the number of requests by time and latency, with the median and the 99th percentile."""
    slices, columns = result.timeline.slices, []
    size = max(1, -(-len(slices) // _MAX_COLUMNS))  # neighbours that are merged
    width = result.timeline.width * size
    for start in range(0, len(slices), size):
        columns.append(Histogram())
        for piece in slices[start : start + size]:
            columns[-1].merge(piece.e2e)
    filled = [column for column in columns if column.num]
    if not filled:
        return
    del columns[columns.index(filled[-1]) + 1 :]
    low = max(min(column.smallest or column.largest for column in filled) * 1000, 1e-3)
    high = max(max(column.largest for column in filled) * 1000, low * 1.1)
    edges = np.geomspace(low * 0.99, high * 1.01, _ROWS + 1)
    counts = np.zeros((_ROWS, len(columns)))
    for place, column in enumerate(columns):
        middles = np.clip([middle_of(index) * 1000 for index in column.bins], edges[0], edges[-1])
        counts[:, place] = np.histogram(middles, edges, weights=list(column.bins.values()))[0]
    lines: dict[str, Points] = {
        label: [((place + 0.5) * width, _milli(column.percentile(percent))) for place, column in enumerate(columns)]
        for label, percent in (("median", 50), ("99th percentile", 99))
    }

    def draw(axes: Axes) -> None:
        cells = np.ma.masked_equal(np.sqrt(counts), 0)
        axes.pcolormesh(np.arange(len(columns) + 1) * width, edges, cells, cmap="Blues", vmin=-0.5, rasterized=True, zorder=0)
        _mark_warmup(axes, result)

    title = "End-to-end latency over time (stronger: more requests)"
    yield from _lines(title, "seconds since the start, when the request was due", "milliseconds", lines, draw, is_log=True, first=1)


def _over_time(result: Result, title: str, unit: str, names: Mapping[str, str], is_rate: bool) -> Iterator[Chart]:
    width = result.timeline.width
    slices = [piece for i, piece in enumerate(result.timeline.slices) if i * width < result.seconds] or result.timeline.slices
    # The last slice is often cut short by the end of the run.
    lengths = [min(width, max(result.seconds - i * width, 0.001 * width)) if is_rate else 1 for i in range(len(slices))]
    if is_rate and len(slices) > 1 and lengths[-1] < width / 2:
        slices, lengths = slices[:-1], lengths[:-1]
    lines: dict[str, Points] = {
        label: [((i + 0.5) * width, getattr(piece, name) / lengths[i]) for i, piece in enumerate(slices)]
        for label, name in names.items()
    }
    end = len(slices) * width
    yield from _lines(title, "seconds since the start", unit, lines, lambda axes: _mark_warmup(axes, result), end=end)


def _lines(
    title: str,
    x: str,
    y: str,
    lines: Mapping[str, Points],
    draw: Callable[[Axes], None] = lambda axes: None,
    *,
    limit: float = math.nan,
    is_log: bool = False,
    end: float = 0.0,
    first: int = 0,
) -> Iterator[Chart]:
    """Yield a chart of lines, broken where a value is not a number, from the colour `first` on; none without values."""
    if all(math.isnan(value) for points in lines.values() for _, value in points):
        return
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(7.2, 2.9), layout="constrained")
        axes = figure.subplots()
        for place, (label, points) in enumerate(lines.items()):
            values = np.maximum([value for _, value in points], 1e-3 if is_log else 0.0)
            marker = "o" if np.isfinite(values).sum() == 1 else ""
            colour = _COLOURS[(first + place) % len(_COLOURS)]
            axes.plot([at for at, _ in points], values, marker=marker, markersize=3, color=colour, label=label)
        if is_log:
            axes.set_yscale("log")
            low, high = axes.get_ylim()
            axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 2000 else (1,)))
            axes.yaxis.set_minor_formatter(NullFormatter())
            if low == high or high / low < 3:
                axes.yaxis.set_major_locator(FixedLocator(np.geomspace(low, high, 5).tolist()))
        else:
            axes.set_ylim(0, 1.05 * axes.dataLim.ymax or 1.0)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
        if end:
            axes.set_xlim(0, end)
        draw(axes)
        if axes.get_ylim()[0] <= limit <= axes.get_ylim()[1]:
            axes.axhline(limit, color=_INK, linestyle="--", linewidth=1, label="limit, end to end")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        figure.legend(loc="outside upper left", ncols=6, fontsize="small")
        yield Chart(title, _svg(figure, title))


def _svg(figure: Figure, title: str) -> str:
    """Return a figure as an SVG element without what only files need: header, metadata, style, ids of parts, a size."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, dpi=100, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    svg = text.getvalue()[text.getvalue().index("<svg") :]
    svg = re.sub(r"<style.*?</style>", "", svg, count=1, flags=re.DOTALL)  # of the whole page otherwise
    svg = re.sub(r' id="(?:figure|axes|patch|line2d|text|legend|matplotlib|xtick|ytick|QuadMesh|LineCollection)[^"]*"', "", svg)
    svg = re.sub(r' (?:width|height)="[\d.]+pt"', "", svg, count=2)
    return svg.replace(_INK, "currentColor").replace("<svg ", f'<svg role="img" aria-label="{title}" ', 1)


def _mark_warmup(axes: Axes, result: Result) -> None:
    if result.warmup_seconds:
        _mark(axes, result.warmup_seconds, "counted from here")


def _mark(axes: Axes, x: float, label: str) -> None:
    if not axes.get_xlim()[0] <= x <= axes.get_xlim()[1]:
        return
    axes.axvline(x, color=_INK, linestyle=":", linewidth=1)
    alignment = "right" if x > sum(axes.get_xlim()) * 0.6 else "left"
    axes.text(x, 0.98, f" {label} ", ha=alignment, va="top", fontsize="small", transform=axes.get_xaxis_transform())


def _milli(seconds: float | None) -> float:
    return math.nan if seconds is None else seconds * 1000
