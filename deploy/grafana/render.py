"""Draw the dashboard's main panels from a running Prometheus, for the documents: Grafana's queries, matplotlib's lines.

Run `python -m deploy.grafana.render --prometheus http://127.0.0.1:9090 --minutes 5 --output docs/images/dashboard.png` from the
root of the repository while Prometheus has something to show.
"""

import argparse
import itertools
import json
import re
import time
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from numpy.typing import NDArray

matplotlib.use("Agg")
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.colors import PowerNorm
from matplotlib.figure import Figure

from deploy.grafana.generate import dashboard

COLUMNS = 3
BACKGROUND, GROUND, TEXT, GRID = "#111217", "#181b1f", "#ccccdc", "#2c3235"
LINES = ("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#b877d9", "#f2495c", "#8ab8ff", "#96d98d")
COLOURS = {"green": "#299c46", "yellow": "#c4a000", "red": "#c4162a"}
PANELS = (
    *("Answer", "Answers by time", "Where the time goes"),
    *("First token", "Tokens", "Requests by end"),
    *("Rows a step", "Steps by rows", "Decode step"),
    *("Running and waiting", "Slots", "Admitted and turned away"),
)
UNITS = {"reqps": "/s", "none": "", "suffix: tok/s": "tokens/s", "suffix: tok": "tokens", "bytes": "bytes", "s": "s"}
# A line that never rises above this share of the panel's highest is left out.
VISIBLE_SHARE = 0.005


@dataclass(frozen=True, slots=True)
class Source:
    """A Prometheus and the time to show.

    Attributes:
        address: Its URL.
        start: Seconds since 1970.
        end: The same.
        step: Seconds between points.
        window: What `$__rate_interval` stands for.
    """

    address: str
    start: float
    end: float
    step: float
    window: str

    def query(self, expression: str, *, is_range: bool) -> list[dict[str, Any]]:
        """Return the series of one of the dashboard's queries, everything chosen at its top."""
        expression = re.sub(r"\$(namespace|instance|model)", ".*", expression)
        expression = expression.replace("$__rate_interval", self.window).replace("$__range", f"{round(self.end - self.start)}s")
        arguments = {"query": expression}
        if is_range:
            arguments |= {"start": str(self.start), "end": str(self.end), "step": str(self.step)}
        else:
            arguments["time"] = str(self.end)
        url = f"{self.address}/api/v1/query{'_range' if is_range else ''}?{urllib.parse.urlencode(arguments)}"
        with urllib.request.urlopen(url, timeout=30) as answer:
            series: list[dict[str, Any]] = json.load(answer)["data"]["result"]
        return series


def draw_tile(figure: Figure, place: tuple[float, float, float, float], panel: dict[str, Any], source: Source) -> None:
    """Draw one figure on its ground."""
    axes = figure.add_axes(place)
    series = source.query(panel["targets"][0]["expr"], is_range=False)
    value = float(series[0]["value"][1]) if series else float("nan")
    steps = panel["fieldConfig"]["defaults"]["thresholds"]["steps"]
    colour = [step["color"] for step in steps if step["value"] is None or value >= step["value"]][-1]
    axes.set_facecolor(COLOURS[colour])
    axes.set(xticks=[], yticks=[])
    axes.spines[:].set_visible(False)
    axes.text(0.5, 0.42, _readable(value, panel), ha="center", va="center", color="white", fontsize=17, weight="bold")
    axes.text(0.04, 0.86, panel["title"], ha="left", va="center", color="white", fontsize=8)


def _readable(value: float, panel: dict[str, Any]) -> str:
    """Return a figure as Grafana would write it."""
    defaults = panel["fieldConfig"]["defaults"]
    if np.isnan(value):
        return "no data"
    match defaults["unit"]:
        case "percentunit":
            return f"{100 * value:.{max(0, defaults.get('decimals', 2) - 1)}f} %"
        case "s":
            return f"{value:.2f} s" if value >= 1 else f"{1000 * value:.0f} ms"
        case "reqps":
            return f"{value:.0f}/s"
        case _:
            return f"{value:g}"


def draw_lines(axes: Axes, panel: dict[str, Any], source: Source) -> None:
    """Draw a panel of lines, stacked where it is."""
    defaults = panel["fieldConfig"]["defaults"]
    custom = defaults["custom"]
    found = [(target["legendFormat"], one) for target in panel["targets"] for one in source.query(target["expr"], is_range=True)]
    lines = [(_legend(legend, one["metric"]), *_points(one, source)) for legend, one in found]
    largest = max((float(np.nan_to_num(values).max()) for _, _, values in lines), default=0.0)
    scale, unit = _scale(defaults["unit"], largest)
    base = np.zeros(1)
    shown = [line for line in lines if np.nan_to_num(line[2]).max() > VISIBLE_SHARE * largest]
    for (label, times, values), colour in zip(shown, itertools.cycle(LINES)):
        if custom["stacking"]["mode"] == "normal":
            top = base + scale * np.nan_to_num(values)
            axes.fill_between(times, base, top, color=colour, alpha=0.55, linewidth=0, label=label)
            base = top
        else:
            axes.plot(times, scale * values, color=colour, linewidth=1.4, label=label)
    if custom["thresholdsStyle"]["mode"] == "dashed":
        limit = scale * defaults["thresholds"]["steps"][-1]["value"]
        axes.axhline(limit, color=COLOURS["red"], linestyle="--", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.set_ylabel(unit, color=TEXT, fontsize=7)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.legend(loc="upper left", ncols=4, fontsize=6.5, frameon=False, labelcolor=TEXT, handlelength=1.2, columnspacing=1)
    axes.set_ylim(top=1.22 * axes.get_ylim()[1])


def _scale(unit: str, largest: float) -> tuple[float, str]:
    """Return what values are multiplied by, and the unit they have then."""
    if unit == "percentunit":
        return 100, "%"
    return (1000, "ms") if unit == "s" and largest < 1 else (1, UNITS[unit])


def draw_heatmap(axes: Axes, panel: dict[str, Any], source: Source) -> None:
    """Draw a histogram over time; the axis has a line for each bucket, as Grafana's has."""
    series = source.query(panel["targets"][0]["expr"], is_range=True)
    series.sort(key=lambda one: float(one["metric"]["le"]))
    edges = [float(one["metric"]["le"]) for one in series]
    cumulative = np.array([np.nan_to_num(_points(one, source)[1]) for one in series])
    counts = np.diff(cumulative, axis=0, prepend=0).clip(min=0)
    used = np.flatnonzero(counts.sum(axis=1) > 1e-6)
    first, last = (max(0, used[0] - 1), min(len(edges) - 1, used[-1] + 1)) if len(used) else (0, len(edges) - 1)
    counts, edges = counts[first : last + 1], edges[first : last + 1]
    times = _points(series[0], source)[0]
    shown = np.ma.masked_less(counts, 1e-6)
    axes.pcolormesh(times, np.arange(len(edges)), shown, cmap="YlOrRd_r", norm=PowerNorm(0.5), shading="nearest")
    stride = -(-len(edges) // 8)
    axes.set_yticks(range(0, len(edges), stride), [f"{edge:g}" for edge in edges[::stride]])
    axes.set_ylabel(UNITS[panel["options"]["yAxis"]["unit"]], color=TEXT, fontsize=7)


def _points(series: dict[str, Any], source: Source) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return minutes since the start, and values at all of them; what is missing is not a number."""
    times = np.arange(source.start, source.end + 1e-6, source.step)
    values = np.full(len(times), np.nan)
    for at, value in series["values"]:
        values[round((float(at) - source.start) / source.step)] = float(value)
    return (times - source.start) / 60, values


def _legend(pattern: str, labels: dict[str, str]) -> str:
    return re.sub(r"\{\{(\w+)\}\}", lambda match: labels.get(match[1], ""), pattern)


def render(source: Source, output: Path) -> None:
    """Write the picture."""
    panels = {panel["title"]: panel for panel in dashboard()["panels"] if panel["type"] != "row"}
    tiles = [panel for panel in panels.values() if panel["type"] == "stat"]
    num_rows = -(-len(PANELS) // COLUMNS)
    figure = pyplot.figure(figsize=(13, 1.4 + 2.5 * num_rows), facecolor=BACKGROUND)
    tile_height = 0.95 / figure.get_figheight()
    for i, panel in enumerate(tiles):
        width = 0.96 / len(tiles)
        draw_tile(figure, (0.025 + i * width, 0.985 - tile_height, width - 0.006, tile_height), panel, source)
    grid = figure.add_gridspec(
        num_rows, COLUMNS, left=0.045, right=0.985, top=0.965 - tile_height - 0.02, bottom=0.035, wspace=0.16, hspace=0.36
    )
    for i, title in enumerate(PANELS):
        axes = figure.add_subplot(grid[i // COLUMNS, i % COLUMNS], facecolor=GROUND)
        (draw_heatmap if panels[title]["type"] == "heatmap" else draw_lines)(axes, panels[title], source)
        axes.set_title(title, color=TEXT, fontsize=9, loc="left", weight="bold")
        axes.set_xlim(0, (source.end - source.start) / 60)
        if i >= len(PANELS) - COLUMNS:
            axes.set_xlabel("minutes", color=TEXT, fontsize=7)
        axes.tick_params(colors=TEXT, labelsize=7, length=2)
        axes.spines[:].set_color(GRID)
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=100)
    pyplot.close(figure)


def main() -> None:
    """Read the options and draw."""
    parser = argparse.ArgumentParser(description="Draw the dashboard's main panels from a running Prometheus.")
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="Its address.")
    parser.add_argument("--minutes", type=float, default=5, help="How long back.")
    parser.add_argument("--step", type=float, default=2, help="Seconds between points.")
    parser.add_argument("--window", default="20s", help="What rates are taken over; at least four scrapes.")
    parser.add_argument("--output", type=Path, default=Path("docs/images/dashboard.png"), help="The picture.")
    options = parser.parse_args()
    end = time.time()
    render(Source(options.prometheus, end - 60 * options.minutes, end, options.step, options.window), options.output)


if __name__ == "__main__":
    main()
