"""The figure of the benchmark `soak`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.soak.watch import MEASURES, Reading


def draw(path: Path, readings: Mapping[str, Sequence[Reading]]) -> None:
    """Draw what processes held over time: a panel for each measure, a line for each process.

    Args:
        path: PNG to write.
        readings: By the name of the process.
    """
    figure = Figure(figsize=(11, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for place, measure in enumerate(MEASURES, 1):
        axes = figure.add_subplot(1, len(MEASURES), place)
        for name, own in readings.items():
            axes.plot([reading.at / 60 for reading in own], [reading.values[measure] for reading in own], label=name, linewidth=1)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("minutes")
        axes.set_title(measure)
        axes.grid(visible=True, alpha=0.25)
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
