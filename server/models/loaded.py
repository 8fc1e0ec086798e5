"""A version of a model that answers requests: its bundle, its tokenisers, and its engine or a stand-in for that."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from dragoman.export.bundle import Bundle, Manifest
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.dispatch.calls import Calls
from dragoman.server.engine.messages import Ready, Request, ScoreRequest, Share, Statistics
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.engine.snapshot import Snapshot
from dragoman.server.errors import NotReady
from dragoman.server.models.model_file import NO_TRAITS, Traits
from dragoman.server.models.use import Outcomes, Use
from dragoman.server.service.languages import PromptTemplates


class SleepingEngine(Calls):
    """Refuses every request with `NotReady`; requests wait for the model before they get here, see `Repository.hold`.

    Attributes:
        settings: Of the engines once the model is loaded.
        num_replicas: Engines that it has then.
        device: Device that they have run on; empty if they never have.
        is_ready: True: requests are accepted, and load the model.
        ready: None.
        process_ids: None.
    """

    is_ready = True
    ready: Ready | None = None
    process_ids: tuple[int, ...] = ()

    def __init__(self, name: str, settings: EngineSettings, num_replicas: int, device: str) -> None:
        """Describe engines that are not loaded; see the attributes."""
        super().__init__(name, 0.0)
        self.settings, self.num_replicas, self.device = settings, num_replicas, device

    async def start(self, *, is_persistent: bool = False) -> None:
        """Do nothing, as the next two."""

    async def stop(self) -> None:
        """See `start`."""

    def cancel(self, request_id: int) -> None:
        """See `start`."""

    def submit(self, request: Request | ScoreRequest, deliver: Callable[[Any], None]) -> None:
        """Raise `NotReady`, as the next three."""
        self._refuse()

    def ensure_place(self, share: Share) -> None:
        """See `submit`."""
        self._refuse()

    def statistics(self) -> Statistics:
        """See `submit`."""
        self._refuse()

    def watch(self) -> asyncio.Future[Snapshot]:
        """See `submit`."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotReady(f"model {self.name!r} is asleep")


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A version of a model that requests can get.

    Attributes:
        bundle: Its bundle.
        tokenizers: Its tokenisers.
        frames: Its prompt templates.
        engine: Its engine.
        label: Name of the version's folder; where that has none, the version by content.
        use: Its use by requests.
        traits: Settings that only models have.
        manifest: Of the bundle.
        name: Name of the model.
        version: Version by content.
    """

    bundle: Bundle
    tokenizers: Tokenizers
    frames: PromptTemplates
    engine: Any
    label: str
    use: Use = field(default_factory=Use)
    traits: Traits = NO_TRAITS
    manifest: Manifest = field(init=False)
    name: str = field(init=False)
    version: str = field(init=False)

    def __post_init__(self) -> None:
        manifest = self.bundle.manifest
        for attribute, value in (("manifest", manifest), ("name", manifest.name), ("version", manifest.version)):
            object.__setattr__(self, attribute, value)  # read many times in each request

    @classmethod
    def of(cls, bundle: Bundle, engine: Any, label: str = "", traits: Traits = NO_TRAITS) -> "LoadedModel":
        """Read a bundle for an engine that has been made; raise `BundleError` if its tokenisers or templates are damaged."""
        return cls(
            bundle, bundle.tokenizers(), PromptTemplates(bundle.manifest), engine, label or bundle.manifest.version, traits=traits
        )

    def card(self) -> str:
        """Read the bundle's card."""
        return self.bundle.card()

    @property
    def is_asleep(self) -> bool:
        """Whether it describes a version that is loaded when a request comes."""
        return isinstance(self.engine, SleepingEngine)

    @property
    def outcomes(self) -> Outcomes:
        """Outcomes of the requests of this process."""
        return self.use.outcomes

    @property
    def device(self) -> str:
        """Device of the engine; empty until it was ready once."""
        return str(self.engine.device)

    @property
    def num_engines(self) -> int:
        """Engines that share its requests."""
        return int(self.engine.num_replicas)

    @property
    def max_slots(self) -> int:
        """Rows of the decode batches of all its engines."""
        return int(self.engine.num_replicas * self.engine.settings.max_slots)

    @property
    def max_slots_per_request(self) -> int:
        """Rows that one request may take, all in one engine."""
        return int(self.engine.settings.slots_per_request)
