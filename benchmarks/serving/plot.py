"""The figure of the benchmark `serving`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.serving.goodput import GOAL_PERCENT, Point, by_rung, middle, rate_of

MARKERS = "os^d"


def draw(path: Path, points: Mapping[str, Sequence[Point]], objective: float) -> None:
    """Draw latency over rate, a line for each server, and the objective.

    Args:
        path: PNG to write.
        points: Of each server; medians are drawn where a rate was measured several times.
        objective: In seconds.
    """
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for (name, own), marker in zip(points.items(), MARKERS, strict=False):
        medians = {rung: middle(group, lambda point: point.goal_seconds) for rung, group in by_rung(own).items()}
        drawn = {rate_of(rung): seconds * 1000 for rung, seconds in medians.items() if math.isfinite(seconds)}
        axes.plot(list(drawn), list(drawn.values()), marker=marker, markersize=4, label=name)
    axes.axhline(objective * 1000, color="black", linestyle="--", linewidth=1, label=f"objective, {objective * 1000:.0f} ms")
    axes.set_yscale("log")
    axes.set_xlim(left=0)
    axes.set_xlabel("requests a second, offered")
    axes.set_ylabel(f"latency at {GOAL_PERCENT} %, ms")
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
