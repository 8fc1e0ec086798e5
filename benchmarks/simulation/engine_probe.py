"""Measures what an engine's iterations cost, on an engine driven directly in this thread.

With one thread, times are processor time: it computes all the while, so that is what the wall clock would say on a machine of its
own, and neighbours disturb it less. With more threads they are the wall clock's.
"""

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.simulation.costs import Costs, Job, fit_line
from dragoman.server.engine.messages import Request, SearchOptions
from dragoman.server.engine.messages import Statistics as StepStatistics
from dragoman.server.offline import OfflineTranslator

MAX_SLOTS = 64
NUM_STEPS = 20
NUM_ROUNDS = 3
PREFILL_TOKENS, MAX_WAITING = 512, 1024
"""The server's defaults."""
_ORIGIN = b"probe"


class EngineProbe:
    """An engine, and requests for it that are all of one kind.

    Args:
        bundle: The model.
        texts: Sources as they occur.
        num_beams: Of each request.
        num_threads: Of the engine.
    """

    def __init__(self, bundle: Path, texts: Sequence[str], num_beams: int, num_threads: int) -> None:
        self._translator = OfflineTranslator(bundle, MAX_SLOTS, num_threads)
        self._engine = self._translator.engine
        self._num_beams = num_beams
        self._clock = time.process_time if num_threads == 1 else time.perf_counter
        self._num_threads = num_threads
        eos_id = self._translator.bundle.manifest.eos_id
        self._sources = [[*ids, eos_id] for ids in self._translator.tokenizers.source.encode_batch(texts)]
        self._max_new_tokens = self._translator.bundle.manifest.default_max_new_tokens

    def measure(self) -> Costs:
        """Measure steps, prefills and requests; iterations of different sizes take turns."""
        most = MAX_SLOTS // self._num_beams
        numbers = sorted({1, most, *(1 << i for i in range(1, most.bit_length()) if 1 << i < most)})
        steps: dict[int, list[float]] = {number: [] for number in numbers}
        prefills: list[tuple[float, float]] = []
        busy, cpu = time.perf_counter(), time.process_time()
        for _ in range(NUM_ROUNDS + 1):
            for number in numbers:
                found = self._decode(number)
                steps[number] += found[0]
                prefills.append(found[1])
        cores = (time.process_time() - cpu) / (time.perf_counter() - busy)
        fixed, each = fit_line([tokens for tokens, _ in prefills[len(numbers) :]], [took for _, took in prefills[len(numbers) :]])
        return Costs(
            num_rows=self._num_beams,
            max_rows=MAX_SLOTS,
            num_requests=numbers,
            step_seconds=[statistics.median(steps[number]) for number in numbers],
            prefill_seconds=fixed,
            token_seconds=each,
            tokens_per_prefill=PREFILL_TOKENS,
            max_waiting=MAX_WAITING,
            jobs=self.jobs(most),
            engine_cores=1.0 if self._num_threads == 1 else cores,
            cores=float(self._num_threads),
        )

    def jobs(self, together: int) -> list[Job]:
        """Return what each source takes: its tokens, and the steps until it is answered."""
        jobs = []
        for first in range(0, len(self._sources), together):
            sources = self._sources[first : first + together]
            ended: dict[int, int] = {}
            begun: int | None = None
            for number, (step, ends) in enumerate(
                self._run(sources, SearchOptions(num_beams=self._num_beams), self._max_new_tokens)
            ):
                if begun is None and step.steps:
                    begun = number
                ended |= {end: number for end in ends}
            assert begun is not None
            jobs += [Job(len(source), ended[i] - begun + 1) for i, source in enumerate(sources)]
        return jobs

    def _decode(self, number: int) -> tuple[list[float], tuple[float, float]]:
        """Decode so many requests for `NUM_STEPS`; return the times of iterations, and tokens and time of the prefill."""
        sources = [self._sources[i % len(self._sources)] for i in range(number)]
        search = SearchOptions(num_beams=self._num_beams, min_new_tokens=NUM_STEPS)
        times: list[float] = []
        tokens = 0.0
        before, first = self._clock(), 0.0
        for step, _ in self._run(sources, search, NUM_STEPS):
            now = self._clock()
            if step.prefills:
                tokens, first = float(step.prefills[0].num_tokens), now - before
            elif step.num_running == number:
                times.append(now - before)
            before = now
        return times, (tokens, max(0.0, first - statistics.median(times)))

    def _run(self, sources: Sequence[list[int]], search: SearchOptions, max_new_tokens: int) -> "_Iterations":
        return _Iterations(self._translator, [Request(i, s, max_new_tokens, 0.0, search=search) for i, s in enumerate(sources)])


class _Iterations:
    """The iterations of some requests that come together: what the engine says after each, and which have ended."""

    def __init__(self, translator: OfflineTranslator, requests: Sequence[Request]) -> None:
        self._engine = translator.engine
        for request in requests:
            self._engine.submit(_ORIGIN, request)

    def __iter__(self) -> "_Iterations":
        return self

    def __next__(self) -> tuple[StepStatistics, list[int]]:
        if not self._engine.has_work:
            raise StopIteration
        self._engine.step()
        found = self._engine.statistics()
        finished = [end for report in self._engine.take_reports().values() for end in report.finished]
        if any(end.reason not in ("eos", "length") for end in finished):
            raise RuntimeError("a step raised")
        return found, [end.id for end in finished]
