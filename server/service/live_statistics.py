"""Live statistics shown by the console: a snapshot of every engine, four times a second while there are watchers.

The JSON has camel-case names and no text of requests; docs/call.md describes the fields.
"""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog
from msgspec import Struct
from msgspec.structs import replace

from dragoman.server.engine import messages
from dragoman.server.engine.messages import CallerUse, EngineSnapshot, SlotUse, Snapshot, summed_up
from dragoman.server.errors import ConnectionLimit, Unavailable
from dragoman.server.service.callers import Caller

if TYPE_CHECKING:
    from dragoman.server.models.loaded import LoadedModel
    from dragoman.server.models.registry import ModelRegistry

INTERVAL_SECONDS = 0.25
# Timeout of an engine's snapshot; during a long step the previous one is used.
PATIENCE_SECONDS = 0.2
# Maximum interval between compared snapshots: an engine not watched for longer may not have counted all steps.
LONGEST_SECONDS = 2.0
MAX_WATCHERS = 16
MAX_WATCHERS_PER_CALLER = 4
RETRY_SECONDS = 5.0

log = structlog.get_logger("dragoman.live_statistics")


class SlotStatistics(Struct, frozen=True, rename="camel"):
    """A slot in use."""

    slot: int
    request: int
    state: str
    num_source_tokens: int
    num_tokens: int
    max_new_tokens: int
    engine: int


class CallerStatistics(Struct, frozen=True, rename="camel"):
    """A caller's requests for a model; the empty name sums up calls without a caller and callers not shown by name."""

    name: str
    num_waiting: int
    num_running: int


class ModelStatistics(Struct, frozen=True, rename="camel"):
    """One version of a model."""

    name: str
    version: str
    label: str
    state: str
    is_default: bool
    device: str
    precision: str
    num_engines: int
    num_slots: int
    num_slots_in_use: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    queue_seconds: float = 0.0
    rows_per_step: float | None = None
    step_seconds: float | None = None
    steps_per_second: float = 0.0
    tokens_per_second: float = 0.0
    cache_bytes_reserved: int = 0
    cache_bytes_used: int = 0
    slots: list[SlotStatistics] = []
    callers: list[CallerStatistics] = []


class Statistics(Struct, frozen=True, rename="camel"):
    """Statistics of the server; none follow once it drains."""

    time: float
    uptime_seconds: float
    is_ready: bool
    is_draining: bool
    models: list[ModelStatistics]

    def restricted(self, models: Collection[str] | None, caller: str = "", *, is_operator: bool = False) -> "Statistics":
        """Return the statistics of visible models (None for all), with only `caller` shown by name unless to an operator."""
        seen = [model for model in self.models if models is None or model.name in models]
        if not is_operator:
            seen = [replace(model, callers=_without_others(model.callers, caller)) for model in seen]
        return replace(self, models=seen)


def _without_others(callers: list[CallerStatistics], name: str) -> list[CallerStatistics]:
    """Return the callers with only `name` shown by name."""
    uses = summed_up(CallerUse(one.name if one.name == name else "", one.num_waiting, one.num_running) for one in callers)
    return [CallerStatistics(use.name, use.num_waiting, use.num_running) for use in uses]


class Pace(NamedTuple):
    """Steps of one or several engines between two snapshots, and rates over that time."""

    num_steps: int = 0
    num_rows: int = 0
    seconds: float = 0.0  # durations of the steps
    steps_per_second: float = 0.0
    rows_per_second: float = 0.0

    @property
    def rows_per_step(self) -> float | None:
        """Mean rows of a step; None without steps."""
        return self.num_rows / self.num_steps if self.num_steps else None

    @property
    def step_seconds(self) -> float | None:
        """Mean duration of a step; None without steps."""
        return self.seconds / self.num_steps if self.num_steps else None


class PaceOfSteps:
    """Pace of the engines of one version, from snapshot to snapshot."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[EngineSnapshot, Pace]] = {}

    def update(self, engines: Sequence[EngineSnapshot]) -> Pace:
        """Return the engines' total pace since the previous snapshots."""
        self._last = {engine.replica: (engine, self._pace(engine)) for engine in engines}
        columns = zip(*(pace for _, pace in self._last.values()), strict=True)
        return Pace(*map(sum, columns))

    def _pace(self, engine: EngineSnapshot) -> Pace:
        if engine.replica not in self._last:
            return Pace()
        before, pace = self._last[engine.replica]
        seconds = engine.at - before.at
        if not seconds:  # no new snapshot yet
            return pace
        num_steps = engine.totals.num_steps - before.totals.num_steps
        if not 0 < seconds <= LONGEST_SECONDS or num_steps < 0:  # a restarted engine counts from 0
            return Pace()
        num_rows = engine.totals.num_rows - before.totals.num_rows
        return Pace(num_steps, num_rows, engine.totals.seconds - before.totals.seconds, num_steps / seconds, num_rows / seconds)


@dataclass(slots=True, eq=False)
class _Version:
    """Last snapshot of a version, None without an engine, and the version's pace."""

    snapshot: Snapshot | None = None
    pace: PaceOfSteps = field(default_factory=PaceOfSteps)


class LiveStatistics:
    """Live statistics of one frontend process, computed once for all watchers."""

    def __init__(self, models: "ModelRegistry", is_ready: Callable[[], bool], draining: asyncio.Event) -> None:
        """Start without watchers; `draining` ends the statistics with a last one."""
        self._models, self._is_ready, self._draining = models, is_ready, draining
        self._began = time.monotonic()
        self._watchers: Counter[str] = Counter()
        self._making: asyncio.Task[None] | None = None
        self._next: asyncio.Future[Statistics] | None = None

    async def watch(self, caller: Caller | None, *, is_operator: bool = False) -> AsyncGenerator[Statistics, None]:
        """Yield statistics at the watcher's speed, until it may no longer call or the server drains.

        `caller` limits visibility unless None; an operator sees every caller. Raises `ConnectionLimit` if there are too many.
        """
        name = "" if caller is None else caller.name
        self._enter(name)
        try:
            is_draining = False
            while not is_draining and (caller is None or caller.may_call):
                assert self._next is not None
                made = await asyncio.shield(self._next)
                is_draining = made.is_draining
                yield made.restricted(None if caller is None else caller.models, name, is_operator=is_operator)
        finally:
            self._leave(name)

    def _enter(self, name: str) -> None:
        if self._watchers.total() >= MAX_WATCHERS:
            raise ConnectionLimit(f"viewers: {MAX_WATCHERS} watch already", RETRY_SECONDS)
        if name and self._watchers[name] >= MAX_WATCHERS_PER_CALLER:
            raise ConnectionLimit(f"viewers: {MAX_WATCHERS_PER_CALLER} of caller {name} watch already", RETRY_SECONDS)
        self._watchers[name] += 1
        if self._making is None:
            self._next = asyncio.get_running_loop().create_future()
            self._making = asyncio.create_task(self._make(), name="live statistics")

    def _leave(self, name: str) -> None:
        self._watchers[name] -= 1
        self._watchers += Counter()  # names without watchers are dropped
        if not self._watchers and self._making is not None:
            self._making.cancel()
            self._making = self._next = None

    async def _make(self) -> None:
        """Produce statistics periodically; an unforeseen error ends all watchers, and the next watcher restarts it."""
        versions: dict[Any, _Version] = {}
        try:
            while True:
                began, models = time.monotonic(), self._models.versions()
                versions = {model.engine: versions.get(model.engine) or _Version() for model in models}
                await _take_snapshots(versions)
                made = self._statistics(models, versions)
                waiting = self._next
                assert waiting is not None
                if not made.is_draining:  # otherwise the last one stays for late watchers
                    self._next = asyncio.get_running_loop().create_future()
                waiting.set_result(made)
                if made.is_draining:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(began + INTERVAL_SECONDS - time.monotonic(), 0.0)):
                        await self._draining.wait()
        except Exception as error:
            log.exception("a view could not be made")
            waiting, self._making = self._next, None
            if waiting is not None:
                waiting.set_exception(error)
                waiting.exception()  # mark as retrieved: there may be no watcher left

    def _statistics(self, models: "Sequence[LoadedModel]", versions: Mapping[Any, _Version]) -> Statistics:
        defaults = {model.engine for model in self._models.all()}
        described = [_describe(model, model.engine in defaults, versions[model.engine]) for model in models]
        return Statistics(time.time(), time.monotonic() - self._began, self._is_ready(), self._draining.is_set(), described)


async def _take_snapshots(versions: Mapping[Any, _Version]) -> None:
    """Query all engines at once; an engine that times out keeps its last snapshot."""
    asked: dict[asyncio.Future[Snapshot], _Version] = {}
    for engine, version in versions.items():
        try:
            asked[engine.watch()] = version
        except Unavailable:
            version.snapshot = None
    if not asked:
        return
    done, _ = await asyncio.wait(asked, timeout=PATIENCE_SECONDS)
    for future in done:
        asked[future].snapshot = None if future.exception() is not None else future.result()


def _describe(model: "LoadedModel", is_default: bool, version: _Version) -> ModelStatistics:
    """Return the statistics of a version; without an engine only its description."""
    state = "asleep" if model.is_asleep else "serving" if model.engine.is_ready else "starting"
    manifest, num_engines = model.manifest, model.num_engines
    snapshot = version.snapshot or Snapshot([], [])
    pace = version.pace.update(snapshot.engines)
    try:
        statistics = model.engine.statistics()
    except Unavailable:
        statistics = messages.Statistics()
    return ModelStatistics(
        name=model.name,
        version=model.version,
        label=model.label,
        state=state,
        is_default=is_default,
        device=model.device,
        precision=manifest.precision,
        num_engines=num_engines,
        num_slots=model.max_slots,
        num_slots_in_use=statistics.num_slots,
        num_running=statistics.num_running,
        num_waiting=statistics.num_waiting,
        num_waiting_tokens=statistics.num_waiting_tokens,
        queue_seconds=statistics.queue_seconds,
        rows_per_step=pace.rows_per_step,
        step_seconds=pace.step_seconds,
        steps_per_second=pace.steps_per_second,
        tokens_per_second=pace.rows_per_second,
        cache_bytes_reserved=statistics.cache_bytes_reserved,
        cache_bytes_used=statistics.cache_bytes_used,
        slots=[_slot(engine, slot, model.max_slots // num_engines) for engine in snapshot.engines for slot in engine.slots],
        callers=[CallerStatistics(use.name, use.num_waiting, use.num_running) for use in snapshot.callers],
    )


def _slot(engine: EngineSnapshot, slot: SlotUse, num_slots: int) -> SlotStatistics:
    """Return a slot numbered across all engines, each of which has `num_slots`."""
    state = "prefill" if slot.is_prefill else "decode"
    tokens = (slot.num_source_tokens, slot.num_tokens, slot.max_new_tokens)
    return SlotStatistics(engine.replica * num_slots + slot.slot, slot.request, state, *tokens, engine.replica)
