"""The models of one server."""

from collections.abc import Callable
from typing import Generic

from dragoman.export.bundle import Bundle
from dragoman.server.core.frames import Frames
from dragoman.server.errors import UnknownModel
from dragoman.server.repository.loaded import E, LoadedModel


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
