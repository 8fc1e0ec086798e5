"""Growth of step time, latency, memory and throughput with rows, lengths, search options and engines.

    python -m benchmarks.scaling [--parts growth searches replicas] [--precisions fp32 int8] [--quick]

`growth`: step time, time to first token and memory of a random Transformer-base by rows, source tokens and target tokens;
precisions take turns. `searches`: a decode step of 64 rows with each search option, of the shipped en-de and of the random model,
and the share of it that is Python. `replicas`: answers a second and memory of a real server with 1, 2 and 4 engines of one thread.
"""

import argparse
import random
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.harness.actor import Actor
from benchmarks.harness.load import Load
from benchmarks.harness.models import (
    MODELS,
    PRECISIONS,
    SHIPPED,
    base_bundle,
    base_checkpoint,
    bundle_of,
    checkpoint_of,
    endless_bundle,
)
from benchmarks.harness.page import Page, output, parser
from benchmarks.harness.processes import ENGINE, FRONTEND, Setting, dragoman, memory_mib
from dragoman.model.corpus import read_lines
from dragoman.server.engine.messages import GREEDY, Request, Sampling, SearchOptions
from dragoman.server.runtime.runner import Candidates, Runner
from dragoman.server.system import available_cores
from tests.loop import Loop

PARTS = ("growth", "searches", "replicas")
FIRST_ID = 3
WINDOW = 16
"""Number of steps of a median step time."""
SWEEPS = ("rows", "source tokens", "target tokens")
NUM_ROWS, NUM_STEPS = 64, 16
TOP_K, TOP_P = Sampling(seed=1, top_k=40), Sampling(seed=1, top_p=0.9)
SEARCHES = {
    "greedy": GREEDY,
    "greedy, top 5 log-probabilities": SearchOptions(num_top_log_probs=5),
    "greedy, forced prefix being fed": SearchOptions(forced_prefix=[5, 9] * (NUM_STEPS // 2)),
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


@dataclass(frozen=True, slots=True)
class Point:
    """Requests decoded together: their number, tokens of each source (end-of-sequence included), tokens of each answer."""

    rows: int
    source_tokens: int
    target_tokens: int


def points(varied: str, is_quick: bool) -> list[Point]:
    """Return the points of a sweep in rising order, so that memory at each is that of the point."""
    lengths, num_rows = ((16, 64), 8) if is_quick else ((16, 32, 64, 128, 256, 512), 32)
    if varied == "rows":
        return [Point(count, 16, 32) for count in ((1, 8) if is_quick else (1, 2, 4, 8, 16, 32, 64, 128, 256))]
    return [Point(num_rows, length, 32) if varied == "source tokens" else Point(num_rows, 16, length) for length in lengths]


@dataclass(frozen=True, slots=True)
class Trace:
    """One run of requests that begin together."""

    # Of each step by target token; for steps with prefills, or without all rows, of the first step after them.
    step_seconds: list[float]
    first_token_seconds: float  # from submission until the last request had its first token
    memory_mib: list[float]  # growth of the process since the model was loaded, after each of those steps


class Probe:
    """An engine in a process of its own, with a model that never ends a sequence."""

    def __init__(self, bundle: Path, max_rows: int, num_threads: int) -> None:
        self._translator = Loop(bundle, max_rows, num_threads)
        self._before = memory_mib()["rss"]

    def trace(self, point: Point) -> Trace:
        """Decode random sources of one length, all submitted at once, to answers of one length."""
        engine, manifest = self._translator.engine, self._translator.manifest
        generator, started = random.Random(0), time.monotonic()
        for i in range(point.rows):
            ids = generator.choices(range(FIRST_ID, manifest.source_vocab_size), k=point.source_tokens - 1)
            engine.submit(Request(i, [*ids, manifest.eos_id], point.target_tokens, started))
        steps, memory, first_token = list[float](), list[float](), 0.0
        while engine.has_work:
            before = time.perf_counter()
            engine.step()
            seconds = time.perf_counter() - before
            done = engine.statistics()
            for end in engine.take_report().finished:
                assert end.first_token is not None and end.num_generated == point.target_tokens, end.reason
                first_token = max(first_token, end.first_token)
            if [step.num_rows for step in done.steps] == [point.rows] and not done.prefills:
                steps.append(seconds)
                memory.append(memory_mib()["rss"] - self._before)
        missing = point.target_tokens - len(steps)
        return Trace(steps[:1] * missing + steps, first_token - started, memory[:1] * missing + memory)


def growth(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure the sweeps, each in fresh processes, so that memory of one is not counted in another."""
    checkpoint = base_checkpoint()
    bundles = {precision: bundle_of(checkpoint, arguments.cache, precision) for precision in arguments.precisions}
    rows: list[dict[str, Any]] = []
    for varied in SWEEPS:
        swept = points(varied, arguments.quick)
        # A long answer includes the steps of all shorter ones: one run measures them all.
        runs = swept[-1:] if varied == "target tokens" else swept
        found: dict[tuple[str, Point], list[Trace]] = {(name, point): [] for name in bundles for point in swept}
        with ExitStack() as stack:
            most = max(point.rows for point in swept)
            probes = {name: stack.enter_context(Actor(Probe, path, most, arguments.threads)) for name, path in bundles.items()}
            for _ in range(arguments.rounds):
                for run in runs:
                    for name, probe in probes.items():
                        trace: Trace = probe.call("trace", run)
                        for point in swept if len(runs) == 1 else (run,):
                            found[name, point].append(trace)
        for (name, point), traces in found.items():
            own = {"varied": varied, "precision": name, "rows": point.rows, "source tokens": point.source_tokens}
            rows.append(own | {"target tokens": point.target_tokens} | growth_figures(traces, point))
            print(rows[-1], flush=True)
    return rows


def growth_figures(traces: Sequence[Trace], point: Point) -> dict[str, float]:
    """Return medians of the rounds, and memory at the first visit of the point."""
    windows = [trace.step_seconds[max(0, point.target_tokens - WINDOW) : point.target_tokens] for trace in traces]
    return {
        "step ms": round(1000 * statistics.median(seconds for window in windows for seconds in window), 2),
        "first token ms": round(1000 * statistics.median(trace.first_token_seconds for trace in traces), 1),
        "memory MiB": round(traces[0].memory_mib[point.target_tokens - 1]),
    }


def draw(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Draw the sweeps: a row of panels for each, a line for each precision, all axes logarithmic."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(len(SWEEPS), 3, squeeze=False)
    for varied, own_panels in zip(SWEEPS, panels, strict=True):
        swept = [row for row in rows if row["varied"] == varied]
        for (column, name), axes in zip(
            {"step ms": "step, ms", "first token ms": "first token, ms", "memory MiB": "memory, MiB"}.items(),
            own_panels,
            strict=True,
        ):
            for precision in dict.fromkeys(row["precision"] for row in swept):
                own = [row for row in swept if row["precision"] == precision]
                axes.plot([row[varied] for row in own], [row[column] for row in own], marker="o", markersize=4, label=precision)
            ticks = sorted({row[varied] for row in swept})
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.set(xlabel=varied, title=name)
            axes.grid(visible=True, which="both", alpha=0.25)
    panels[0][0].legend(frameon=False)
    figure.savefig(path, dpi=110)


class TimedRunner:
    """Wrapper of a `Runner` that measures its calls.

    Attributes:
        step_seconds: Time in decode steps since `reset`.
        copy_seconds: Time in copies of rows and positions since then.
        num_steps: Decode steps since then.
    """

    def __init__(self, runner: Runner) -> None:
        self.device, self.max_rows, self.graphs, self.memory = runner.device, runner.max_rows, runner.graphs, runner.memory
        self.holder = self.reader = None  # so that sources are encoded through this runner
        self.aligner, self.can_skip_log_probs = runner.aligner, runner.can_skip_log_probs
        self.prefill, self.cache_bytes, self.rest, self._runner = runner.prefill, runner.cache_bytes, runner.rest, runner
        self.reset()

    def reset(self) -> None:
        """Set all figures to zero."""
        self.step_seconds = self.copy_seconds = 0.0
        self.num_steps = 0

    def step(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Candidates:
        """See `Runner`."""
        return self._timed(self._runner.step, tokens, positions, num_candidates)

    def refetch(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int) -> Candidates:
        """See `Runner`."""
        return self._timed(self._runner.refetch, tokens, positions, num_candidates, first_row)

    def copy_row(self, source: int, target: int, length: int) -> None:
        """See `Runner`."""
        started = time.perf_counter()
        self._runner.copy_row(source, target, length)
        self.copy_seconds += time.perf_counter() - started

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """See `Runner`."""
        started = time.perf_counter()
        self._runner.copy_positions(source, target, start, stop)
        self.copy_seconds += time.perf_counter() - started

    def _timed(self, step: Any, *arguments: Any) -> Candidates:
        started = time.perf_counter()
        candidates: Candidates = step(*arguments)
        self.step_seconds += time.perf_counter() - started
        self.num_steps += 1
        return candidates


@dataclass(slots=True)
class Timings:
    """Seconds of full steps: of the whole `Engine.step`, of the graph in it, of cache copies in it; steps that ran it twice."""

    steps: list[float] = field(default_factory=list)
    graphs: list[float] = field(default_factory=list)
    copies: list[float] = field(default_factory=list)
    num_repeated: int = 0

    def row(self, greedy_seconds: float) -> dict[str, Any]:
        """Return the figures of one option."""
        python = statistics.median(
            step - graph - copy for step, graph, copy in zip(self.steps, self.graphs, self.copies, strict=True)
        )
        seconds = statistics.median(self.steps)
        return {
            "ms a step": f"{1000 * seconds:.3f}",
            "× greedy": f"{seconds / greedy_seconds:.2f}",
            "graph ms": f"{1000 * statistics.median(self.graphs):.3f}",
            "cache copies ms": f"{1000 * statistics.median(self.copies):.3f}",
            "Python ms": f"{1000 * python:.3f}",
            "Python share": f"{python / seconds:.1%}",
            "steps repeated": f"{self.num_repeated / len(self.steps):.1%}",
        }


def searches(bundle: Path, texts: Sequence[str], num_threads: int, num_rounds: int) -> list[dict[str, Any]]:
    """Fill all rows with requests of each search option and drive them to their end, in turns; figures are of full steps."""
    translator = Loop(bundle, NUM_ROWS, num_threads)
    engine = translator.engine
    runner = TimedRunner(engine.runner)
    engine.runner = runner
    vocabulary, eos_id = translator.manifest.source_vocab_size, translator.manifest.eos_id
    if translator.tokenizers.source.vocab_size == vocabulary:
        pairs = [f"{a} {b}" for a, b in zip(texts[::2], texts[1::2], strict=False)][:NUM_ROWS]
        sources = [[*ids, eos_id] for ids in translator.tokenizers.source.encode_batch(pairs)]
    else:  # a random model of a larger vocabulary than its tokeniser's
        generator = np.random.default_rng(0)
        sources = [[*generator.integers(FIRST_ID, vocabulary, 20 + i % 16).tolist(), eos_id] for i in range(NUM_ROWS)]
    timings = {name: Timings() for name in SEARCHES}
    names = list(SEARCHES)
    for number in range(num_rounds):
        start = number % len(names)
        for name in names[start:] + names[:start]:
            search, own = SEARCHES[name], timings[name]
            for i, source in enumerate(sources[: NUM_ROWS // search.num_slots]):
                engine.submit(Request(i, source, 1 if search.forced_prefix else NUM_STEPS, time.monotonic(), search=search))
            while engine.has_work:
                runner.reset()
                started = time.perf_counter()
                engine.step()
                seconds = time.perf_counter() - started
                done = engine.statistics()
                assert all(end.reason == "length" for end in engine.take_report().finished)
                if [step.num_rows for step in done.steps] == [NUM_ROWS] and not done.prefills and engine.has_work:
                    own.steps.append(seconds)
                    own.graphs.append(runner.step_seconds)
                    own.copies.append(runner.copy_seconds)
                    own.num_repeated += runner.num_steps > 1
    greedy = statistics.median(timings["greedy"].steps)
    return [{"model": translator.manifest.name, "search": name} | own.row(greedy) for name, own in timings.items()]


def replicas(arguments: argparse.Namespace, texts: Sequence[str], model: str, precision: str) -> list[dict[str, Any]]:
    """Measure a server with several numbers of engines: answers a second in a closed loop, and memory with and without sharing."""
    bundle = bundle_of(checkpoint_of(model), arguments.cache, precision)
    rows: list[dict[str, Any]] = []
    for count in arguments.engines:
        row: dict[str, Any] = {"model": model, "precision": precision, "engines": count}
        for name, weights in (("shared weights", str(arguments.cache / "weights")), ("copies", "off")):
            flags = *Setting(count, 1, NUM_ROWS).flags(), f"--weights-cache={weights}"
            with dragoman(bundle, *flags) as server:
                load = Load(texts, arguments.seconds, concurrency=2 * NUM_ROWS * count)
                server.run(replace(load, seconds=arguments.seconds / 4))
                record = server.run(load)[0].check()
                memory = {kind: sum(memory_mib(pid)["pss"] for pid in pids) for kind, pids in server.pids().items()}
            if name == "shared weights":
                row |= {"requests/s": f"{record.rate:.1f}", "frontend MiB": f"{memory[FRONTEND]:.0f}"}
            row[f"engines MiB, {name}"] = f"{memory[ENGINE]:.0f}"
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Measure the parts and write them."""
    found = parser(__doc__)
    found.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    found.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    found.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), help="Of `replicas`.")
    found.add_argument("--engines", nargs="+", type=int, default=[1, 2, 4], help="Of `replicas`.")
    found.add_argument("--threads", type=int, default=available_cores(), help="Of ONNX Runtime, in `growth` and `searches`.")
    found.add_argument("--rounds", type=int, default=3)
    found.add_argument("--seconds", type=float, default=10.0, help="Of a load in `replicas`.")
    arguments = found.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.engines, arguments.models = 1, 1.0, [1, 2], ["en-de"]
    texts = read_lines(arguments.data / "test_2016_flickr.en.gz")
    page = Page("scaling", "Growth with rows, lengths, search options and engines", output(arguments), ("onnxruntime", "numpy"))
    rounds = f"{arguments.threads} threads; medians of {arguments.rounds} rounds"
    if "growth" in arguments.parts:
        rows = growth(arguments)
        notes = [
            f"Random Transformer-base, greedy, in an engine driven directly, {rounds}. `step ms` is a whole engine step at the "
            f"last {WINDOW} target tokens; `first token ms` is from the submission of all requests until the last one has its "
            "first token, encoder included; `memory MiB` is by how much the process has grown since its model was loaded."
        ]
        if picture := page.picture():
            draw(picture, rows)
            notes.append(f"![Growth]({picture.name})")
        page.write("Rows and lengths", rows, notes)
    if "searches" in arguments.parts:
        bundles = endless_bundle(SHIPPED, arguments.cache), base_bundle(arguments.cache)
        rows = [row for bundle in bundles for row in searches(bundle, texts, arguments.threads, arguments.rounds)]
        note = (
            f"{NUM_ROWS} rows in every step: {NUM_ROWS} requests, or {NUM_ROWS // 4} of 4 hypotheses, or {NUM_ROWS // 8} of 8; "
            f"{rounds}, prefills not included. Neither model ends a sequence; `base-endless` has random weights. `graph` is the "
            "decode step in ONNX Runtime; `cache copies` is rows that follow their hypotheses; `Python` is everything else in "
            "`Engine.step`. `steps repeated` had to look at the whole vocabulary to be exact, and ran the graph twice."
        )
        page.write("Search options", rows, [note])
    if "replicas" in arguments.parts:
        rows = [
            row for model in arguments.models for kind in arguments.precisions for row in replicas(arguments, texts, model, kind)
        ]
        note = (
            f"A real server, engines of one thread, {NUM_ROWS} slots each, {2 * NUM_ROWS} callers for each engine, greedy, "
            "captions of test_2016; sender and server on the same cores. MiB are of all engines, a page that several have mapped "
            "counted once (PSS), interpreters and caches included."
        )
        page.write("Engines of one model", rows, [note])


if __name__ == "__main__":
    main()
