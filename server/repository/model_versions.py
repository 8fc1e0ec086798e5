"""The versions of one model that there are: looked up, told apart, counted. What becomes of them is decided elsewhere."""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any, Generic

from dragoman.server.repository.found import FoundVersion
from dragoman.server.repository.loaded import LoadedModel
from dragoman.server.repository.models import Route
from dragoman.server.repository.versions import Cause, Opened, State, Version
from dragoman.server.repository.workshop import E

# Of what has no files.
NOWHERE = FoundVersion("", Path(), (0, 0, 0))


class ModelVersions(Generic[E]):
    """See above.

    Attributes:
        model: Name of the model.
    """

    def __init__(self, model: str) -> None:
        self.model = model
        self._versions: list[Version[E]] = []

    def __iter__(self) -> Iterator[Version[E]]:
        """Yield those that are there now, in the order in which they came; others may come and go meanwhile."""
        return iter(list(self._versions))

    def begin(self, found: FoundVersion) -> Version[E]:
        """Return a version that begins its life."""
        version = Version[E](self.model, found)
        self._versions.append(version)
        return version

    def stand_in(self, opened: Opened, loaded: LoadedModel[E]) -> Version[E]:
        """Return what stands for a version that cannot answer now; its engine is never started."""
        version = Version[E](self.model, NOWHERE, State.STANDBY, loaded=loaded)
        version.open(opened)
        self._versions.append(version)
        return version

    def remove(self, version: Version[E]) -> None:
        """Forget a version that has ended; one that is refused stays known."""
        if version in self._versions and version.state is not State.REFUSED:
            self._versions.remove(version)

    def forget_refused(self, there: Iterable[FoundVersion] = ()) -> None:
        """Forget what was refused and has ended, but for files that are there."""
        kept = set(there)
        self._versions = [one for one in self if one.state is not State.REFUSED or one.loaded is not None or one.found in kept]

    def forgive(self, names: Collection[str] | None = None, causes: Collection[Cause] = frozenset(Cause)) -> None:
        """Forget what was refused, of these names or all, for these causes or any.

        One that requests still hold ends as if it had not been refused.
        """
        for version in self:
            if version.state is State.REFUSED and version.cause in causes and (names is None or version.found.name in names):
                if version.loaded is None:
                    self._versions.remove(version)
                else:
                    version.enter(State.RETIRING)

    def forget_asleep(self, wanted: Iterable[FoundVersion]) -> None:
        """Forget those that are asleep, but for some."""
        kept = set(wanted)
        self._versions = [one for one in self if one.state is not State.ASLEEP or one.found in kept]

    def known(self, found: FoundVersion) -> Version[E] | None:
        """Return the version of what was found, in whichever part of its life but the end; None if there is none."""
        return next((one for one in self if one.found == found and one.state is not State.RETIRING), None)

    def loaded(self) -> list[LoadedModel[E]]:
        """Return those that have an engine."""
        return [version.loaded for version in self if version.loaded is not None]

    def free_replicas(self, num_replicas: int) -> range:
        """Return the lowest numbers for engines that no other engine of the model has."""
        taken = {number for version in self if version.loaded is not None for number in version.replicas}
        first = 0
        while taken & set(range(first, first + num_replicas)):
            first += 1
        return range(first, first + num_replicas)


def is_in(version: Version[Any], route: Route[Any] | None) -> bool:
    """Return whether a route leads to a version."""
    return route is not None and any(model is version.loaded for model in route.versions.values())
