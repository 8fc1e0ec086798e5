"""Figures of the benchmark `scaling`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

PANELS = {"step ms": "step, ms", "first token ms": "first token, ms", "memory MB": "memory, MB"}
MARKERS = "os^d"


def draw(path: Path, label: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw a sweep: a panel for each figure, a line for each precision, both axes logarithmic.

    Args:
        path: PNG to write.
        label: Column of the rows that is varied.
        rows: The sweep's rows of the table, not yet rounded.
    """
    figure = Figure(figsize=(11, 3.4), layout="constrained")
    FigureCanvasAgg(figure)
    precisions = list(dict.fromkeys(row["precision"] for row in rows))
    for place, (column, title) in enumerate(PANELS.items(), 1):
        axes = figure.add_subplot(1, len(PANELS), place)
        for precision, marker in zip(precisions, MARKERS, strict=False):
            own = [row for row in rows if row["precision"] == precision]
            axes.plot([row[label] for row in own], [row[column] for row in own], marker=marker, markersize=4, label=precision)
        ticks = sorted({row[label] for row in rows})
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.set_xlabel(label)
        axes.set_title(title)
        axes.grid(visible=True, which="both", alpha=0.25)
    figure.axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)
