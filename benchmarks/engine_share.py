"""What share of a decode step is the runner's, and how close the engine comes to the bare decode loop.

    python -m benchmarks.engine_share --bundles bundles/en-de [--rows 1 8 64] [--threads 2] [--quick]

The bare loop makes the very calls of the runner that the engine made, in the same order and with the same tokens, and nothing else.
Both are done in turns, several times over; figures are medians. Other benchmarks use `measure_share`.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.report import environment, write
from benchmarks.harness.stopwatch import StopwatchRunner
from dragoman.server.cores import available_cores
from dragoman.server.engine.messages import Request
from dragoman.server.engine.search.candidates import Candidates
from dragoman.server.offline import OfflineTranslator
from dragoman.server.runtime.runner import Runner

MAX_NEW_TOKENS = 32
SHORTEST, LONGEST = 12, 24
NUM_ROUNDS = 9


@dataclass(frozen=True, slots=True)
class Share:
    """How the time of greedy requests that start together is spent.

    Attributes:
        num_rows: Requests.
        step_seconds: A whole step with all rows in use: median.
        share_inside: Part of such a step that is in the runner: the graph, and handing its inputs over. Median.
        engine_tokens_per_second: Tokens of the answers by the time of all steps, prefill included: median.
        bare_tokens_per_second: The same of the runner's calls alone.
        ratio: Engine by bare loop: median of the ratios of neighbours.
    """

    num_rows: int
    step_seconds: float
    share_inside: float
    engine_tokens_per_second: float
    bare_tokens_per_second: float
    ratio: float

    def row(self, model: str) -> dict[str, Any]:
        """Return the figures for a table."""
        return {
            "model": model,
            "rows": self.num_rows,
            "ms a step": f"{self.step_seconds * 1000:.3f}",
            "inside the runner": f"{self.share_inside:.1%}",
            "engine tokens/s": f"{self.engine_tokens_per_second:,.0f}",
            "bare loop tokens/s": f"{self.bare_tokens_per_second:,.0f}",
            "engine / bare": f"{self.ratio:.1%}",
        }


class RecordingRunner:
    """See `runner.Runner`: it passes calls on, and can make them again."""

    def __init__(self, runner: Runner) -> None:
        self.device, self.max_rows = runner.device, runner.max_rows
        self.holder = self.reader = None  # whatever is encoded goes through here
        self.graphs, self.memory = runner.graphs, runner.memory
        self._runner = runner
        self._calls: list[Callable[[], object]] = []

    def replay(self) -> None:
        """Make all calls again."""
        for call in self._calls:
            call()

    def prefill(self, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """See `Runner`."""
        self._calls.append(lambda: self._runner.prefill(sources, rows))
        self._runner.prefill(sources, rows)

    def step(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Candidates:
        """See `Runner`."""
        kept = tokens.copy(), positions.copy()
        self._calls.append(lambda: self._runner.step(*kept, num_candidates))
        return self._runner.step(tokens, positions, num_candidates)

    def look(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int) -> Candidates:
        """See `Runner`."""
        kept = tokens.copy(), positions.copy()
        self._calls.append(lambda: self._runner.look(*kept, num_candidates, first_row))
        return self._runner.look(tokens, positions, num_candidates, first_row)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """See `Runner`."""
        self._calls.append(lambda: self._runner.copy_row(source, target, length))
        self._runner.copy_row(source, target, length)

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """See `Runner`."""
        self._calls.append(lambda: self._runner.copy_positions(source, target, start, stop))
        self._runner.copy_positions(source, target, start, stop)

    def cache_bytes(self) -> tuple[int, int]:
        """See `Runner`."""
        return self._runner.cache_bytes()


def measure_share(bundle: Path, num_rows: int, num_threads: int = 0, num_rounds: int = NUM_ROUNDS) -> Share:
    """Measure greedy requests with random sources that fill `num_rows` rows at once; 0 threads means one a core."""
    translator = OfflineTranslator(bundle, num_rows, num_threads)
    engine, manifest = translator.engine, translator.bundle.manifest
    random = np.random.default_rng(0)
    longest = min(LONGEST, manifest.max_source_tokens)
    lengths = random.integers(min(SHORTEST, longest), longest + 1, num_rows).tolist()
    sources = [[*random.integers(3, manifest.source_vocab_size, n - 1).tolist(), manifest.eos_id] for n in lengths]
    runner, limit = engine.runner, min(MAX_NEW_TOKENS, manifest.max_target_tokens)
    recorder, stopwatch = RecordingRunner(runner), StopwatchRunner(runner)
    engine.runner = recorder
    num_tokens = sum(finished.num_generated for finished in translator.run(sources, limit))  # warms up, too
    engine.runner = stopwatch
    steps: list[float] = []
    shares: list[float] = []
    engine_seconds: list[float] = []
    bare_seconds: list[float] = []
    for _ in range(num_rounds):
        for i, source in enumerate(sources):
            engine.submit(b"bench", Request(i, source, limit, time.monotonic()))
        total = 0.0
        while engine.has_work:
            stopwatch.reset()
            started = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - started
            total += seconds
            after = engine.statistics()
            engine.take_reports()
            if [step.num_rows for step in after.steps] == [num_rows] and not after.prefills:
                steps.append(seconds)
                shares.append(stopwatch.step_seconds / seconds)
        engine_seconds.append(total)
        started = time.perf_counter()
        recorder.replay()
        bare_seconds.append(time.perf_counter() - started)
    return Share(
        num_rows,
        statistics.median(steps),
        statistics.median(shares),
        num_tokens / statistics.median(engine_seconds),
        num_tokens / statistics.median(bare_seconds),
        statistics.median(bare / whole for bare, whole in zip(bare_seconds, engine_seconds, strict=True)),
    )


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundles", type=Path, nargs="+", required=True)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64])
    parser.add_argument("--threads", type=int, default=available_cores(), help="Threads of ONNX Runtime.")
    parser.add_argument("--quick", action="store_true", help="Two rounds, and nothing is written.")
    arguments = parser.parse_args()
    num_rounds = 2 if arguments.quick else NUM_ROUNDS
    about = environment("onnxruntime", "numpy") | {"threads": arguments.threads, "rounds": num_rounds}
    rows = [
        measure_share(bundle, num_rows, arguments.threads, num_rounds).row(bundle.name)
        for bundle in arguments.bundles
        for num_rows in arguments.rows
    ]
    if arguments.quick:
        print(*rows, sep="\n")
        return
    notes = [
        f"Greedy requests with random sources of {SHORTEST} to {LONGEST} tokens, {MAX_NEW_TOKENS} new tokens at the most, all "
        f"submitted at once; {arguments.threads} threads; medians of {num_rounds} rounds in turns. The bare loop repeats the "
        "engine's calls of the runner, prefill included, and does nothing else. A step's time and what is inside the runner are of "
        "steps with all rows in use and without prefill."
    ]
    write("engine_share", "Share of a step that is the runner's", about, rows, notes)


if __name__ == "__main__":
    main()
