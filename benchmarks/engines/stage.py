"""One model in one precision on every engine there is: converted, loaded, each in processes of its own."""

import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.engines.sides import CTranslate2Engine, Run, TransformersEngine, Workload, engine_process
from benchmarks.harness.apart import Apart
from benchmarks.harness.models import bundle_by, bundle_of
from benchmarks.harness.sender import DragomanServer
from benchmarks.harness.setting import Setting
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.networks.transformer import transformer_of
from tests.oracles import ctranslate2_model

SERVED, BULK, ENGINE, BEFORE = "Dragoman, gRPC", "Dragoman, gRPC in bulk", "Dragoman, engine", "before, gRPC"
CT2, TRANSFORMERS = "CTranslate2", "Transformers"
CTRANSLATE2_TYPES = {"fp32": "float32", "int8": "int8"}


@dataclass(frozen=True, slots=True)
class Plan:
    """What is put on a stage beside the model.

    Attributes:
        cache: Folder that keeps what is converted.
        num_threads: Threads that every side may compute with.
        settings: Of our server, one for each that is started.
        flags: More of `dragoman serve`'s, for each of them.
        source: An older checkout that takes part with its own server and bundle; None for none.
        source_slots: Of that server.
        has_transformers: Whether Transformers takes part where it can.
    """

    cache: Path
    num_threads: int
    settings: Sequence[Setting]
    flags: Sequence[str] = ()
    source: Path | None = None
    source_slots: int = 64
    has_transformers: bool = False


class Stage:
    """Every side on one model; all are stopped on leaving.

    Servers and CTranslate2 are started on entering; our engines when they are first asked for, because there are many settings.

    Attributes:
        checkpoint: The model.
        precision: `fp32` or `int8`.
        plan: See there.
        workers: How CTranslate2 may use the threads: batches decoded at once, each on its share; empty without CTranslate2.
        has_transformers: Whether Transformers is one of the sides.
    """

    def __init__(self, checkpoint: Checkpoint, precision: str, plan: Plan) -> None:
        """Describe the stage."""
        self.checkpoint, self.precision, self.plan = checkpoint, precision, plan
        # It has no int8 on a CPU.
        self.has_transformers = plan.has_transformers and precision == "fp32" and find_spec("transformers") is not None
        has_ctranslate2 = find_spec("ctranslate2") is not None
        self.workers = sorted({1, plan.num_threads}) if has_ctranslate2 else []

    def __enter__(self) -> Self:
        plan, precision = self.plan, self.precision
        self._bundle = bundle_of(self.checkpoint, plan.cache, precision)
        self._sides: dict[str, Any] = {}
        self._engines: dict[Setting, list[Apart]] = {}
        with ExitStack() as stack:
            self._servers = {
                setting: stack.enter_context(DragomanServer(self._bundle, [*setting.flags(), *plan.flags]))
                for setting in plan.settings
            }
            if plan.source:
                bundle = bundle_by(plan.source, self.checkpoint, plan.cache, precision)
                flags = Setting(1, plan.num_threads, plan.source_slots).flags(plan.source)
                self._before = stack.enter_context(DragomanServer(bundle, flags, plan.source))
            if self.workers:
                folder = plan.cache / f"{self.checkpoint.name}-{precision}-ctranslate2"
                kind = CTRANSLATE2_TYPES[precision]
                ctranslate2_model.write_model(transformer_of(self.checkpoint.model), folder, kind)
                for count in self.workers:
                    description = CTranslate2Engine, folder, kind, count, plan.num_threads // count
                    self._sides[worker_name(count)] = stack.enter_context(Apart(*description))
            if self.has_transformers:
                folder = plan.cache / f"{self.checkpoint.name}-checkpoint"
                self.checkpoint.save(folder)
                self._sides[TRANSFORMERS] = stack.enter_context(Apart(TransformersEngine, folder, plan.num_threads))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.__exit__(kind, value, traceback)

    def serve(self, setting: Setting, workload: Workload, concurrency: int, *, is_bulk: bool = False) -> Run:
        """Run on our server in one of the plan's settings."""
        return self._servers[setting].run(workload, concurrency, is_bulk=is_bulk)

    def serve_before(self, workload: Workload, concurrency: int) -> Run:
        """Run on the older checkout's server."""
        return self._before.run(workload, concurrency)

    def decode(self, setting: Setting, workload: Workload, concurrency: int = 0) -> Run:
        """Run on our engines alone, each on cores of its own if there are several, so many requests at a time in all.

        Without a number they are given everything at once.
        """
        engines = self._started(setting)
        pieces = workload.dealt(len(engines))
        most = [concurrency // len(engines) or len(piece.sources) for piece in pieces]
        started = time.perf_counter()
        with ThreadPoolExecutor(len(engines)) as pool:
            runs = list(pool.map(lambda engine, piece, count: engine.call("run", piece, count), engines, pieces, most))
        return Run.together(runs, time.perf_counter() - started)

    def ctranslate2(self, workload: Workload, num_workers: int, batch_size: int, batch_type: str = "examples") -> Run:
        """Run on CTranslate2, `num_workers` batches at once."""
        run: Run = self._sides[worker_name(num_workers)].call("run", workload, batch_size, batch_type)
        return run

    def transformers(self, workload: Workload, batch_size: int) -> Run:
        """Run on Transformers."""
        run: Run = self._sides[TRANSFORMERS].call("run", workload, batch_size)
        return run

    def worker_threads(self, num_workers: int) -> str:
        """Describe one of CTranslate2's settings."""
        return f"{num_workers} × {self.plan.num_threads // num_workers}"

    def _started(self, setting: Setting) -> list[Apart]:
        """Return the engines of a setting, started if they are not."""
        if setting not in self._engines:
            weights_cache = str(self.plan.cache / "weights") if setting.replicas > 1 else ""  # as a server does by itself
            self._engines[setting] = [
                self._stack.enter_context(Apart(engine_process, self._bundle, setting.threads, setting.slots, own, weights_cache))
                for own in pinned(setting)
            ]
        return self._engines[setting]


def pinned(setting: Setting) -> list[tuple[int, ...]]:
    """Return the cores of each engine: its own where there are several and enough; a single one may choose."""
    if setting.replicas == 1:
        return [()]
    cores = sorted(os.sched_getaffinity(0))
    if setting.replicas * setting.threads > len(cores):
        return [()] * setting.replicas
    return [tuple(cores[i * setting.threads : (i + 1) * setting.threads]) for i in range(setting.replicas)]


def worker_name(num_workers: int) -> str:
    """Name CTranslate2 with that many workers."""
    return f"{CT2}, {num_workers} at once"


def peer_versions() -> dict[str, str]:
    """Return the versions of what need not be installed."""
    found = {}
    for package in ("ctranslate2", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "absent"
    return found
