"""What a keeper of a model is given: opens versions, makes their engines, proves them, and tells metrics what there is."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Protocol, TypeVar

from dragoman.export.bundle import Bundle
from dragoman.server.models.discovery import FoundVersion
from dragoman.server.models.loaded import LoadedModel, SizedEngine
from dragoman.server.models.model_file import ModelFile
from dragoman.server.models.registry import Route
from dragoman.server.models.use import Holding, Outcomes
from dragoman.server.models.version import Opened


class StartedEngine(SizedEngine, Protocol):
    """An engine that is started and ended."""

    async def start(self, *, is_persistent: bool = False) -> None:
        """Start it; done once it is ready.

        Raises:
            EngineCannotStart: If it cannot be.
        """
        ...

    async def stop(self) -> None:
        """End it; what still runs ends with `Unavailable`."""
        ...


E = TypeVar("E", bound=StartedEngine)


class Front(Protocol[E]):
    """What answers callers, in one process or several; see `FrontEnd` and `FrontEnds`."""

    async def adopt(self, model: LoadedModel[E]) -> None:
        """Be ready for requests for a version; none gets it until it is published.

        Raises:
            BundleError: If its files are gone meanwhile.
        """
        ...

    async def publish(self, name: str, route: Route[E] | None) -> None:
        """Have a model's requests that come from now on be answered so.

        Raises:
            CannotServe: If they cannot be everywhere.
        """
        ...

    async def until_released(self, model: LoadedModel[E]) -> None:
        """Wait until no request holds a version that no route leads to any more."""
        ...

    def outcomes(self, model: LoadedModel[E]) -> Outcomes:
        """Return what became of the requests that held a version."""
        ...

    def holding(self, model: LoadedModel[E]) -> Holding:
        """Return how requests use a version."""
        ...

    def is_awaited(self, name: str) -> bool:
        """Return whether requests wait for a model that is asleep."""
        ...

    def refuse_waiting(self, name: str, reason: str, retry_after_seconds: float) -> None:
        """Tell the requests that wait for a model that it cannot be loaded now."""
        ...


class Workshop(Protocol[E]):
    """See above.

    Attributes:
        turn: Held by who loads: versions are loaded one after the other, so that memory can be reckoned.
        load_seconds: How long an engine may take until it is ready.
    """

    turn: asyncio.Lock
    load_seconds: float

    def open(self, model: str, found: FoundVersion, file: ModelFile) -> Opened:
        """Open a version and compare everything that can be compared without running it; on any thread.

        Raises:
            Refused: If it cannot be served.
        """
        ...

    def num_replicas(self, bundle: Bundle, file: ModelFile) -> int:
        """Return how many engines a version gets."""
        ...

    def measure(self, model: LoadedModel[E] | None) -> None:
        """Take note of how much memory a version takes that runs, which tells what the model's others will; of none, do nothing."""
        ...

    def reckon(self, bundle: Bundle, file: ModelFile) -> int:
        """Return how many bytes a version's engines may take."""
        ...

    def resident_bytes(self, model: LoadedModel[E]) -> int:
        """Return what a version's engines have now; 0 if that cannot be told."""
        ...

    def sleeping(self, opened: Opened, file: ModelFile, label: str, device: str) -> LoadedModel[E]:
        """Return what stands for a version while it is asleep.

        Args:
            opened: The version.
            file: Of the model.
            label: What requests call the version.
            device: What it has run on; empty if it never has.
        """
        ...

    def load(
        self,
        opened: Opened,
        file: ModelFile,
        label: str,
        replicas: range,
        *,
        on_death: Callable[[], None] = lambda: None,
        is_observed: Callable[[], bool] = lambda: True,
    ) -> LoadedModel[E]:
        """Return a version with an engine that is not started.

        Args:
            opened: The version.
            file: Of the model.
            label: What requests call the version.
            replicas: Numbers by which metrics know its engines; none for an engine that never starts.
            on_death: Called when one of them has ended by itself.
            is_observed: Returns whether metrics count what they do.
        """
        ...

    def prove(self, model: LoadedModel[E]) -> Awaitable[None]:
        """Have a running engine show that it is what was exported.

        Raises:
            Refused: If it does not.
        """
        ...

    def forget(self, model: str, replicas: range) -> None:
        """End the series of engines that are gone for good."""
        ...

    def published(self, name: str, route: Route[E] | None) -> None:
        """Tell health and metrics what is served now."""
        ...

    def gone(self, name: str) -> None:
        """End all series of a model, which is gone with its folder."""
        ...

    def slept(self, model: str, why: str) -> None:
        """Count that a model has fallen asleep, and why."""
        ...

    def woken(self, model: str, outcome: str) -> None:
        """Count how waking a model has ended: `loaded`, `failed`, or `refused`."""
        ...

    def swapped(self, model: str, outcome: str) -> None:
        """Count how a change of versions has ended: `done`, `refused` or `rolled_back`."""
        ...
