"""The bundles a server has, each with its tokeniser and its engine."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

from dragoman.export.bundle import MANIFEST_FILE, Bundle, BundleError, Manifest
from dragoman.export.signing import Keys
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.config import ConfigError
from dragoman.server.core.frames import Frames
from dragoman.server.core.ports import Engine
from dragoman.server.core.readiness import ReadyRule
from dragoman.server.engine.settings import EngineSettings, slots_per_request
from dragoman.server.errors import UnknownModel


def find_bundles(folder: Path, keys: Keys | None = None) -> list[Bundle]:
    """Open every bundle in a folder, or the one that the folder itself is; sorted by name. Hidden folders are left alone.

    Args:
        folder: Of bundles.
        keys: Of which one must have signed each bundle; None if they need not be signed.

    Raises:
        BundleError: If there is none, one is damaged or not signed as it must be, or two have the same name.
    """
    if not folder.is_dir():
        raise BundleError(f"{folder}: {'not a folder' if folder.exists() else 'no such folder'}")
    if (folder / MANIFEST_FILE).exists():
        directories = [folder]
    else:
        manifests = folder.glob(f"*/{MANIFEST_FILE}")
        directories = sorted(path.parent for path in manifests if not path.parent.name.startswith("."))
    if not directories:
        raise BundleError(f"{folder}: holds no bundle (a directory with {MANIFEST_FILE})")
    bundles: dict[str, Bundle] = {}
    for directory in directories:
        bundle = Bundle.open(directory, keys=keys)
        name = bundle.manifest.name
        if name in bundles:
            raise BundleError(f"{directory} and {bundles[name].directory} both hold a model named {name!r}")
        bundles[name] = bundle
    return [bundles[name] for name in sorted(bundles)]


def check_slots(bundle: Bundle, max_slots: int, max_slots_per_request: int) -> None:
    """Do nothing if a request of which nothing is said can be served.

    Args:
        bundle: Of the model.
        max_slots: As it is set.
        max_slots_per_request: As it is set; 0 for the usual part of them.

    Raises:
        ConfigError: If the model's defaults need more slots than a request may take.
    """
    name, defaults = bundle.manifest.name, bundle.manifest.defaults
    limit = slots_per_request(max_slots, max_slots_per_request)
    for field in ("num_beams", "num_return_sequences"):
        if (needed := getattr(defaults, field) or 1) > limit:
            setting = "max_slots" if limit == max_slots else "max_slots_per_request"
            raise ConfigError(f"{setting}: requests may take {limit} slots, but {field} of model {name} is {needed} by default")


def check_ready_rule(bundles: list[Bundle], rule: ReadyRule) -> None:
    """Do nothing if every model that `ready_when` names is there.

    Raises:
        ConfigError: Naming those that are not.
    """
    names = [bundle.manifest.name for bundle in bundles]
    if missing := sorted(rule.names.difference(names)):
        raise ConfigError(f"ready_when: there is no model {', '.join(missing)}; there are {', '.join(names)}")


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


class Repository(Generic[E]):
    """The models of one server, by name."""

    def __init__(self, bundles: list[Bundle], make_engine: Callable[[Bundle], E]) -> None:
        """Load tokenisers and make (but not start) engines.

        Raises:
            BundleError: If a tokeniser is damaged, or a bundle's template asks for a language that there is not.
        """
        self._models = {b.manifest.name: LoadedModel(b, b.tokenizers(), Frames(b.manifest), make_engine(b)) for b in bundles}

    def get(self, name: str) -> LoadedModel[E]:
        """Return a model; an empty name means the only one.

        Raises:
            UnknownModel: Listing what is loaded.
        """
        if not name and len(self._models) == 1:
            return next(iter(self._models.values()))
        try:
            return self._models[name]
        except KeyError:
            raise UnknownModel(name, list(self._models)) from None

    def all(self) -> list[LoadedModel[E]]:
        """Return every model, sorted by name."""
        return list(self._models.values())
