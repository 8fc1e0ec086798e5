"""Engines that are compared: the same model and requests for each, each in processes of its own.

CTranslate2 and Transformers get ids and are called in process; our engines alone, too; our server gets texts over gRPC.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.harness.actor import Actor
from benchmarks.harness.load import CLIENT, GRPC, Load
from benchmarks.harness.models import bundle_by, bundle_of
from benchmarks.harness.processes import Dragoman, Setting, dragoman
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.networks.transformer import transformer_of
from dragoman.server.engine.messages import GREEDY, Request, SearchOptions
from dragoman.server.system import keep_freed_memory
from tests.loop import Loop

ENGINE, SERVED, BULK, BEFORE, CT2, TRANSFORMERS = "engine", "gRPC", "gRPC in bulk", "before, gRPC", "CTranslate2", "Transformers"
COMPUTE_TYPES = {"fp32": "float32", "int8": "int8"}
BULK_REQUESTS_A_SLOT = 2
"""Requests in flight in bulk for each slot, so that no slot is idle."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests for every side."""

    texts: list[str]  # sources, for a side that reads text
    sources: list[list[int]]  # the same as ids, without special tokens
    num_beams: int  # width of beam search with one answer and early stopping, as in CTranslate2
    max_new_tokens: int  # maximum of each answer

    def first(self, count: int) -> "Workload":
        """Return the first requests, repeated where there are not enough."""
        places = [i % len(self.sources) for i in range(count)]
        return replace(self, texts=[self.texts[i] for i in places], sources=[self.sources[i] for i in places])

    def round_robin(self, count: int) -> "list[Workload]":
        """Return this many parts, with requests assigned in turn."""
        return [replace(self, texts=self.texts[i::count], sources=self.sources[i::count]) for i in range(count)]


@dataclass(frozen=True, slots=True)
class Run:
    """One run of a workload."""

    seconds: float  # from the first request to the last answer
    answers: list[list[int]]  # the best answer to each source, without end-of-sequence

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the answers a second, encoder included."""
        return sum(map(len, self.answers)) / self.seconds

    @property
    def sentences_per_second(self) -> float:
        """Answers a second."""
        return len(self.answers) / self.seconds


Work = Callable[[Workload], Run]


class DragomanEngine:
    """Dragoman's engine, driven directly, on the given cores if any."""

    def __init__(self, bundle: Path, num_threads: int, max_slots: int, cores: Sequence[int], weights_cache: str) -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        keep_freed_memory()
        translator = Loop(bundle, max_slots, num_threads, weights_cache=weights_cache, is_warmed_up=True)
        self._engine, self._eos_id = translator.engine, translator.manifest.eos_id

    def run(self, workload: Workload, concurrency: int) -> Run:
        """Keep `concurrency` requests in the engine; 0 submits all at once."""
        search = GREEDY if workload.num_beams == 1 else SearchOptions(num_beams=workload.num_beams, is_stopped_early=True)
        answers: list[list[int]] = [[] for _ in workload.sources]
        waiting = iter(enumerate(workload.sources))
        started = time.perf_counter()

        def submit(count: int) -> None:
            for _, (i, source) in zip(range(count), waiting, strict=False):
                request = Request(i, [*source, self._eos_id], workload.max_new_tokens, time.monotonic(), search=search)
                self._engine.submit(request)

        submit(concurrency or len(answers))
        while self._engine.has_work:
            self._engine.step()
            finished = self._engine.take_report().finished
            for end in finished:
                assert end.reason in ("eos", "length"), f"request {end.id} ended as {end.reason}"
                answers[end.id] = end.answers[0].token_ids
            submit(len(finished))
        return Run(time.perf_counter() - started, answers)


class CTranslate2Engine:
    """CTranslate2's translator on a model that `ctranslate2_model.write_model` wrote."""

    def __init__(self, folder: Path, compute_type: str, inter_threads: int, intra_threads: int) -> None:
        ctranslate2: Any = import_module("ctranslate2")
        threads = {"inter_threads": inter_threads, "intra_threads": intra_threads}
        self._translator = ctranslate2.Translator(str(folder), compute_type=compute_type, **threads)

    def run(self, workload: Workload, max_batch_size: int, batch_type: str = "examples") -> Run:
        """Translate everything at once; CTranslate2 sorts it by length and divides it into batches of that size."""
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
        return Run(time.perf_counter() - started, answers)


class TransformersEngine:
    """Transformers' `generate` on Marian or Pegasus with our weights, in single precision."""

    def __init__(self, checkpoint: Path, num_threads: int) -> None:
        # These imports take seconds.
        import torch

        from benchmarks.engines import transformers_model

        torch.set_num_threads(num_threads)
        self._best_answers = transformers_model.best_answers
        self._model = transformers_model.to_transformers(transformer_of(Checkpoint.load(checkpoint).model)).float()

    def run(self, workload: Workload, batch_size: int) -> Run:
        """Translate batch by batch."""
        started = time.perf_counter()
        answers: list[list[int]] = []
        for start in range(0, len(workload.sources), batch_size):
            batch = workload.sources[start : start + batch_size]
            answers += self._best_answers(self._model, batch, workload.num_beams, workload.max_new_tokens)
        return Run(time.perf_counter() - started, answers)


class Stage:
    """All sides on one model in one precision; started when they are first asked for, stopped with the stack.

    Args:
        stack: Exit stack of all sides.
        checkpoint: The model.
        precision: Precision of all sides.
        cache: Folder of converted models.
        num_threads: Threads of each side.
        flags: More flags of Dragoman's servers.
        source: An older checkout, whose server is one more side.
    """

    def __init__(
        self,
        stack: ExitStack,
        checkpoint: Checkpoint,
        precision: str,
        cache: Path,
        num_threads: int,
        flags: Sequence[str] = (),
        source: Path | None = None,
    ) -> None:
        self.checkpoint, self.precision, self.num_threads = checkpoint, precision, num_threads
        self._stack, self._cache, self._flags, self.source = stack, cache, flags, source
        self._bundle = bundle_of(checkpoint, cache, precision)
        self._servers: dict[Setting, Dragoman] = {}
        self._engines: dict[Setting, list[Actor]] = {}
        self._others: dict[object, Actor] = {}
        self.workers = sorted({1, num_threads}) if find_spec("ctranslate2") else []
        self.has_transformers = precision == "fp32" and find_spec("transformers") is not None

    def serve(self, setting: Setting, workload: Workload, concurrency: int, protocol: str = GRPC) -> Run:
        """Run on the server."""
        if setting not in self._servers:
            self._servers[setting] = self._stack.enter_context(dragoman(self._bundle, *setting.flags(), *self._flags))
        return _sent(self._servers[setting], workload, concurrency, protocol)

    def serve_before(self, setting: Setting, workload: Workload, concurrency: int) -> Run:
        """Run on the server of the older checkout."""
        assert self.source is not None
        key = replace(setting, replicas=-setting.replicas)
        if key not in self._servers:
            bundle = bundle_by(self.source, self.checkpoint, self._cache, self.precision)
            self._servers[key] = self._stack.enter_context(dragoman(bundle, *setting.flags(), source=self.source))
        return _sent(self._servers[key], workload, concurrency, GRPC)

    def decode(self, setting: Setting, workload: Workload, concurrency: int = 0) -> Run:
        """Run on engines alone, with this many requests at a time in all; without a number everything at once."""
        if setting not in self._engines:
            weights = str(self._cache / "weights") if setting.replicas > 1 else ""  # as a server does by itself
            makers = [
                Actor(DragomanEngine, self._bundle, setting.threads, setting.slots, cores, weights) for cores in pinned(setting)
            ]
            self._engines[setting] = [self._stack.enter_context(maker) for maker in makers]
        engines = self._engines[setting]
        pieces = workload.round_robin(len(engines))
        started = time.perf_counter()
        with ThreadPoolExecutor(len(engines)) as pool:
            each = concurrency // len(engines)
            runs = list(pool.map(lambda engine, piece: engine.call("run", piece, each), engines, pieces))
        seconds = time.perf_counter() - started
        answers: list[list[int]] = [[] for _ in workload.sources]
        for i, run in enumerate(runs):
            answers[i :: len(runs)] = run.answers
        return Run(seconds, answers)

    def ctranslate2(self, num_workers: int, batch_size: int, batch_type: str, workload: Workload) -> Run:
        """Run on CTranslate2, `num_workers` batches at once."""
        if num_workers not in self._others:
            from benchmarks.engines.ctranslate2_model import write_model

            folder, kind = self._cache / f"{self.checkpoint.name}-{self.precision}-ctranslate2", COMPUTE_TYPES[self.precision]
            if not self._others:
                write_model(transformer_of(self.checkpoint.model), folder, kind)
            made = Actor(CTranslate2Engine, folder, kind, num_workers, self.num_threads // num_workers)
            self._others[num_workers] = self._stack.enter_context(made)
        run: Run = self._others[num_workers].call("run", workload, batch_size, batch_type)
        return run

    def transformers(self, batch_size: int, workload: Workload) -> Run:
        """Run on Transformers."""
        if TRANSFORMERS not in self._others:
            folder = self._cache / f"{self.checkpoint.name}-checkpoint"
            self.checkpoint.save(folder)
            self._others[TRANSFORMERS] = self._stack.enter_context(Actor(TransformersEngine, folder, self.num_threads))
        run: Run = self._others[TRANSFORMERS].call("run", workload, batch_size)
        return run

    def ctranslate2_ways(self, batches: Sequence[tuple[int, str]]) -> dict[str, Work]:
        """Return settings of CTranslate2: workers, each with batches of any of these sizes, in examples or tokens."""
        return {
            f"{workers} × {self.num_threads // workers}, {size:,} {kind}": partial(self.ctranslate2, workers, size, kind)
            for workers in self.workers
            for size, kind in batches
        }

    def dragoman_ways(
        self, engines: Sequence[Setting], servers: Sequence[Setting], in_flight: Sequence[int], num_beams: int, has_bulk: bool
    ) -> dict[str, dict[str, Work]]:
        """Return settings of Dragoman's sides.

        Args:
            engines: Settings of engines alone.
            servers: Settings of servers.
            in_flight: Requests at once of unary calls; engines alone get the first number, or everything if there are more.
            num_beams: Slots of a request.
            has_bulk: Whether the client's `generate_many` takes part.
        """
        ways: dict[str, dict[str, Work]] = {ENGINE: {}, SERVED: {}, BULK: {}}
        limit = in_flight[0] if len(in_flight) == 1 else 0
        for setting in engines:
            ways[ENGINE][str(setting)] = partial(self.decode, setting, concurrency=limit)
        for setting in servers:
            for count in in_flight:
                ways[SERVED][f"{setting}, {count} at a time"] = partial(self.serve, setting, concurrency=count)
            if has_bulk:
                most = BULK_REQUESTS_A_SLOT * setting.total_slots // num_beams
                ways[BULK][f"{setting}, {most} at a time"] = partial(self.serve, setting, concurrency=most, protocol=CLIENT)
        if self.source:
            before = Setting(1, self.num_threads, max(setting.total_slots for setting in servers))
            for count in in_flight:
                ways.setdefault(BEFORE, {})[f"{before}, {count} at a time"] = partial(self.serve_before, before, concurrency=count)
        return {side: own for side, own in ways.items() if own}


def _sent(server: Dragoman, workload: Workload, concurrency: int, protocol: str) -> Run:
    load = Load(
        workload.texts,
        concurrency=concurrency,
        num_beams=workload.num_beams,
        early_stopping=True,
        max_new_tokens=workload.max_new_tokens,
        keeps_answers=True,
    )
    record = server.run(load, protocol)[0].check()
    return Run(record.wall_seconds, [list(outcome.answer[1]) for outcome in record.outcomes])


def pinned(setting: Setting) -> list[tuple[int, ...]]:
    """Return the cores of each engine: separate ones where there are enough; None for a single engine."""
    cores = sorted(os.sched_getaffinity(0))
    if setting.replicas == 1 or setting.replicas * setting.threads > len(cores):
        return [()] * setting.replicas
    return [tuple(cores[i * setting.threads : (i + 1) * setting.threads]) for i in range(setting.replicas)]


def best(ways: Mapping[str, Work], part: Workload, warm_up: int, num_tries: int = 2) -> tuple[str, Run]:
    """Try every setting on a part of the work, all of them once, then all of them again; return the fastest and its run."""
    runs: dict[str, Run] = {}
    for number in range(num_tries):
        for label, work in ways.items():
            if not number:
                work(part.first(warm_up))
            run = work(part)
            if label not in runs or run.tokens_per_second > runs[label].tokens_per_second:
                runs[label] = run
    label = max(runs, key=lambda label: runs[label].tokens_per_second)
    return label, runs[label]
