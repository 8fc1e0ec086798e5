"""The figure of the benchmark `autoscaling`."""

from collections.abc import Mapping
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.simulation.surge import Curve, Surge

CEILING = 100.0
"""Seconds at which a latency is drawn that is longer, or that there is none for."""


def draw(path: Path, surges: Mapping[str, Surge], curves: Mapping[tuple[str, str], Curve], objective: float) -> None:
    """Draw each load with a column of its own: requests a second, pods, and the latency at 95 %, a line for each rule.

    Args:
        path: PNG to write.
        surges: By name.
        curves: By the names of surge and rule.
        objective: In seconds.
    """
    figure = Figure(figsize=(6 * len(surges), 8), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(3, len(surges), squeeze=False, sharex="col")
    for column, (title, surge) in enumerate(surges.items()):
        rates, pods, latency = grid[0][column], grid[1][column], grid[2][column]
        times = range(int(surge.seconds))
        rates.plot([at / 60 for at in times], [surge.rate(at) for at in times], color="black")
        rates.set_title(title)
        for (name, rule), curve in curves.items():
            if name != title:
                continue
            pods.plot([at / 60 for at in range(len(curve.num_ready))], curve.num_ready, label=rule)
            points = curve.latencies.items()
            latency.plot([at / 60 for at, _ in points], [min(seconds, CEILING) for _, seconds in points], label=rule, linewidth=1)
        latency.axhline(objective, color="black", linestyle="--", linewidth=1)
        latency.set_yscale("log")
        latency.set_xlabel("minutes")
        for axes, label in ((rates, "requests a second"), (pods, "ready pods"), (latency, "latency at 95 %, s")):
            axes.set_ylabel(label)
            axes.grid(visible=True, alpha=0.25)
        pods.legend(frameon=False)
    figure.savefig(path, dpi=150)
