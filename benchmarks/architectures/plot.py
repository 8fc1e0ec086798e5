"""Figures of the comparison of architectures."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.architectures.learning import length_names


def draw_learning(path: Path, runs: Sequence[Mapping[str, Any]]) -> None:
    """Draw validation loss over steps and over time, and BLEU by the length of the source; each run is a line."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    over_steps, over_time, by_length = figure.subplots(1, 3)
    names = list(dict.fromkeys(run["variant"] for run in runs))
    for place, name in enumerate(names):
        for number, run in enumerate(run for run in runs if run["variant"] == name):
            losses = [point["loss"] for point in run["curve"]]
            style: dict[str, Any] = {"color": f"C{place}", "label": name if not number else None, "linewidth": 1.2}
            over_steps.plot([point["step"] for point in run["curve"]], losses, **style)
            over_time.plot([point["seconds"] / 60 for point in run["curve"]], losses, **style)
            by_length.plot(length_names(), run["BLEU by length"], marker="o", markersize=3, **style)
    over_steps.set(xlabel="steps", ylabel="validation loss, nats a token")
    over_time.set(xlabel="minutes of training", ylabel="validation loss, nats a token")
    by_length.set(xlabel="words of the source", ylabel="BLEU of test_2016, greedy")
    for axes in (over_steps, over_time, by_length):
        axes.grid(visible=True, alpha=0.25)
    over_steps.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=130)


def draw_speeds(path: Path, speeds: Mapping[str, Mapping[int, float]], label: str) -> None:
    """Draw tokens a second over the length of sequences, both axes logarithmic, a line for each side."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for name, of_lengths in speeds.items():
        axes.plot(list(of_lengths), list(of_lengths.values()), marker="o", markersize=4, label=name)
    lengths = sorted({length for of_lengths in speeds.values() for length in of_lengths})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [str(length) for length in lengths])
    axes.set(xlabel="tokens of a sequence", ylabel=label)
    axes.grid(visible=True, which="both", alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=130)
