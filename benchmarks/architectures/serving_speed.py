"""What a step of the engine's runner takes at so many rows, and what reading a source or a prompt takes, by its length."""

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.architectures.training_speed import model_of, sides
from benchmarks.harness.models import SHIPPED
from dragoman.export.bundle import Bundle
from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.runtime.onnx import OnnxRunner
from dragoman.server.runtime.runner import Runner

ROWS = (1, 8, 64)
SOURCES = (8, 64, 512)
STEP_SOURCE, ANSWER_TOKENS = 24, 16
WINDOW = 8
"""Steps, or readings, that a round's figure is the least of."""
TOKEN = 7


def runners(folder: Path, num_threads: int) -> dict[str, Runner]:
    """Export each side with random weights, and load it as the server does."""
    loaded: dict[str, Runner] = {}
    tokenizers = Tokenizers.load(SHIPPED)
    for place, side in enumerate(sides()):
        checkpoint, bundle = folder / f"checkpoint-{place}", folder / f"bundle-{place}"
        Checkpoint(f"compared-{place}", model_of(side).eval(), tokenizers).save(checkpoint)
        export_checkpoint(checkpoint, bundle)
        loaded[side.name] = OnnxRunner(Bundle.open(bundle), max(ROWS), num_threads)
    return loaded


def measure(num_rounds: int, num_threads: int) -> list[dict[str, Any]]:
    """Return a row for each side: medians of rounds in which sides take turns, in milliseconds."""
    found: dict[tuple[str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        loaded = runners(Path(folder), num_threads)
        # Steps first: a long source makes room that the steps of all who are there have to pass.
        for figures_of in (_steps, _readings):
            for place in range(num_rounds + 1):
                for name, runner in loaded.items():
                    taken = figures_of(runner)
                    if place:  # the first is for memory
                        for figure, seconds in taken.items():
                            found.setdefault((name, figure), []).append(1000 * seconds)
    columns = dict.fromkeys(column for _, column in found)
    return [{"model": name, **{column: f"{statistics.median(found[name, column]):.3f}" for column in columns}} for name in loaded]


def _steps(runner: Runner) -> dict[str, float]:
    return {f"step, {rows} rows": _step(runner, rows) for rows in ROWS}


def _readings(runner: Runner) -> dict[str, float]:
    return {f"read {length} tokens": _reading(runner, length) for length in SOURCES}


def _reading(runner: Runner, length: int) -> float:
    """Read one source, or prompt, into the first row; return the least time of several."""
    return min(_timed_reading(runner, length) for _ in range(WINDOW))


def _timed_reading(runner: Runner, length: int) -> float:
    started = time.perf_counter()
    runner.prefill([[TOKEN] * length], [0])
    return time.perf_counter() - started


def _step(runner: Runner, num_rows: int) -> float:
    """Decode answers' tokens in rows that have sources; return the least time of the last steps."""
    runner.prefill([[TOKEN] * STEP_SOURCE for _ in range(num_rows)], list(range(num_rows)))
    tokens = np.full(num_rows, TOKEN)
    seconds = []
    for position in range(ANSWER_TOKENS + WINDOW // 2):
        started = time.perf_counter()
        runner.step(tokens, np.full(num_rows, position), 1)
        seconds.append(time.perf_counter() - started)
    return min(seconds[-WINDOW:])
