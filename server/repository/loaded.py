"""A bundle with its tokenisers and its engine: what requests can name."""

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from dragoman.export.bundle import Bundle, Manifest
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.core.frames import Frames
from dragoman.server.core.ports import Engine
from dragoman.server.engine.settings import EngineSettings


class SizedEngine(Engine, Protocol):
    """What runs a model, and how much of it there is."""

    device: str
    settings: EngineSettings

    @property
    def num_replicas(self) -> int:
        """Engines that share the model's requests."""
        ...


E = TypeVar("E", bound=SizedEngine)


@dataclass(frozen=True, slots=True)
class LoadedModel(Generic[E]):
    """A model that requests can name."""

    bundle: Bundle
    tokenizers: Tokenizers
    frames: Frames
    engine: E

    @property
    def manifest(self) -> Manifest:
        """What the bundle says of itself."""
        return self.bundle.manifest

    @property
    def name(self) -> str:
        """As requests give it."""
        return self.manifest.name

    @property
    def version(self) -> str:
        """Of the bundle."""
        return self.manifest.version

    @property
    def device(self) -> str:
        """What the engine runs on; empty until it was ready once."""
        return self.engine.device

    @property
    def max_slots(self) -> int:
        """Rows of the decode batches of all its engines."""
        return self.engine.num_replicas * self.engine.settings.max_slots

    @property
    def max_slots_per_request(self) -> int:
        """Rows that one request may take, all in one engine."""
        return self.engine.settings.slots_per_request
