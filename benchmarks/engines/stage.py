"""One model in one precision on every engine there is: converted, loaded, each in a process of its own."""

from contextlib import ExitStack
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.engines.sides import CTranslate2Engine, DragomanEngine, Run, TransformersEngine, Workload
from benchmarks.harness.apart import Apart
from benchmarks.harness.models import bundle_of
from benchmarks.harness.sender import DragomanServer
from benchmarks.libraries import ctranslate2_model
from dragoman.model.checkpoint import Checkpoint

SERVED, ENGINE, CT2, TRANSFORMERS = "Dragoman, gRPC", "Dragoman, engine", "CTranslate2", "Transformers"
CTRANSLATE2_TYPES = {"fp32": "float32", "int8": "int8"}


class Stage:
    """Every side on one model; all are started on entering and stopped on leaving.

    Attributes:
        checkpoint: The model.
        precision: `fp32` or `int8`.
        num_threads: Threads that every side may compute with.
        workers: How CTranslate2 may use them: batches decoded at once, each on its share of the threads; empty without CTranslate2.
        has_transformers: Whether Transformers is one of the sides.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        precision: str,
        cache: Path,
        num_threads: int,
        max_slots: int,
        *,
        is_transformers_wanted: bool = True,
    ) -> None:
        """Describe the stage; the cache folder keeps what is converted."""
        self.checkpoint, self.precision, self.num_threads = checkpoint, precision, num_threads
        self._cache, self._max_slots = cache, max_slots
        # It has no int8 on a CPU.
        self.has_transformers = is_transformers_wanted and precision == "fp32" and find_spec("transformers") is not None
        has_ctranslate2 = find_spec("ctranslate2") is not None
        self.workers = sorted({1, num_threads}) if has_ctranslate2 else []

    def __enter__(self) -> Self:
        cache, precision = self._cache, self.precision
        bundle = bundle_of(self.checkpoint, cache, precision)
        self._sides: dict[str, Any] = {}
        with ExitStack() as stack:

            def start(name: str, *description: Any) -> None:
                self._sides[name] = stack.enter_context(Apart(*description))

            start(ENGINE, DragomanEngine, bundle, self.num_threads, self._max_slots)
            self._server = stack.enter_context(DragomanServer(bundle, self.num_threads, self._max_slots))
            if self.workers:
                folder = cache / f"{self.checkpoint.name}-{precision}-ctranslate2"
                kind = CTRANSLATE2_TYPES[precision]
                ctranslate2_model.write_model(self.checkpoint.model, folder, kind)
                for count in self.workers:
                    start(worker_name(count), CTranslate2Engine, folder, kind, count, self.num_threads // count)
            if self.has_transformers:
                folder = cache / f"{self.checkpoint.name}-checkpoint"
                self.checkpoint.save(folder)
                start(TRANSFORMERS, TransformersEngine, folder, self.num_threads)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None) -> None:
        self._stack.__exit__(kind, value, traceback)

    def serve(self, workload: Workload, concurrency: int) -> Run:
        """Run on our server."""
        return self._server.run(workload, concurrency)

    def decode(self, workload: Workload, concurrency: int) -> Run:
        """Run on our engine alone."""
        return self._run(ENGINE, workload, concurrency)

    def ctranslate2(self, workload: Workload, num_workers: int, batch_size: int, batch_type: str = "examples") -> Run:
        """Run on CTranslate2, `num_workers` batches at once."""
        return self._run(worker_name(num_workers), workload, batch_size, batch_type)

    def transformers(self, workload: Workload, batch_size: int) -> Run:
        """Run on Transformers."""
        return self._run(TRANSFORMERS, workload, batch_size)

    def worker_threads(self, num_workers: int) -> str:
        """Describe one of CTranslate2's settings."""
        return f"{num_workers} × {self.num_threads // num_workers}"

    def _run(self, name: str, *arguments: Any) -> Run:
        run: Run = self._sides[name].call("run", *arguments)
        return run


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
