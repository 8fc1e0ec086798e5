"""Live statistics shown by the console."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import structlog
from msgspec import Struct
from msgspec.structs import replace

from dragoman.server.engine.snapshot import CallerUse, EngineSnapshot, SlotUse, Snapshot, summed_up
from dragoman.server.errors import ConnectionLimit, Unavailable
from dragoman.server.service.callers import Caller
from dragoman.server.service.ports import Engine, Model, Models

LONGEST_SECONDS = 2.0
"""Between two snapshots that are compared: an engine that nobody has asked for longer may not have counted all of its steps."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Of one engine or of several together, between two snapshots.

    Attributes:
        num_steps: Steps.
        num_rows: Rows decoded in them.
        seconds: Their durations together.
        steps_per_second: Of time that passed.
        rows_per_second: Of time that passed.
    """

    num_steps: int = 0
    num_rows: int = 0
    seconds: float = 0.0
    steps_per_second: float = 0.0
    rows_per_second: float = 0.0

    @property
    def rows_per_step(self) -> float | None:
        """Mean; None without steps."""
        return self.num_rows / self.num_steps if self.num_steps else None

    @property
    def step_seconds(self) -> float | None:
        """Mean; None without steps."""
        return self.seconds / self.num_steps if self.num_steps else None


class PaceOfSteps:
    """Of one version of a model, from snapshot to snapshot."""

    def __init__(self) -> None:
        """Know nothing yet."""
        self._last: dict[int, tuple[EngineSnapshot, Pace]] = {}

    def update(self, engines: Sequence[EngineSnapshot]) -> Pace:
        """Take in the engines that there are; return how fast they have been since the last time, all together."""
        self._last = {engine.replica: (engine, self._pace(engine)) for engine in engines}
        paces = [pace for _, pace in self._last.values()]
        return Pace(
            sum(pace.num_steps for pace in paces),
            sum(pace.num_rows for pace in paces),
            sum(pace.seconds for pace in paces),
            sum(pace.steps_per_second for pace in paces),
            sum(pace.rows_per_second for pace in paces),
        )

    def _pace(self, engine: EngineSnapshot) -> Pace:
        if engine.replica not in self._last:
            return Pace()
        before, pace = self._last[engine.replica]
        seconds = engine.at - before.at
        if not seconds:  # it has not answered yet
            return pace
        num_steps = engine.totals.num_steps - before.totals.num_steps
        if not 0 < seconds <= LONGEST_SECONDS or num_steps < 0:  # it was started again, and began to count anew
            return Pace()
        num_rows = engine.totals.num_rows - before.totals.num_rows
        return Pace(num_steps, num_rows, engine.totals.seconds - before.totals.seconds, num_steps / seconds, num_rows / seconds)


class SlotView(Struct, frozen=True, rename="camel"):
    """A slot in use.

    Attributes:
        slot: Number among those of the model.
        request: Number of its request, the same for all of the request's slots.
        state: `prefill` while the source is being read, then `decode`.
        num_source_tokens: Tokens of the source.
        num_tokens: Tokens generated so far.
        max_new_tokens: Most that will be.
        engine: Which of the model's engines has it.
    """

    slot: int
    request: int
    state: str
    num_source_tokens: int
    num_tokens: int
    max_new_tokens: int
    engine: int


class CallerView(Struct, frozen=True, rename="camel"):
    """What a caller has there; the empty name is nobody in particular, or those whose names are not told."""

    name: str
    num_waiting: int
    num_running: int


class ModelView(Struct, frozen=True, rename="camel"):
    """A version of a model.

    Attributes:
        name: Of the model.
        version: What its content gives.
        label: What its folder calls it.
        state: `serving`; `starting` while no engine is ready; `asleep`.
        is_default: Whether it is the one that the model's policy prefers.
        device: What it runs on.
        precision: Of its weights.
        num_engines: Engines that share its requests.
        num_slots: Slots of all of them.
        num_slots_in_use: Those that requests hold.
        num_running: Requests in slots.
        num_waiting: Requests in the queue.
        num_waiting_tokens: Source tokens of those.
        queue_seconds: How long one that comes now is likely to wait.
        rows_per_step: Mean since the view before; None without steps.
        step_seconds: See `rows_per_step`.
        steps_per_second: Steps of all engines since the view before.
        tokens_per_second: Tokens decoded in these.
        cache_bytes_reserved: Memory that the caches have.
        cache_bytes_used: What rows in use take of it.
        slots: Those in use.
        callers: Who has requests there.
    """

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
    slots: list[SlotView] = []
    callers: list[CallerView] = []


class View(Struct, frozen=True, rename="camel"):
    """The server.

    Attributes:
        time: Seconds since 1970.
        uptime_seconds: Since this front end began.
        is_ready: What /readyz says.
        is_draining: Whether it refuses new calls; no view follows then.
        models: Every version that requests can get.
    """

    time: float
    uptime_seconds: float
    is_ready: bool
    is_draining: bool
    models: list[ModelView]


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks.

    Attributes:
        name: Of the caller; empty for nobody in particular.
        models: Names of the models it may see; None for all.
        is_operator: Whether it may administer, and so see who calls.
    """

    name: str = ""
    models: Collection[str] | None = None
    is_operator: bool = False

    @classmethod
    def of(cls, caller: Caller | None, *, is_operator: bool = False) -> "Viewer":
        """Return a caller, or nobody in particular, as one who looks."""
        return cls(is_operator=is_operator) if caller is None else cls(caller.name, caller.models, is_operator)

    def may_see(self, model: str) -> bool:
        """Return whether a model of this name is shown to it."""
        return self.models is None or model in self.models


def as_seen_by(view: View, viewer: Viewer) -> View:
    """Return what a viewer may see of a view: its models, and of callers only itself by name unless it is an operator."""
    models = [model for model in view.models if viewer.may_see(model.name)]
    if not viewer.is_operator:
        models = [replace(model, callers=_without_others(model.callers, viewer.name)) for model in models]
    return replace(view, models=models)


def _without_others(callers: list[CallerView], name: str) -> list[CallerView]:
    """Return callers with only one of them by name."""
    uses = summed_up(CallerUse(one.name if one.name == name else "", one.num_waiting, one.num_running) for one in callers)
    return [CallerView(use.name, use.num_waiting, use.num_running) for use in uses]


VIEW_SECONDS = 0.25
# How long a view waits for engines: what one does in a long step is told in the next.
PATIENCE_SECONDS = 0.2
MAX_VIEWERS = 16
MAX_VIEWERS_PER_CALLER = 4
RETRY_SECONDS = 5.0

log = structlog.get_logger("dragoman.viewing")


@dataclass(slots=True, eq=False)
class _Seen:
    """What has been seen of a version: its last snapshot, if it has an engine, and how fast that steps."""

    snapshot: Snapshot | None = None
    paces: PaceOfSteps = field(default_factory=PaceOfSteps)


class Viewing:
    """See above; of one front end."""

    def __init__(self, models: Models, is_ready: Callable[[], bool], draining: asyncio.Event) -> None:
        """Look at nothing yet.

        Args:
            models: What is served.
            is_ready: Tells whether the server is.
            draining: Set once it refuses new calls; views end with one that says so.
        """
        self._models, self._is_ready, self._draining = models, is_ready, draining
        self._began = time.monotonic()
        self._viewers: Counter[str] = Counter()
        self._making: asyncio.Task[None] | None = None
        self._next: asyncio.Future[View] | None = None

    @property
    def num_viewers(self) -> int:
        """Those who look now."""
        return self._viewers.total()

    async def views(self, caller: Caller | None, *, is_operator: bool = False) -> AsyncGenerator[View, None]:
        """Yield views, one of each moment that a viewer has time for, until they may not call any more or the server drains.

        Args:
            caller: Who looks, and sees what they may see at that moment; None for nobody in particular.
            is_operator: Whether they may administer.

        Raises:
            ConnectionLimit: If too many look already.
        """
        name = "" if caller is None else caller.name
        self._enter(name)
        try:
            is_draining = False
            while not is_draining and (caller is None or caller.may_call):
                assert self._next is not None
                view = await asyncio.shield(self._next)
                is_draining = view.is_draining
                yield as_seen_by(view, Viewer.of(caller, is_operator=is_operator))
        finally:
            self._leave(name)

    def _enter(self, name: str) -> None:
        if self.num_viewers >= MAX_VIEWERS:
            raise ConnectionLimit(f"viewers: {MAX_VIEWERS} look already", RETRY_SECONDS)
        if name and self._viewers[name] >= MAX_VIEWERS_PER_CALLER:
            raise ConnectionLimit(f"viewers: {MAX_VIEWERS_PER_CALLER} of caller {name} look already", RETRY_SECONDS)
        self._viewers[name] += 1
        if self._making is None:
            self._next = asyncio.get_running_loop().create_future()
            self._making = asyncio.create_task(self._make_views(), name="views")

    def _leave(self, name: str) -> None:
        self._viewers[name] -= 1
        self._viewers += Counter()  # those of whom none is left are forgotten
        if not self._viewers and self._making is not None:
            self._making.cancel()
            self._making = self._next = None

    async def _make_views(self) -> None:
        """Make one view after the other; what nobody foresaw ends all who look, and the next one begins anew."""
        seen: dict[Engine, _Seen] = {}
        try:
            while True:
                began, models = time.monotonic(), self._models.versions()
                seen = {model.engine: seen.get(model.engine) or _Seen() for model in models}
                await _take_snapshots(seen)
                view = self._view(models, seen)
                made = self._next
                assert made is not None
                if not view.is_draining:  # else it is the last, also for who comes back late
                    self._next = asyncio.get_running_loop().create_future()
                made.set_result(view)
                if view.is_draining:
                    return
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(began + VIEW_SECONDS - time.monotonic(), 0.0)):
                        await self._draining.wait()
        except Exception as error:
            log.exception("a view could not be made")
            waiting, self._making = self._next, None
            if waiting is not None:
                waiting.set_exception(error)
                waiting.exception()  # seen, even where nobody waits for it

    def _view(self, models: Sequence[Model], seen: Mapping[Engine, _Seen]) -> View:
        defaults = {model.engine for model in self._models.all()}
        described = [_describe(model, model.engine in defaults, seen[model.engine]) for model in models]
        return View(time.time(), time.monotonic() - self._began, self._is_ready(), self._draining.is_set(), described)


async def _take_snapshots(seen: Mapping[Engine, _Seen]) -> None:
    """Ask all engines at once; of one that does not answer in time the last snapshot stays."""
    asked: dict[asyncio.Future[Snapshot], _Seen] = {}
    for engine, of_it in seen.items():
        try:
            asked[engine.watch()] = of_it
        except Unavailable:
            of_it.snapshot = None
    if not asked:
        return
    done, _ = await asyncio.wait(asked, timeout=PATIENCE_SECONDS)
    for future in done:
        asked[future].snapshot = None if future.exception() is not None else future.result()


def _describe(model: Model, is_default: bool, seen: _Seen) -> ModelView:
    """Return what is seen of a version; of one without an engine only what it is."""
    state = "asleep" if model.is_asleep else "serving" if model.engine.is_ready else "starting"
    manifest, num_engines = model.manifest, model.num_engines
    what = (model.name, model.version, model.label, state, is_default, model.device, manifest.precision, num_engines)
    snapshot = seen.snapshot or Snapshot([], [])
    pace = seen.paces.update(snapshot.engines)
    try:
        statistics = model.engine.statistics()
    except Unavailable:
        return ModelView(*what, model.max_slots)
    return ModelView(
        *what,
        model.max_slots,
        statistics.num_slots,
        statistics.num_running,
        statistics.num_waiting,
        statistics.num_waiting_tokens,
        statistics.queue_seconds,
        pace.rows_per_step,
        pace.step_seconds,
        pace.steps_per_second,
        pace.rows_per_second,
        statistics.cache_bytes_reserved,
        statistics.cache_bytes_used,
        [_slot(engine, slot, model.max_slots // num_engines) for engine in snapshot.engines for slot in engine.slots],
        [CallerView(use.name, use.num_waiting, use.num_running) for use in snapshot.callers],
    )


def _slot(engine: EngineSnapshot, slot: SlotUse, num_slots: int) -> SlotView:
    """Return a slot by its number among those of all engines, each of which has so many."""
    state = "prefill" if slot.is_prefill else "decode"
    tokens = (slot.num_source_tokens, slot.num_tokens, slot.max_new_tokens)
    return SlotView(engine.replica * num_slots + slot.slot, slot.request, state, *tokens, engine.replica)
