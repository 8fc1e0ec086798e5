"""Version policy: the versions of a model to load, and the default version.

A pure function of folder, file, refusals and overrides. A removed or refused version is replaced by the next that the file allows.
"""

import math
from collections.abc import Collection, Container, Mapping, Sequence, Set
from dataclasses import dataclass, field
from types import MappingProxyType

from dragoman.export.fields import listed
from dragoman.server.models.discovery import FoundVersion
from dragoman.server.models.model_file import ModelFile

# Bound, since a server may run for years.
MAX_VERSIONS = 64


class History:
    """Versions that have been the default, for rollbacks; a return to a version drops those after it."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def note(self, name: str) -> None:
        """Record the present default."""
        if name in self._names:
            del self._names[self._names.index(name) + 1 :]
        else:
            self._names = [*self._names[-MAX_VERSIONS + 1 :], name]

    def before(self, usable: Container[str]) -> str | None:
        """Return the last default before the present one that is usable; None if there is none."""
        return next((name for name in reversed(self._names[:-1]) if name in usable), None)


_NOTHING: Mapping[str, str] = MappingProxyType({})
# Tolerance of weights that sum to 1 up to rounding.
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class Overrides:
    """Operators' requests since the server started; not persistent."""

    is_unloaded: bool = False  # whether no version is to be loaded
    loaded: frozenset[str] = frozenset()  # versions beyond the file's; requests must name them
    unloaded: frozenset[str] = frozenset()  # versions that are never loaded
    pinned: str | None = None  # default version, which excludes newer ones; None where the file decides
    # Version by label, overriding the file's labels; None removes a label.
    labels: Mapping[str, str | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Wanted:
    """Versions to serve, by names."""

    versions: tuple[FoundVersion, ...] = ()  # versions to load, the newest first
    # Fraction of the requests without a version, by version: above 0, with sum 1; empty only without versions.
    shares: Mapping[str, float] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)  # version by label
    default: str | None = None  # version that gets the rest of the shares; None only without versions
    problems: tuple[str, ...] = ()  # fields that cannot be satisfied, a line each, beginning with the field


NO_OVERRIDES = Overrides()


def wanted(
    found: Sequence[FoundVersion],
    file: ModelFile,
    refused: Mapping[str, str] = _NOTHING,
    overrides: Overrides = NO_OVERRIDES,
) -> Wanted:
    """Return the versions to serve: those of `latest` or `only`, of labels, weights and `default`, and those that operators load.

    If nothing names a default, `latest` counts only versions without a weight, so that a canary is never alone. `found` has the
    newest version last, `refused` a reason by name.
    """
    return Wanted() if overrides.is_unloaded else _Decision(found, file, refused, overrides).wanted()


class _Decision:
    def __init__(self, found: Sequence[FoundVersion], file: ModelFile, refused: Mapping[str, str], overrides: Overrides) -> None:
        self._found = found
        self._file = file
        self._refused = refused
        self._overrides = overrides
        self._names = {version.name: place for place, version in enumerate(found)}
        self._usable = [name for name in self._names if not self._why_not(name)]
        self._problems: list[str] = []

    def wanted(self) -> Wanted:
        pinned = self._pinned()
        labels = self._labels()
        weights = self._weights(labels) if pinned is None else {}
        default = pinned if pinned is not None else self._named_default(labels)
        is_open = default is None and math.fsum(weights.values()) < 1 - _ROUNDING
        policy = self._policy(weights if is_open else (), pinned)
        loaded = [name for name in sorted(self._overrides.loaded) if self._is_there("load", name)]
        served = {*policy, *labels.values(), *weights, *loaded, *([default] if default is not None else [])}
        if default is None:
            default = self._newest(set(policy) - weights.keys() or served - weights.keys() or served)
        versions = tuple(version for version in reversed(self._found) if version.name in served)
        if self._found and not versions:
            self._problems.append(f"versions: none can be served of {listed(list(self._names))}")
        return Wanted(versions, _shares(weights, default), labels, default, tuple(self._problems))

    def _why_not(self, name: str) -> str:
        """Return why a version cannot be served; empty if it can."""
        if name not in self._names:
            return f"there is no version {name!r}"
        if name in self._overrides.unloaded:
            return f"version {name!r} was unloaded"
        return f"version {name!r} is refused: {self._refused[name]}" if name in self._refused else ""

    def _is_there(self, field: str, name: str) -> bool:
        """Return whether a version can be served, and record a problem if not."""
        if reason := self._why_not(name):
            self._problems.append(f"{field}: {reason}")
        return not reason

    def _pinned(self) -> str | None:
        pinned = self._overrides.pinned
        return pinned if pinned is not None and self._is_there("rollback", pinned) else None

    def _asked_labels(self) -> dict[str, str]:
        both = {**self._file.labels, **self._overrides.labels}
        return {label: version for label, version in both.items() if version is not None}

    def _labels(self) -> dict[str, str]:
        labels = {}
        for label, version in self._asked_labels().items():
            if label in self._names:
                self._problems.append(f"labels.{label}: there is a version of that name")
            elif self._is_there(f"labels.{label}", version):
                labels[label] = version
        return labels

    def _resolve(self, field: str, asked: str, labels: Mapping[str, str]) -> str | None:
        """Return the version that a field names or labels; None, and a problem, if it cannot be served."""
        if asked not in self._names and asked in (asked_labels := self._asked_labels()):
            if asked not in labels:
                self._problems.append(f"{field}: {self._why_not(asked_labels[asked])}")
            return labels.get(asked)
        if asked in self._names:
            return asked if self._is_there(field, asked) else None
        self._problems.append(f"{field}: there is no version or label {asked!r}")
        return None

    def _weights(self, labels: Mapping[str, str]) -> dict[str, float]:
        weights: dict[str, float] = {}
        for asked, weight in self._file.weights.items():
            if (name := self._resolve(f"weights.{asked}", asked, labels)) is not None:
                weights[name] = weights.get(name, 0.0) + weight
        return weights

    def _policy(self, without: Collection[str], pinned: str | None) -> list[str]:
        """Return the versions of `only`, or of `latest` except those in `without`."""
        versions = self._file.versions
        if versions.only is not None:
            return [name for name in versions.only if self._is_there("versions.only", name)]
        candidates = [name for name in self._usable if name not in without]
        if pinned is not None:
            candidates = [name for name in candidates if self._names[name] <= self._names[pinned]]
        return candidates[-versions.num_latest :]

    def _named_default(self, labels: Mapping[str, str]) -> str | None:
        default = self._file.versions.default
        return self._resolve("versions.default", default, labels) if default is not None else None

    def _newest(self, names: Set[str]) -> str | None:
        return max(names, key=self._names.__getitem__, default=None)


def _shares(weights: Mapping[str, float], default: str | None) -> dict[str, float]:
    if default is None:
        return {}
    shares = {name: weight for name, weight in weights.items() if weight > 0}
    if (rest := 1 - math.fsum(shares.values())) > _ROUNDING or not shares:
        shares[default] = shares.get(default, 0.0) + rest
    total = math.fsum(shares.values())
    return {name: share / total for name, share in shares.items()}
