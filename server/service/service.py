"""What every face of the server works with: the models, the way through the house, the calls that run, and the drain."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from dragoman.server.service.callers import NO_DEADLINES, Callers, Deadlines
from dragoman.server.service.context import Records
from dragoman.server.service.generate import Generation
from dragoman.server.service.in_flight import REQUESTS_PER_SLOT, InFlight
from dragoman.server.service.live_statistics import Viewing
from dragoman.server.service.ports import Models
from dragoman.server.service.readiness import Readiness, ReadyRule
from dragoman.server.service.running import RunningCalls
from dragoman.server.telemetry.metrics import Metrics

if TYPE_CHECKING:  # it needs OpenTelemetry
    from dragoman.server.telemetry.tracing import Tracer

# How long the last bytes may take to leave, once nothing runs any more.
CLOSE_SECONDS = 0.5
# How long it may take to tell whoever watches the health that nothing is served any more. Who does not listen is not waited for.
TELL_SECONDS = 0.25


class Core:
    """One for all faces of a server.

    Attributes:
        models: What is loaded; may change while the server runs.
        generation: What generates and scores.
        calls: What runs.
        in_flight: What calls that are large, or of several requests, have in flight.
        callers: Who may call; None if anybody may, without limits.
        readiness: Whether the server is ready while its models are as they are.
        viewing: Those who look at what engines do.
    """

    def __init__(
        self,
        models: Models,
        metrics: Metrics,
        tracer: "Tracer | None" = None,
        callers: Callers | None = None,
        deadlines: Deadlines = NO_DEADLINES,
        readiness: Readiness | None = None,
    ) -> None:
        """Start with nothing running.

        Args:
            models: What is loaded.
            metrics: Where requests are counted.
            tracer: What makes spans; None for none.
            callers: Who may call; None if anybody may.
            deadlines: The server's own, for callers that have none of theirs.
            readiness: When it is ready; by default while any model is, once all were.
        """
        self.models = models
        self.readiness = readiness or Readiness(ReadyRule())
        self.callers = callers
        self.generation = Generation(models, metrics, deadlines)
        self.calls = RunningCalls(Records(metrics, tracer), callers)
        self.in_flight = InFlight(lambda: REQUESTS_PER_SLOT * max((model.max_slots for model in models.all()), default=1))
        self.viewing = Viewing(models, lambda: self.is_ready, self.calls.draining)

    @property
    def is_draining(self) -> bool:
        """Whether new calls are refused."""
        return self.calls.draining.is_set()

    @property
    def is_ready(self) -> bool:
        """Whether the server takes requests, and as many of its models as `ready_when` asks for; what /readyz says."""
        return not self.is_draining and self.readiness.is_met(self.models.all())

    def note_models(self) -> None:
        """Take note of how the models are, whenever one has become ready, has stopped being so, has come or is gone."""
        self.readiness.note(self.models.all())

    @property
    def num_running(self) -> int:
        """Calls that have come and not ended, of those that a drain waits for."""
        return self.calls.num_running

    async def drain(self, seconds: float, tell: Callable[[], Awaitable[None]]) -> bool:
        """Refuse new work and let running calls finish.

        Args:
            seconds: How long they may take.
            tell: Tells whoever asks faces for the health that nothing is served any more; given up after `TELL_SECONDS`.

        Returns:
            Whether all have finished.
        """
        self.calls.draining.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TELL_SECONDS):
                await tell()
        return await self.calls.wait_idle(seconds)

    async def end_calls(self) -> None:
        """End what still runs with `UNAVAILABLE`; what comes from now on is refused, as in a drain."""
        self.calls.draining.set()
        self.calls.end_all()
        await self.calls.wait_ended(CLOSE_SECONDS)
