"""A version that answers requests: its bundle, tokenizers, and engine or stand-in."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from dragoman.export.bundle import Bundle, Manifest
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.dispatch.calls import Calls
from dragoman.server.engine.messages import Ready, Request, ScoreRequest, Share, Snapshot, Statistics
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.errors import NotReady
from dragoman.server.models.model_file import NO_TRAITS, Traits
from dragoman.server.models.use import Outcomes, Use
from dragoman.server.service.glossaries import Glossaries
from dragoman.server.service.languages import PromptTemplates


class SleepingEngine(Calls):
    """Engine of an unloaded model: rejects every request with `NotReady`.

    `is_ready` is true since requests are accepted: they wait in `ModelRegistry.hold` for the load and do not get here.
    `settings` and `num_replicas` are those after the load, `device` is the last one (empty before the first load).
    """

    is_ready = True
    ready: Ready | None = None
    process_ids: tuple[int, ...] = ()

    def __init__(self, name: str, settings: EngineSettings, num_replicas: int, device: str) -> None:
        super().__init__(name, 0.0)
        self.settings, self.num_replicas, self.device = settings, num_replicas, device

    async def start(self, *, is_persistent: bool = False) -> None:
        """Do nothing."""

    async def stop(self) -> None:
        """Do nothing."""

    def cancel(self, request_id: int) -> None:
        """Do nothing."""

    def submit(self, request: Request | ScoreRequest, deliver: Callable[[Any], None]) -> None:
        """Raise `NotReady`."""
        self._refuse()

    def ensure_place(self, share: Share) -> None:
        """Raise `NotReady`."""
        self._refuse()

    def statistics(self) -> Statistics:
        """Raise `NotReady`."""
        self._refuse()

    def watch(self) -> asyncio.Future[Snapshot]:
        """Raise `NotReady`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotReady(f"model {self.name!r} is asleep")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A version of a model that requests can use."""

    bundle: Bundle
    tokenizers: Tokenizers
    templates: PromptTemplates
    engine: Any
    label: str  # name of the version's folder, or the content hash where the folder has no name
    use: Use = field(default_factory=Use)
    traits: Traits = NO_TRAITS
    manifest: Manifest = field(init=False)
    name: str = field(init=False)
    version: str = field(init=False)  # content hash
    glossaries: Glossaries = field(init=False)

    def __post_init__(self) -> None:
        manifest = self.bundle.manifest
        for attribute, value in (("manifest", manifest), ("name", manifest.name), ("version", manifest.version)):
            object.__setattr__(self, attribute, value)  # read many times in each request
        folder = self.traits.glossaries
        object.__setattr__(self, "glossaries", Glossaries(Path(folder) if folder else None))

    @classmethod
    def of(cls, bundle: Bundle, engine: Any, label: str = "", traits: Traits = NO_TRAITS) -> "LoadedModel":
        """Return a loaded model for an engine; raise `BundleError` if the tokenizers or templates are damaged."""
        return cls(
            bundle, bundle.tokenizers(), PromptTemplates(bundle.manifest), engine, label or bundle.manifest.version, traits=traits
        )

    def card(self) -> str:
        """Return the bundle's model card."""
        return self.bundle.card()

    @property
    def is_asleep(self) -> bool:
        """Whether the version is unloaded until a request arrives."""
        return isinstance(self.engine, SleepingEngine)

    @property
    def outcomes(self) -> Outcomes:
        """Outcomes of the requests of this process."""
        return self.use.outcomes

    @property
    def device(self) -> str:
        """Device of the engine; empty before the engine was first ready."""
        return str(self.engine.device)

    @property
    def num_engines(self) -> int:
        """Number of engines that share the requests."""
        return int(self.engine.num_replicas)

    @property
    def num_threads(self) -> int:
        """Compute threads of each engine."""
        return int(self.engine.settings.num_threads)

    @property
    def num_lone_threads(self) -> int:
        """Threads of a step while no other engine of the machine computes."""
        return int(self.engine.settings.device.wide.num_threads or self.num_threads)

    @property
    def max_slots(self) -> int:
        """Decode batch rows of all engines together."""
        return int(self.engine.num_replicas * self.engine.settings.max_slots)

    @property
    def max_slots_per_request(self) -> int:
        """Decode batch rows that one request may take, all in one engine."""
        return int(self.engine.settings.slots_per_request)
