"""Translation of batches of rows with an engine in this process, for Ray Data, Spark, Dask, Daft, `datasets` and plain loops.

A row that cannot be translated (blank, too long, not text) has its reason in the column of errors and does not disturb others. All
other failures are raised: they are not the row's.
"""

import asyncio
import difflib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import structlog
from msgspec import Struct, ValidationError, convert
from msgspec.structs import replace
from prometheus_client import CollectorRegistry

from dragoman.bulk.engine import LocalEngine
from dragoman.export.bundle import Bundle
from dragoman.model.errors import InputError
from dragoman.server.engine.search.searches import is_plain
from dragoman.server.engine.settings import DeviceSettings, EngineSettings
from dragoman.server.errors import ClientFault, QueueFull, ServiceError
from dragoman.server.models.loaded import LoadedModel
from dragoman.server.models.memory import room, slot_bytes
from dragoman.server.models.model_file import Traits
from dragoman.server.models.registry import ModelRegistry
from dragoman.server.runtime.providers import choose_device
from dragoman.server.service.context import Call, RunningCalls
from dragoman.server.service.generate import Generation
from dragoman.server.service.in_flight import REQUESTS_PER_SLOT, InFlight
from dragoman.server.service.requests import GenerateRequest
from dragoman.server.service.result_cache import ResultCache
from dragoman.server.service.terms import NUM_BEAMS
from dragoman.server.service.texts import is_divided
from dragoman.server.system import available_cores
from dragoman.server.telemetry.logs import configure_logging
from dragoman.server.telemetry.metrics import Metrics

# Slots where none are asked for: many, as steps of more rows cost less for each, but beyond the least so few that the caches of the
# longest texts fit an engine's share of a part of the free memory. A device has the least.
MIN_SLOTS, MAX_SLOTS, PART_OF_MEMORY = 64, 256, 0.5
# Answers kept for equal rows.
RESULT_CACHE_BYTES = 64 * 2**20
# Fields of a request that are not options of rows.
_NO_OPTIONS = {
    "text",
    "indexes",
    "tag_rules",
    "model",
    "model_version",
    "request_id",
    "priority",
    "return_log_probs",
    "top_log_probs",
}

T = TypeVar("T")
# A mapping of columns (lists or arrays), an Arrow table or record batch, or a pandas data frame.
Batch = TypeVar("Batch")


@dataclass(frozen=True, slots=True)
class Columns:
    """Names of columns: `text` is read, the others are added; an empty name adds none.

    Attributes:
        text: Texts; anything else than a string is an error of its row.
        translation: Best answers; null where there is an error.
        error: Reasons; null where there is none.
        score: Scores of the best answers, as in docs/api.md.
        alternatives: Lists of all answers, best first: `num_return_sequences` or fewer.
        seconds: Times from the row's start to its answer.
    """

    text: str = "text"
    translation: str = "translation"
    error: str = "error"
    score: str = ""
    alternatives: str = ""
    seconds: str = ""

    def __post_init__(self) -> None:
        """Raise `InputError` for a name of two columns."""
        names = [self.text, *filter(None, (self.translation, self.error, self.score, self.alternatives, self.seconds))]
        if twice := [name for name in names if names.count(name) > 1]:
            raise InputError(f"column {twice[0]}: is the name of two columns")

    def added(self) -> dict[str, str]:
        """Return the added columns: attribute by name."""
        return {name: each for each in Outcome.__struct_fields__ if (name := getattr(self, each, ""))}


class Outcome(Struct, frozen=True):
    """Outcome of a row: the values of `Columns`, and its tokens."""

    translation: str | None = None
    error: str | None = None
    score: float | None = None
    alternatives: list[str] | None = None
    seconds: float = 0.0
    source_tokens: int = 0
    generated_tokens: int = 0


class Settings(Struct, frozen=True):
    """Arguments of a `Translator`, checked."""

    bundle: str
    columns: Columns
    request: GenerateRequest  # without a text
    max_slots: int  # 0 for the usual number
    num_threads: int
    device: DeviceSettings
    glossaries: str
    result_cache_bytes: int
    digest: str = ""  # of the only bundle that will do; empty for any


class Translator:
    """Translates batches of rows; see the module.

    A batch is a mapping of columns, an Arrow table or record batch, or a pandas data frame; the same kind is returned, with columns
    added. Answers are those of a server with the same bundle, whatever the batches. The bundle is loaded for the first batch, in
    each process: a pickled or forked translator has its settings alone. Threads may share one.
    """

    def __init__(
        self,
        bundle: str | Path,
        *,
        columns: Columns | None = None,
        max_slots: int = 0,
        num_threads: int = 0,
        device: str = "auto",
        weights_cache: str = "",
        glossaries: str = "",
        result_cache_bytes: int = RESULT_CACHE_BYTES,
        **options: Any,
    ) -> None:
        """Check the options.

        Args:
            bundle: Directory of the bundle.
            columns: Names of columns.
            max_slots: Rows of the decode batch; 0 for 64 to 256, as memory has room for the longest texts.
            num_threads: Threads of the engine; 0 for one a core.
            device: `auto`, `cpu`, `cuda` or `cuda:N`.
            weights_cache: Folder through which engines of one machine share weights; empty for own ones.
            glossaries: Folder of the glossaries that `glossary` names.
            result_cache_bytes: Most bytes of answers that are kept for equal rows; 0 to compute each.
            options: Fields of a request as in docs/api.md, such as `num_beams`, `split`, `markup`, `terms` or `target_language`.

        Raises:
            InputError: For an unknown option, or one of a wrong type. Values are checked when the bundle is loaded.
        """
        self.settings = Settings(
            bundle=str(bundle),
            columns=columns or Columns(),
            request=_request(options),
            max_slots=max_slots,
            num_threads=num_threads,
            device=DeviceSettings(device, weights_cache=weights_cache),
            glossaries=glossaries,
            result_cache_bytes=result_cache_bytes,
        )
        self._running: _Running | None = None
        self._unload: Callable[[], object] | None = None
        self._lock = threading.RLock()

    @classmethod
    def of(cls, settings: Settings) -> "Translator":
        """Return a translator with checked settings."""
        translator = cls(settings.bundle)
        translator.settings = settings
        return translator

    def __reduce__(self) -> tuple[Any, ...]:
        return Translator.of, (self.settings,)

    def __call__(self, batch: Batch) -> Batch:
        """Return a batch with its added columns.

        Raises:
            InputError: If the bundle cannot be loaded, the options do not suit it, or the batch has not the right columns.
            RuntimeError: If the engine failed.
        """
        return next(self.map([batch]))

    def map(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Yield each batch with its added columns; rows of later batches take slots as they become free. Raises as a call."""
        pending: deque[tuple[Batch, Future[list[Outcome]], int]] = deque()
        columns = self.settings.columns
        num_later = 0  # rows of all pending batches but the first; an empty batch counts as one
        try:
            for batch in batches:
                texts = _texts(batch, columns)
                num_rows = max(1, len(texts))
                num_later += num_rows if pending else 0
                pending.append((batch, self.submit(texts), num_rows))
                while len(pending) > 1 and num_later >= self.num_rows_at_once:
                    batch, future, _ = pending.popleft()
                    yield with_columns(batch, _result(future), columns)
                    num_later -= pending[0][2]
            while pending:
                batch, future, _ = pending.popleft()
                yield with_columns(batch, _result(future), columns)
        finally:
            for _, future, _ in pending:
                future.cancel()

    def submit(self, texts: Sequence[object]) -> "Future[list[Outcome]]":
        """Return the future outcomes of texts, which begin when those of earlier calls have; raises as a call."""
        with self._lock:  # or `close` might end the loop between the two
            return self._started().submit(texts)

    @property
    def num_rows_at_once(self) -> int:
        """Rows that are under way at once; loads the bundle."""
        return self._started().num_rows_at_once

    def close(self) -> None:
        """Unload the bundle, which cancels what runs; a later call loads it again."""
        with self._lock:
            unload, self._unload, self._running = self._unload, None, None
        if unload is not None:
            unload()

    def _started(self) -> "_Running":
        with self._lock:
            if self._running is None or self._running.process != os.getpid() or self._running.is_broken:
                self.close()
                self._running = _Running(self.settings)
                self._unload = weakref.finalize(self, self._running.close)  # also at the exit of the interpreter
            return self._running


class _Running:
    """Bundle, engine and service of a translator, on an event loop and a thread of its own."""

    def __init__(self, settings: Settings) -> None:
        """Load the bundle; raises as `Translator.__call__`."""
        self.process = os.getpid()
        self.num_rows_at_once = 0
        if not structlog.is_configured():
            configure_logging("warning", "auto")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="dragoman-bulk", daemon=True)
        self._thread.start()
        try:
            _result(self._submit(self._open(settings)))
        except BaseException:
            self.close()
            raise

    async def _open(self, settings: Settings) -> None:
        self._entering, self._request = asyncio.Lock(), settings.request
        bundle = Bundle.open(Path(settings.bundle))
        bundle.refuse_other(settings.digest)
        max_slots = settings.max_slots or _usual_slots(bundle, settings)
        engine_settings = EngineSettings(
            endpoint="",
            bundle=settings.bundle,
            num_threads=settings.num_threads,
            max_slots=max_slots,
            max_waiting_requests=0,
            max_waiting_tokens=0,
            log_level="warning",
            log_format="auto",
            device=settings.device,
            max_slots_per_request=max_slots,
        )
        self._engine = LocalEngine(bundle, engine_settings)
        model = LoadedModel.of(bundle, self._engine, traits=Traits(glossaries=settings.glossaries))
        metrics = Metrics(CollectorRegistry())
        self._calls = RunningCalls(metrics)
        in_flight = InFlight(lambda: REQUESTS_PER_SLOT * max_slots)
        results = ResultCache(settings.result_cache_bytes)
        self._generation = Generation(ModelRegistry([model]), metrics, self._calls, in_flight, results=results)
        example = replace(self._request, text="a")
        try:
            is_divided(example, model)
            sequence, *_ = await self._generation.validator.validate(example, Call.begin("bulk"), model)
        except ClientFault as fault:
            raise InputError(fault.message) from None
        # All rows or none, as rounding makes a few log-probabilities equal, and so chooses the lower id, whose logits differ.
        is_greedy = is_plain(sequence.search, sequence.max_new_tokens) and not (example.terms or example.glossary)
        self._generation.has_scores = bool(settings.columns.score) or not is_greedy
        num_slots = max(sequence.search.num_slots, NUM_BEAMS if example.terms or example.glossary else 1)
        self.num_rows_at_once = max(2, REQUESTS_PER_SLOT * max_slots // num_slots)
        self._places = asyncio.Semaphore(self.num_rows_at_once)

    @property
    def is_broken(self) -> bool:
        """Whether the engine has failed for good."""
        return not self._engine.is_ready

    def submit(self, texts: Sequence[object]) -> Future[list[Outcome]]:
        return self._submit(self._translate(texts))

    def _submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what runs and end the thread; no effect in another process. Call it once."""
        if self.process != os.getpid():
            return
        self._submit(self._end())
        if threading.current_thread() is not self._thread:  # where garbage may be collected, too
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        if "_engine" in vars(self):
            self._engine.close()
        await asyncio.gather(*tasks, return_exceptions=True)  # or callers would wait for ever
        self._loop.call_soon(self._loop.stop)

    async def _translate(self, texts: Sequence[object]) -> list[Outcome]:
        """Return the outcomes of a batch, whose rows start in order and after those of earlier batches."""
        whole = Call.begin("bulk")
        tasks: list[asyncio.Task[Outcome]] = []
        try:
            async with asyncio.TaskGroup() as group, self._entering:
                for text in texts:
                    await self._places.acquire()
                    tasks.append(group.create_task(self._outcome(text, whole)))
                    tasks[-1].add_done_callback(lambda _: self._places.release())
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from None
        return [task.result() for task in tasks]

    async def _outcome(self, text: object, whole: Call) -> Outcome:
        if not isinstance(text, str):
            return Outcome(error=str(text) if isinstance(text, InputError) else "text: is not text")
        started = time.monotonic()
        try:
            with self._calls.part(whole) as part:
                generated = await self._generation.generate(replace(self._request, text=text), part)
        except QueueFull as full:  # the translator bounds its requests, so it was memory that lacked for one
            raise RuntimeError("there is no memory for another text; fewer slots need less") from full
        except ClientFault as fault:
            return Outcome(error=fault.message, seconds=time.monotonic() - started)
        except ServiceError as error:
            raise RuntimeError(error.message) from error
        best = generated.best
        alternatives = [answer.text for answer in generated.answers]
        seconds = time.monotonic() - started
        score = best.score if self._generation.has_scores else None
        return Outcome(best.text, None, score, alternatives, seconds, generated.source_tokens, generated.generated_tokens)


def _usual_slots(bundle: Bundle, settings: Settings) -> int:
    if choose_device(settings.device.name, bundle.manifest.precision).ordinal is not None:
        return MIN_SLOTS
    num_engines = max(1, available_cores() // (settings.num_threads or available_cores()))
    return min(max(int(PART_OF_MEMORY * room().num_bytes) // num_engines // slot_bytes(bundle), MIN_SLOTS), MAX_SLOTS)


def _result(future: Future[T]) -> T:
    """Return a future's result; an interrupted wait cancels it."""
    try:
        return future.result()
    finally:
        future.cancel()


def _request(options: Mapping[str, Any]) -> GenerateRequest:
    """Return the request of options; raise `InputError` for an unknown one or a wrong type."""
    known = [name for name in GenerateRequest.__struct_fields__ if name not in _NO_OPTIONS]
    for name in options:
        if name not in known:
            meant = difflib.get_close_matches(name, known, 1)
            raise InputError(f"{name}: there is no such option{f'; {meant[0]} is meant?' if meant else ''}")
    terms = [term._asdict() if hasattr(term, "_asdict") else term for term in options.get("terms", ())]
    try:
        return convert({**options, "terms": terms}, GenerateRequest)
    except ValidationError as error:
        raise InputError(f"options: {error}") from None


def _names(batch: Any) -> list[str]:
    return list(batch) if isinstance(batch, Mapping) else list(getattr(batch, "column_names", getattr(batch, "columns", ())))


def _texts(batch: Any, columns: Columns) -> list[object]:
    """Return the texts of a batch; raise `InputError` for missing columns, and for added ones that are there."""
    names = _names(batch)
    if columns.text not in names:
        raise InputError(f"column {columns.text}: is not in the batch, which has {', '.join(map(str, names)) or 'none'}")
    if taken := [name for name in columns.added() if name in names]:
        raise InputError(f"column {taken[0]}: is in the batch already; choose another name")
    column: Any = batch[columns.text]
    if isinstance(column, str):
        raise InputError(f"column {columns.text}: is one text; give batches of rows")
    to_list: Callable[[], list[object]] = getattr(column, "to_pylist", getattr(column, "tolist", partial(list, column)))
    return to_list()


def with_columns(batch: Any, outcomes: list[Outcome], columns: Columns) -> Any:
    """Return a batch with the columns of its outcomes."""
    added = {name: [getattr(outcome, attribute) for outcome in outcomes] for name, attribute in columns.added().items()}
    if isinstance(batch, Mapping):
        return {**batch, **added}
    if hasattr(batch, "assign"):
        return batch.assign(**added)
    import pyarrow as pa

    types = {"score": pa.float64(), "seconds": pa.float64(), "alternatives": pa.list_(pa.string())}
    for name, attribute in columns.added().items():
        batch = batch.append_column(name, pa.array(added[name], types.get(attribute, pa.string())))
    return batch
