"""A version of a model with its tokenisers and its engine: what answers requests."""

from dataclasses import dataclass, field
from typing import Any

from dragoman.export.bundle import Bundle, Manifest
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.models.model_file import NO_TRAITS, Traits
from dragoman.server.models.sleeping_engine import SleepingEngine
from dragoman.server.models.use import Outcomes, Use
from dragoman.server.service.languages import PromptTemplates


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A version of a model that requests can get.

    Attributes:
        bundle: What it is made of.
        tokenizers: Its tokenisers.
        frames: What is said to it around a text.
        engine: What runs it.
        label: What its folder calls the version; where folders have none, what the content gives.
        use: What requests do with it.
        traits: What the model has of its own.
        manifest: Of the bundle.
        name: As requests give it.
        version: Of the bundle, by its content.
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
        """Load what is read of a bundle in this process; its engine, which has been made, may be anywhere.

        Raises:
            BundleError: If a tokeniser is damaged, or the bundle's template asks for a language that there is not.
        """
        return cls(
            bundle, bundle.tokenizers(), PromptTemplates(bundle.manifest), engine, label or bundle.manifest.version, traits=traits
        )

    def card(self) -> str:
        """Read the bundle's card."""
        return self.bundle.card()

    @property
    def is_asleep(self) -> bool:
        """Whether it stands for a version that is loaded when a request comes for it."""
        return isinstance(self.engine, SleepingEngine)

    @property
    def outcomes(self) -> Outcomes:
        """What became of the requests that this process has had for it."""
        return self.use.outcomes

    @property
    def device(self) -> str:
        """What the engine runs on; empty until it was ready once."""
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
