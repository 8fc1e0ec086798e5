"""The engines that are compared: the same work for each, in a process that shares nothing with the others'.

A side is made once, in an `Apart`, and told to `run` a `Workload` again and again. Sources are given as ids: what a text costs is
part of a server's work, which `sender.py` measures, and not of an engine's.
"""

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from dragoman.model.ids import Ids
from dragoman.model.networks.transformer import transformer_of
from dragoman.server.allocator import keep_blocks
from dragoman.server.engine.messages import GREEDY, Request, SearchOptions
from dragoman.server.offline import OfflineTranslator


@dataclass(frozen=True, slots=True)
class Workload:
    """What every side is given.

    Attributes:
        texts: Sources, for a side that reads text.
        sources: The same as ids, without special tokens.
        num_beams: 1 for greedy search; more for beam search with one answer, which ends as soon as so many are finished: that is
            the only way CTranslate2 has.
        max_new_tokens: Tokens of an answer at the most.
    """

    texts: list[str]
    sources: list[list[int]]
    num_beams: int
    max_new_tokens: int

    def first(self, count: int) -> "Workload":
        """Return the first so many requests, from the start again where there are not enough."""
        places = [i % len(self.sources) for i in range(count)]
        return Workload([self.texts[i] for i in places], [self.sources[i] for i in places], self.num_beams, self.max_new_tokens)

    def dealt(self, count: int) -> "list[Workload]":
        """Return so many pieces of it, dealt out like cards, to be worked on at the same time."""
        return [Workload(self.texts[i::count], self.sources[i::count], self.num_beams, self.max_new_tokens) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Run:
    """What came of a workload.

    Attributes:
        seconds: From the first request to the last answer.
        answers: The best answer to each source, without end-of-sequence.
        cores: Processor time over wall time by process, where there is more than one.
    """

    seconds: float
    answers: list[list[int]]
    cores: dict[str, float]

    @classmethod
    def together(cls, runs: "Sequence[Run]", seconds: float) -> "Run":
        """Return what several did at the same time with the pieces that `Workload.dealt` made."""
        answers: list[list[int]] = [[] for _ in range(sum(len(run.answers) for run in runs))]
        for i, run in enumerate(runs):
            answers[i :: len(runs)] = run.answers
        return cls(seconds, answers, {})

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answers over the time they took, encoder included."""
        return sum(map(len, self.answers)) / self.seconds

    @property
    def sentences_per_second(self) -> float:
        """Answers over the time they took."""
        return len(self.answers) / self.seconds


class DragomanEngine:
    """Our engine driven directly, without processes, sockets or text."""

    def __init__(self, bundle: Path, num_threads: int, max_slots: int, weights_cache: str = "") -> None:
        """Load the bundle and warm it up, as a server's engine does; for the folder see `DeviceSettings`."""
        translator = OfflineTranslator(bundle, max_slots, num_threads, weights_cache=weights_cache, is_warmed_up=True)
        self._engine, self._eos_id = translator.engine, translator.bundle.manifest.eos_id

    def run(self, workload: Workload, concurrency: int) -> Run:
        """Keep `concurrency` requests in the engine: each that ends makes way for the next."""
        search = GREEDY if workload.num_beams == 1 else SearchOptions(num_beams=workload.num_beams, is_stopped_early=True)
        answers: list[list[int]] = [[] for _ in workload.sources]
        waiting = iter(enumerate(workload.sources))
        started = time.perf_counter()

        def submit(count: int) -> None:
            for _, (i, source) in zip(range(count), waiting, strict=False):
                request = Request(i, [*source, self._eos_id], workload.max_new_tokens, time.monotonic(), search=search)
                self._engine.submit(b"bench", request)

        submit(concurrency)
        while self._engine.has_work:
            self._engine.step()
            finished = [end for report in self._engine.take_reports().values() for end in report.finished]
            for end in finished:
                if end.reason not in ("eos", "length"):
                    raise RuntimeError(f"request {end.id} ended as {end.reason}")
                answers[end.id] = end.answers[0].token_ids
            submit(len(finished))
        return Run(time.perf_counter() - started, answers, {})


def engine_process(bundle: Path, num_threads: int, max_slots: int, cores: Sequence[int], weights_cache: str) -> DragomanEngine:
    """Make of this process what a server's engine is: on Linux's cores of these numbers alone, if there are any."""
    if cores:
        os.sched_setaffinity(0, cores)
    keep_blocks()
    return DragomanEngine(bundle, num_threads, max_slots, weights_cache)


class CTranslate2Engine:
    """CTranslate2's translator on a model that `ctranslate2_model.write_model` wrote."""

    def __init__(self, folder: Path, compute_type: str, inter_threads: int, intra_threads: int) -> None:
        """Load the model.

        Args:
            folder: The model.
            compute_type: CTranslate2's name of the number format, `float32` or `int8`.
            inter_threads: Batches decoded at the same time.
            intra_threads: Threads that each of them has.
        """
        ctranslate2: Any = import_module("ctranslate2")
        self._translator = ctranslate2.Translator(
            str(folder), compute_type=compute_type, inter_threads=inter_threads, intra_threads=intra_threads
        )

    def run(self, workload: Workload, max_batch_size: int, batch_type: str = "examples") -> Run:
        """Translate everything at once, which CTranslate2 sorts by length and cuts into batches of that size for its workers."""
        started = time.perf_counter()
        results = self._translator.translate_batch(
            [[str(i) for i in ids] for ids in workload.sources],
            max_batch_size=max_batch_size,
            batch_type=batch_type,
            beam_size=workload.num_beams,
            max_input_length=0,
            max_decoding_length=workload.max_new_tokens,
        )
        answers = [[int(token) for token in result.hypotheses[0]] for result in results]
        return Run(time.perf_counter() - started, answers, {})


class TransformersEngine:
    """Transformers' `generate` on Marian or Pegasus with our weights, in single precision."""

    def __init__(self, checkpoint: Path, num_threads: int) -> None:
        # These take seconds, which the other sides' processes need not spend.
        import torch

        from dragoman.model.checkpoint import Checkpoint
        from tests.oracles import transformers_model

        torch.set_num_threads(num_threads)
        self._answers_to = transformers_model.best_answers
        self._model = transformers_model.to_transformers(transformer_of(Checkpoint.load(checkpoint).model)).float()

    def run(self, workload: Workload, batch_size: int) -> Run:
        """Translate batch by batch."""
        started = time.perf_counter()
        answers: list[list[int]] = []
        for sources in batches(workload.sources, batch_size):
            answers += self._answers_to(self._model, sources, workload.num_beams, workload.max_new_tokens)
        return Run(time.perf_counter() - started, answers, {})


def batches(sources: Sequence[Ids], size: int) -> Iterator[Sequence[Ids]]:
    """Yield pieces of that size, and what is left."""
    for start in range(0, len(sources), size):
        yield sources[start : start + size]
