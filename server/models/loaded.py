"""A version of a model that answers requests: its bundle, its tokenisers, and its engine or a stand-in for that."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NoReturn

from dragoman.export.bundle import Bundle, Manifest
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.dispatch.remote import RemoteDispatcher
from dragoman.server.engine.messages import Ready
from dragoman.server.engine.settings import EngineSettings
from dragoman.server.errors import NotReady
from dragoman.server.models.model_file import NO_TRAITS, Traits
from dragoman.server.models.use import Outcomes, Use
from dragoman.server.service.languages import PromptTemplates


class SleepingEngine:
    """Stand-in for the engine of a model that is asleep: it describes; `Repository.hold` waits until the model is loaded.

    Attributes:
        name: Of the model.
        settings: Of its engines once they are started.
        num_replicas: Number of its engines then.
        device: Device on which they have run; empty if they never have.
    """

    is_ready = True  # requests are welcome: they have the model loaded
    ready: Ready | None = None
    process_ids: tuple[int, ...] = ()

    def __init__(self, name: str, settings: EngineSettings, num_replicas: int, device: str) -> None:
        self.name, self.settings, self.num_replicas, self.device = name, settings, num_replicas, device

    async def start(self, *, is_persistent: bool = False) -> None:
        """Do nothing, as the next one."""

    async def stop(self) -> None:
        """Do nothing."""

    def next_id(self, *_: Any, **__: Any) -> NoReturn:
        """Raise `NotReady`, as the next ones."""
        raise NotReady(f"model {self.name!r} is asleep")

    ensure_place = generate = stream = score = statistics = watch = next_id


if TYPE_CHECKING:  # the pool is of the process that starts engines
    from dragoman.server.workers.pool import ReplicaPool

    FrontEngine = ReplicaPool | RemoteDispatcher | SleepingEngine


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
    """

    bundle: Bundle
    tokenizers: Tokenizers
    frames: PromptTemplates
    engine: "FrontEngine"
    label: str
    use: Use = field(default_factory=Use)
    traits: Traits = NO_TRAITS

    @classmethod
    def of(cls, bundle: Bundle, engine: "FrontEngine", label: str = "", traits: Traits = NO_TRAITS) -> "LoadedModel":
        """Read a bundle for an engine that has been made; raise `BundleError` if its tokenisers or templates are damaged."""
        return cls(
            bundle, bundle.tokenizers(), PromptTemplates(bundle.manifest), engine, label or bundle.manifest.version, traits=traits
        )

    @property
    def manifest(self) -> Manifest:
        """Manifest of the bundle."""
        return self.bundle.manifest

    def card(self) -> str:
        """Read the bundle's card."""
        return self.bundle.card()

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.manifest.name

    @property
    def version(self) -> str:
        """Version by content."""
        return self.manifest.version

    @property
    def is_asleep(self) -> bool:
        """Whether it describes a version that is loaded when a request comes."""
        return isinstance(self.engine, SleepingEngine)

    @property
    def outcomes(self) -> Outcomes:
        """Outcomes of the requests of this process."""
        return self.use.outcomes

    def count_queued(self, seconds: float) -> None:
        """Count the time that an answered request has waited for a slot."""
        self.use.outcomes = self.use.outcomes.plus(Outcomes(queue_seconds=seconds))

    @property
    def device(self) -> str:
        """Device of the engine; empty until it was ready once."""
        return self.engine.device

    @property
    def num_engines(self) -> int:
        """Engines that share its requests."""
        return self.engine.num_replicas

    @property
    def max_slots(self) -> int:
        """Rows of the decode batches of all its engines."""
        return self.engine.num_replicas * self.engine.settings.max_slots

    @property
    def max_slots_per_request(self) -> int:
        """Rows that one request may take, all in one engine."""
        return self.engine.settings.slots_per_request
