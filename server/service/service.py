"""Service used by every protocol adapter: generation, running calls, readiness and drain."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dragoman.server.config import ANY, ReadyRule
from dragoman.server.service.callers import NO_DEADLINES, Callers, Deadlines
from dragoman.server.service.context import RunningCalls
from dragoman.server.service.generate import MAX_TEXT_CHARACTERS, Generation
from dragoman.server.service.in_flight import REQUESTS_PER_SLOT, InFlight
from dragoman.server.service.live_statistics import LiveStatistics
from dragoman.server.service.result_cache import ResultCache
from dragoman.server.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from dragoman.server.models.loaded import LoadedModel
    from dragoman.server.models.registry import ModelRegistry
    from dragoman.server.telemetry.tracing import Tracer  # imports OpenTelemetry

# For sending the last bytes after all calls have ended.
CLOSE_SECONDS = 0.5
# For notifying health watchers of the drain.
HEALTH_SECONDS = 0.25


class Readiness:
    """Readiness of the server by the setting `ready_when`.

    First reached when every model that the rule needs is ready: a rollout whose model cannot be loaded must not replace the last
    working pods. After that the rule alone decides.
    """

    def __init__(self, rule: ReadyRule, known: Iterable[str] = ()) -> None:
        """Start with a rule, and the names of models that were ready before in another process."""
        self._rule = rule
        self._known = set(known)
        self._has_begun = False

    def note(self, models: "Sequence[LoadedModel]") -> None:
        """Update the state; call whenever a model has become ready or unready."""
        self._known |= {model.name for model in models if model.engine.is_ready}
        if all(model.name in self._known for model in self._needed(models)):
            self._has_begun = self._has_begun or bool(models)

    def is_met(self, models: "Sequence[LoadedModel]") -> bool:
        """Return whether the server is ready with its current models; thread-safe."""
        needed = self._needed(models)
        ready = [model.engine.is_ready for model in needed]
        if not (self._has_begun or all(ready)):
            return False
        if self._rule.word == ANY:
            return any(ready) and all(model.engine.is_ready for model in needed if model.traits.is_ready_needed)
        return bool(ready) and all(ready)

    def _needed(self, models: "Sequence[LoadedModel]") -> "list[LoadedModel]":
        return [model for model in models if self._rule.needs(model.name, model.traits.is_ready_needed)]


class Service:
    """Service of one frontend process; `callers` is None without authentication and limits."""

    def __init__(
        self,
        models: "ModelRegistry",
        metrics: Metrics,
        tracer: "Tracer | None" = None,
        callers: Callers | None = None,
        deadlines: Deadlines = NO_DEADLINES,
        readiness: Readiness | None = None,
        max_text_characters: int = MAX_TEXT_CHARACTERS,
        results: ResultCache | None = None,
    ) -> None:
        """Start without calls; by default the server is ready while any model is, once all were."""
        self.models = models
        self.metrics = metrics
        self.readiness = readiness or Readiness(ReadyRule())
        self.callers = callers
        self.calls = RunningCalls(metrics, tracer, callers)
        self.in_flight = InFlight(lambda: REQUESTS_PER_SLOT * max((model.max_slots for model in models.all()), default=1))
        self.generation = Generation(models, metrics, self.calls, self.in_flight, deadlines, max_text_characters, results)
        self.live_statistics = LiveStatistics(models, lambda: self.is_ready, self.calls.draining)

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self.calls.draining.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether the server accepts requests and `ready_when` is met; the result of /readyz."""
        return not self.is_draining and self.readiness.is_met(self.models.all())

    def note_models(self) -> None:
        """Update the readiness; call whenever a model has become ready or unready, was added or removed."""
        self.readiness.note(self.models.all())

    @property
    def num_running(self) -> int:
        """Running calls that a drain waits for."""
        return self.calls.num_running

    async def drain(self, seconds: float, publish_health: Callable[[], Awaitable[None]]) -> bool:
        """Refuse new work and wait for running calls; return whether all have finished.

        `publish_health` notifies health watchers and is cancelled after `HEALTH_SECONDS`.
        """
        self.calls.draining.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(HEALTH_SECONDS):
                await publish_health()
        return await self.calls.wait_idle(seconds)

    async def end_calls(self) -> None:
        """End running calls with `UNAVAILABLE`, and refuse new ones as in a drain."""
        self.calls.draining.set()
        self.calls.end_all()
        await self.calls.wait_ended(CLOSE_SECONDS)
