"""Those who look at the server, and the one view that is made for all of them, four times a second and only while there are any."""

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import structlog

from dragoman.server.core.callers import Caller
from dragoman.server.core.pace_of_steps import PaceOfSteps
from dragoman.server.core.ports import Engine, Model, Models
from dragoman.server.core.view import CallerView, ModelView, SlotView, View, Viewer, as_seen_by
from dragoman.server.engine.snapshot import EngineSnapshot, SlotUse, Snapshot
from dragoman.server.errors import ConnectionLimit, Unavailable

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
