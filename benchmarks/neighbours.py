"""What costly searches do to a neighbour: the gaps between the tokens of a plain stream, alone and beside them.

    python -m benchmarks.neighbours [--bundle-cache FOLDER] [--models en-de base] [--quick]

One plain greedy request streams its answer while 0, 1, 4 and 16 other requests run all the time, each of one kind; `plain` is what
as many ordinary requests do. End-of-sequence is ruled out in both models. The engine is driven in this thread, without a server.
"""

import argparse
import itertools
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.models import SHIPPED, base_bundle, endless_bundle
from benchmarks.harness.report import environment, write
from dragoman.server.cores import available_cores
from dragoman.server.engine.messages import GREEDY, Request, Sampling, SearchOptions
from dragoman.server.offline import OfflineTranslator

NUM_SLOTS = 64
NUM_TOKENS = 150
NEIGHBOUR, SOURCE_TOKENS, WARM_UP_TOKENS = 0, 24, 8
OFFENDERS = {
    "plain": GREEDY,
    "temperature 1": SearchOptions(sampling=Sampling(seed=1)),
    "temperature 100": SearchOptions(sampling=Sampling(seed=1, temperature=100.0)),
    "temperature 100, 16 answers": SearchOptions(num_answers=16, sampling=Sampling(seed=1, temperature=100.0)),
    "repetition_penalty 0.9": SearchOptions(repetition_penalty=0.9),
    "repetition_penalty 0.01": SearchOptions(repetition_penalty=0.01),
    "4 beams": SearchOptions(num_beams=4),
    "16 beams": SearchOptions(num_beams=16),
    "60 beams": SearchOptions(num_beams=60),
    "top_k V": SearchOptions(sampling=Sampling(seed=1, top_k=10000)),
    "temperature 100, top_p 0.01": SearchOptions(sampling=Sampling(seed=1, temperature=100.0, top_p=0.01)),
    "repetition_penalty 1.2, 16 beams": SearchOptions(num_beams=16, repetition_penalty=1.2),
    "no_repeat_ngram_size 2, 16 beams": SearchOptions(num_beams=16, no_repeat_ngram_size=2),
    "256 suppressed": SearchOptions(suppressed_tokens=list(range(3, 259)), min_new_tokens=100),
    "16 alternatives, top 20": SearchOptions(num_answers=16, has_alternatives=True, num_top_log_probs=20),
}
COUNTS = 1, 4, 16


class Bench:
    """One bundle and its engine."""

    def __init__(self, bundle: Path, num_threads: int, clock: Callable[[], float]) -> None:
        translator = OfflineTranslator(bundle, NUM_SLOTS, num_threads)
        self.engine, self.manifest = translator.engine, translator.bundle.manifest
        random = np.random.default_rng(0)
        self._source = [*random.integers(3, self.manifest.source_vocab_size, SOURCE_TOKENS).tolist(), self.manifest.eos_id]
        self._num_submitted = 0
        self._clock = clock

    def measure(self, search: SearchOptions, count: int, num_tokens: int) -> dict[str, Any]:
        """Stream a plain answer beside `count` requests of one kind, each replaced when it ends; return the gaps' figures."""
        engine = self.engine
        for _ in range(count):
            self._submit(search)
        for _ in range(4):
            engine.step()
            engine.take_reports()
        engine.submit(b"bench", Request(NEIGHBOUR, self._source, num_tokens, time.monotonic(), is_streamed=True, priority=9))
        times: list[float] = []
        num_ended = num_steps = 0
        is_over = False
        while not is_over and num_steps < 200 * num_tokens:
            engine.step()
            num_steps += 1
            now = self._clock()
            for report in engine.take_reports().values():
                times += [now for tokens in report.tokens if tokens.id == NEIGHBOUR]
                for end in report.finished:
                    is_over |= end.id == NEIGHBOUR
                    if end.id != NEIGHBOUR:
                        num_ended += 1
                        self._submit(search)
        num_generated = num_ended * self._limit + sum(
            sequence.search.num_generated if sequence.search else 0 for sequence in engine.scheduler.running()
        )
        engine.remove_all("cancelled")
        engine.step() if engine.has_work else engine.take_reports()
        engine.take_reports()
        times = times[WARM_UP_TOKENS:]
        gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
        return {
            "median gap ms": f"{statistics.median(gaps) * 1000:.2f}",
            "p95 gap ms": f"{np.quantile(gaps, 0.95) * 1000:.2f}",
            "longest gap ms": f"{max(gaps) * 1000:.2f}",
            "neighbour's tokens/s": f"{1 / statistics.mean(gaps):.0f}",
            "steps of the others": num_generated,
        }

    @property
    def _limit(self) -> int:
        return min(NUM_TOKENS, self.manifest.max_target_tokens)

    def _submit(self, search: SearchOptions) -> None:
        self._num_submitted += 1
        self.engine.submit(b"bench", Request(self._num_submitted, self._source, self._limit, time.monotonic(), search=search))


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bundle-cache", type=Path, default=Path(tempfile.gettempdir()) / "dragoman-benchmark-bundles")
    parser.add_argument("--models", nargs="+", choices=("en-de", "base"), default=["en-de", "base"])
    parser.add_argument("--threads", type=int, default=available_cores(), help="Threads of ONNX Runtime.")
    parser.add_argument("--only", nargs="+", default=list(OFFENDERS), help="Kinds of offenders.")
    parser.add_argument("--counts", nargs="+", type=int, default=list(COUNTS))
    parser.add_argument("--tokens", type=int, default=NUM_TOKENS, help="That the neighbour streams.")
    parser.add_argument(
        "--cpu-time", action="store_true", help="Measure this process's time, for machines that others use; 1 thread."
    )
    parser.add_argument("--quick", action="store_true", help="Print only.")
    arguments = parser.parse_args()
    rows: list[dict[str, Any]] = []
    clock = time.process_time if arguments.cpu_time else time.perf_counter
    num_threads = 1 if arguments.cpu_time else arguments.threads
    for name in arguments.models:
        cache = arguments.bundle_cache
        bench = Bench(endless_bundle(SHIPPED, cache) if name == "en-de" else base_bundle(cache), num_threads, clock)
        for kind, count in [("nobody", 0)] + [(kind, count) for kind in arguments.only for count in arguments.counts]:
            row = {"model": name, "beside": kind, "requests": count} | bench.measure(
                OFFENDERS.get(kind, GREEDY), count, arguments.tokens
            )
            print(row, flush=True)
            rows.append(row)
    if not arguments.quick:
        about = environment("onnxruntime", "numpy") | {"threads": num_threads, "slots": NUM_SLOTS}
        write("neighbours", "What costly searches do to a neighbour", about, rows, [])


if __name__ == "__main__":
    main()
