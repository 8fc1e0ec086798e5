"""Data types of model administration: orders of operators and model status; carried out by `models/administration.py`."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dragoman.server.service.context import RunningCalls


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """Status of a model version; strings are empty while not known.

    Attributes:
        name: Name of the version's folder, or of its content.
        state: State of the life cycle; `found` if not loaded.
        since: Start of the state, seconds since 1970; 0 if not loaded.
        cause: Category of a refusal, one word; `reason` is one line.
        share: Fraction of the requests without a version.
    """

    name: str
    version: str = ""
    state: str = "found"
    since: float = 0.0
    cause: str = ""
    reason: str = ""
    labels: tuple[str, ...] = ()
    share: float = 0.0
    is_default: bool = False
    num_answered: int = 0
    num_failed: int = 0


@dataclass(frozen=True, slots=True)
class Requested:
    """Operators' orders for one model since the start: versions loaded beside the policy's, and versions treated as missing.

    `pinned` is the version for requests that name none, empty if the policy decides; an empty version in `labels` removes a label.
    """

    is_unloaded: bool = False
    loaded: tuple[str, ...] = ()
    unloaded: tuple[str, ...] = ()
    pinned: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Status of a model; versions newest first, problems one line each (unmet orders, faults of the folder or file)."""

    name: str
    is_ready: bool = False
    versions: tuple[VersionStatus, ...] = ()
    problems: tuple[str, ...] = ()
    requested: Requested = Requested()
    glossaries: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Operator:
    """Operator; `name` is for the log, `models` the visible and changeable models (None for all)."""

    name: str
    models: Collection[str] | None = None


Verb = Literal["list", "refresh", "load", "unload", "reload", "rollback", "label", "put_glossary", "delete_glossary"]


@dataclass(frozen=True, slots=True)
class Order:
    """An order to call the `Administrator`'s method `verb`, serialized between processes; empty arguments are absent."""

    verb: Verb
    model: str = ""
    version: str = ""
    label: str = ""
    glossary: str = ""
    content: bytes = b""
    format: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """Result of an order: the models concerned, and why the last read of the models folder failed, if so."""

    models: tuple[ModelStatus, ...]
    problem: str = ""


# Carries out an order; raises the errors of `Administrator`.
CarryOut = Callable[[Operator, Order], Awaitable[Listing]]


@dataclass(frozen=True, slots=True)
class OperatorCalls:
    """Administration through a protocol adapter that also serves other callers; `calls` are the operators'."""

    calls: RunningCalls
    carry_out: CarryOut
