"""What the search options cost in each decode step, at 64 rows, and which part of a step is Python.

    python -m benchmarks.search_cost --data data/multi30k [--bundle-cache FOLDER]

Two models: the shipped en-de, and a random one of the size of Transformer-base with 32,000 tokens; both with end-of-sequence ruled
out, so that all rows stay. Every option is driven through the same engine in this thread, all of them in turns, several times over;
figures are medians over all full steps. The cache folder keeps the exported bundles for the next time.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.models import base_bundle, endless_bundle
from benchmarks.harness.report import environment, write
from benchmarks.harness.stopwatch import StopwatchRunner
from dragoman.model.corpus import read_lines
from dragoman.server.cores import available_cores
from dragoman.server.engine.messages import GREEDY, Request, Sampling, SearchOptions
from dragoman.server.offline import OfflineTranslator

ROOT = Path(__file__).parents[1]
NUM_ROWS = 64
NUM_STEPS = 16
NUM_DIRECT_STEPS = 4
PREFIX = [5, 9] * (NUM_STEPS // 2)
TOP_K, TOP_P = Sampling(seed=1, top_k=40), Sampling(seed=1, top_p=0.9)

OPTIONS = {
    "greedy": GREEDY,
    "greedy, top 5 log-probabilities": SearchOptions(num_top_log_probs=5),
    "greedy, forced prefix being fed": SearchOptions(forced_prefix=PREFIX),
    "greedy, no_repeat_ngram_size 3": SearchOptions(no_repeat_ngram_size=3),
    "greedy, repetition_penalty 1.2": SearchOptions(repetition_penalty=1.2),
    "sampled, top_k 40": SearchOptions(sampling=TOP_K),
    "sampled, top_p 0.9": SearchOptions(sampling=TOP_P),
    "sampled, temperature 1": SearchOptions(sampling=Sampling(seed=1)),
    "4 samples, top_k 40": SearchOptions(num_answers=4, sampling=TOP_K),
    "beam 4": SearchOptions(num_beams=4),
    "beam 4, 4 answers": SearchOptions(num_beams=4, num_answers=4),
    "beam 8": SearchOptions(num_beams=8),
}


@dataclass(slots=True)
class Timings:
    """Seconds of full steps, one entry a step.

    Attributes:
        steps: The whole `Engine.step`.
        graphs: Running the graph in it, twice where the whole vocabulary had to be seen.
        copies: Copying cache rows in it.
        num_repeated: Steps that ran the graph twice.
    """

    steps: list[float] = field(default_factory=list)
    graphs: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    num_repeated: int = 0

    def row(self, greedy_seconds: float) -> dict[str, Any]:
        """Return the figures of one option."""
        python = [step - graph - copy for step, graph, copy in zip(self.steps, self.graphs, self.copies, strict=True)]
        seconds, python_seconds = statistics.median(self.steps), statistics.median(python)
        return {
            "ms a step": _ms(seconds),
            "× greedy": f"{seconds / greedy_seconds:.2f}",
            "graph ms": _ms(statistics.median(self.graphs)),
            "cache copies ms": _ms(statistics.median(self.copies)),
            "Python ms": _ms(python_seconds),
            "Python share": f"{python_seconds / seconds:.1%}",
            "steps repeated": f"{self.num_repeated / len(self.steps):.1%}",
        }


class Bench:
    """One bundle, its engine and what was measured on it."""

    def __init__(self, bundle: Path, num_threads: int) -> None:
        self.translator = OfflineTranslator(bundle, NUM_ROWS, num_threads)
        self.name = self.translator.bundle.manifest.name
        self.vocab_size = self.translator.bundle.manifest.target_vocab_size
        self.timings = {name: Timings() for name in OPTIONS}
        self.widths: dict[int, list[float]] = {k: [] for k in (1, 2, 8, 16, 64, 256, self.vocab_size)}
        self._runner = StopwatchRunner(self.translator.engine.runner)
        self.translator.engine.runner = self._runner

    def sources(self, texts: Sequence[str]) -> list[list[int]]:
        """Return source ids: of the texts, two of them a source, or random ones where the model cannot read."""
        eos_id = self.translator.bundle.manifest.eos_id
        if self.translator.tokenizers.target.vocab_size == self.translator.bundle.manifest.source_vocab_size:
            pairs = [f"{a} {b}" for a, b in zip(texts[::2], texts[1::2], strict=False)][:NUM_ROWS]
            return [[*ids, eos_id] for ids in self.translator.tokenizers.source.encode_batch(pairs)]
        random = np.random.default_rng(0)
        return [[*random.integers(3, self.vocab_size, random.integers(20, 36)).tolist(), eos_id] for _ in range(NUM_ROWS)]

    def measure_widths(self, sources: list[list[int]]) -> None:
        """Run the graph alone on all rows, with each K."""
        runner = self._runner
        runner.prefill(sources, range(NUM_ROWS))
        tokens = np.full(NUM_ROWS, 5, np.int64)
        for k, seconds in self.widths.items():
            runner.step(tokens, np.zeros(NUM_ROWS, np.int64), k)  # binds
            for position in range(NUM_DIRECT_STEPS):
                runner.reset()
                runner.step(tokens, np.full(NUM_ROWS, position, np.int64), k)
                seconds.append(runner.step_seconds)

    def measure_option(self, name: str, sources: list[list[int]]) -> None:
        """Fill all rows with requests of one kind and drive them to their end; keep the steps that had every row."""
        search, timings = OPTIONS[name], self.timings[name]
        engine, runner = self.translator.engine, self._runner
        limit = 1 if search.forced_prefix else NUM_STEPS
        for i, source in enumerate(sources[: NUM_ROWS // search.num_slots]):
            engine.submit(b"bench", Request(i, source, limit, time.monotonic(), search=search))
        while engine.has_work:
            runner.reset()
            started = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - started
            after = engine.statistics()
            reports = engine.take_reports().values()
            assert all(end.reason == "length" for report in reports for end in report.finished)
            if [step.num_rows for step in after.steps] == [NUM_ROWS] and not after.prefills and engine.has_work:
                timings.steps.append(seconds)
                timings.graphs.append(runner.step_seconds)
                timings.copies.append(runner.copy_seconds)
                timings.num_repeated += runner.num_steps > 1

    def rows(self) -> list[dict[str, Any]]:
        """Return the table of this model: the graph alone, then the options."""
        greedy_seconds = statistics.median(self.timings["greedy"].steps)
        rows = []
        for k, seconds in self.widths.items():
            median = statistics.median(seconds)
            alone = {"ms a step": _ms(median), "× greedy": f"{median / greedy_seconds:.2f}", "graph ms": _ms(median)}
            nothing = dict.fromkeys(("cache copies ms", "Python ms", "Python share", "steps repeated"), "")
            rows.append({"model": self.name, "search": f"graph alone, K = {k:,}"} | alone | nothing)
        for name, timings in self.timings.items():
            rows.append({"model": self.name, "search": name} | timings.row(greedy_seconds))
        return rows


def measure(bench: Bench, texts: Sequence[str], num_rounds: int) -> None:
    """Measure everything in turns, beginning with another option in each round."""
    sources = bench.sources(texts)
    names = list(OPTIONS)
    for i in range(num_rounds):
        bench.measure_widths(sources)
        for name in names[i % len(names) :] + names[: i % len(names)]:
            bench.measure_option(name, sources)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.3f}"


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=Path("data/multi30k"))
    parser.add_argument("--bundle-cache", type=Path, default=Path(tempfile.gettempdir()) / "dragoman-benchmark-bundles")
    parser.add_argument("--threads", type=int, default=available_cores(), help="Threads of ONNX Runtime.")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    texts = read_lines(arguments.data / "test_2016_flickr.en.gz")
    bundles = [
        endless_bundle(ROOT / "model/pretrained/en-de", arguments.bundle_cache),
        base_bundle(arguments.bundle_cache),
    ]
    about = environment("onnxruntime", "numpy") | {"threads": arguments.threads, "rows": NUM_ROWS, "rounds": arguments.rounds}
    rows = []
    for bundle in bundles:
        bench = Bench(bundle, arguments.threads)
        about["device"] = bench.translator.engine.runner.device
        measure(bench, texts, arguments.rounds)
        rows += bench.rows()
    write("search_cost", "Cost of the search options in each decode step", about, rows, _notes(arguments.threads, arguments.rounds))


def _notes(num_threads: int, num_rounds: int) -> list[str]:
    """Say how to read the table."""
    return [
        f"{NUM_ROWS} rows in every step: {NUM_ROWS} requests, or {NUM_ROWS // 4} of 4 hypotheses, or {NUM_ROWS // 8} of 8; "
        f"on cpu, {num_threads} threads. Medians over all such steps of {num_rounds} rounds, prefill not included. "
        "End-of-sequence is ruled out in both models, and `base-endless` has random weights, scaled to be as sure as a "
        "trained model's.",
        "",
        "`graph` is the decode step in ONNX Runtime, top-K included; `cache copies` is rows that follow their hypotheses; "
        "`Python` is everything else in `Engine.step`: choosing, bookkeeping and reporting. `steps repeated` had to look at the "
        "whole vocabulary to be exact, and ran the graph twice. `return_log_probs` costs nothing here: the engine always has them.",
    ]


if __name__ == "__main__":
    main()
