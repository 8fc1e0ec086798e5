"""The service that every protocol adapter stands on: generation, running calls, readiness and the drain."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from dragoman.server.config import ANY, ReadyRule
from dragoman.server.service.callers import NO_DEADLINES, Callers, Deadlines
from dragoman.server.service.context import AccessLog, RunningCalls
from dragoman.server.service.generate import Generation
from dragoman.server.service.in_flight import REQUESTS_PER_SLOT, InFlight
from dragoman.server.service.live_statistics import LiveStatistics
from dragoman.server.telemetry.metrics import Metrics

if TYPE_CHECKING:
    from dragoman.server.models.loaded import LoadedModel
    from dragoman.server.models.registry import Repository
    from dragoman.server.telemetry.tracing import Tracer  # it needs OpenTelemetry

# For the last bytes to leave, once nothing runs any more.
CLOSE_SECONDS = 0.5
# To tell watchers of the health that nothing is served any more.
TELL_SECONDS = 0.25


class Readiness:
    """Whether the server is ready, by the setting `ready_when`.

    It is for the first time when every model that the rule needs is ready: a rollout with a model that cannot be loaded must not go
    on to the pods that have the last one that could. After that the rule alone decides.
    """

    def __init__(self, rule: ReadyRule, known: Iterable[str] = ()) -> None:
        """Start with a rule, and the names of models that have been ready before, in another process."""
        self._rule = rule
        self._known = set(known)
        self._has_begun = False

    def note(self, models: "Sequence[LoadedModel]") -> None:
        """Update the state; to be called whenever a model has become ready or has stopped being so."""
        self._known |= {model.name for model in models if model.engine.is_ready}
        if all(model.name in self._known for model in self._needed(models)):
            self._has_begun = self._has_begun or bool(models)

    def is_met(self, models: "Sequence[LoadedModel]") -> bool:
        """Return whether the server is ready with its models as they are; from any thread."""
        needed = self._needed(models)
        ready = [model.engine.is_ready for model in needed]
        if not (self._has_begun or all(ready)):
            return False
        if self._rule.word == ANY:
            return any(ready) and all(model.engine.is_ready for model in needed if model.traits.is_ready_needed)
        return bool(ready) and all(ready)

    def _needed(self, models: "Sequence[LoadedModel]") -> "list[LoadedModel]":
        return [model for model in models if self._rule.needs(model.name, model.traits.is_ready_needed)]


class Core:
    """The service of one frontend process.

    Attributes:
        models: Loaded models; may change.
        generation: Generates and scores.
        calls: Running calls.
        in_flight: In-flight windows of calls that are large or have several requests.
        callers: All callers; None if anybody may call, without limits.
        readiness: The server's readiness by its models.
        viewing: Live statistics for the console.
    """

    def __init__(
        self,
        models: "Repository",
        metrics: Metrics,
        tracer: "Tracer | None" = None,
        callers: Callers | None = None,
        deadlines: Deadlines = NO_DEADLINES,
        readiness: Readiness | None = None,
    ) -> None:
        """Start with nothing running.

        Args:
            models: Loaded models.
            metrics: Of requests.
            tracer: Makes spans; None for none.
            callers: All callers; None if anybody may call.
            deadlines: The server's own, for callers without.
            readiness: By default ready while any model is, once all were.
        """
        self.models = models
        self.readiness = readiness or Readiness(ReadyRule())
        self.callers = callers
        self.generation = Generation(models, metrics, deadlines)
        self.calls = RunningCalls(AccessLog(metrics, tracer), callers)
        self.in_flight = InFlight(lambda: REQUESTS_PER_SLOT * max((model.max_slots for model in models.all()), default=1))
        self.viewing = LiveStatistics(models, lambda: self.is_ready, self.calls.draining)

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self.calls.draining.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether the server takes requests, and as many of its models as `ready_when` asks for; the answer of /readyz."""
        return not self.is_draining and self.readiness.is_met(self.models.all())

    def note_models(self) -> None:
        """Update the readiness, whenever a model has become ready, has stopped being so, has come or is gone."""
        self.readiness.note(self.models.all())

    @property
    def num_running(self) -> int:
        """Running calls that a drain waits for."""
        return self.calls.num_running

    async def drain(self, seconds: float, tell: Callable[[], Awaitable[None]]) -> bool:
        """Refuse new work and let running calls finish.

        Args:
            seconds: For running calls.
            tell: Publishes to watchers of the health that nothing is served any more; given up after `TELL_SECONDS`.

        Returns:
            Whether all have finished.
        """
        self.calls.draining.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_SECONDS):
                await tell()
        return await self.calls.wait_idle(seconds)

    async def end_calls(self) -> None:
        """End running calls with `UNAVAILABLE`, and refuse new ones as in a drain."""
        self.calls.draining.set()
        self.calls.end_all()
        await self.calls.wait_ended(CLOSE_SECONDS)
