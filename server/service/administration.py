"""Orders of operators and the status of models that they return, as data; `models/administration.py` carries them out."""

from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Literal

from dragoman.server.service.context import RunningCalls


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """Status of a version of a model.

    Attributes:
        name: Of its folder, or of its content; empty while neither is known.
        version: Of its content; empty while it has not been opened.
        state: State of its life cycle in a word; `found` if it is not loaded.
        since: Begin of that state, seconds since 1970; 0 if it is not loaded.
        cause: Cause of its refusal in a word; empty if it is not refused.
        reason: The same in one line.
        labels: Labels that requests may name, sorted.
        share: Fraction of the requests without a version that it answers.
        is_default: Whether the policy prefers it.
        num_answered: Requests answered.
        num_failed: Requests that failed by a server fault.
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
    """Orders of operators for a model since the start.

    Attributes:
        is_unloaded: Whether the model is not to be served at all.
        loaded: Versions loaded beside the policy's, sorted.
        unloaded: Versions treated as missing, sorted.
        pinned: The version of all requests that name none; empty if the policy decides.
        labels: Versions by label; an empty one removes the label.
    """

    is_unloaded: bool = False
    loaded: tuple[str, ...] = ()
    unloaded: tuple[str, ...] = ()
    pinned: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """Status of a model.

    Attributes:
        name: Of the model.
        is_ready: Whether requests for it are answered.
        versions: The newest first.
        problems: Orders that cannot be met, and faults of its folder or file, a line each.
        requested: Orders of operators.
    """

    name: str
    is_ready: bool = False
    versions: tuple[VersionStatus, ...] = ()
    problems: tuple[str, ...] = ()
    requested: Requested = Requested()


@dataclass(frozen=True, slots=True)
class Operator:
    """An operator.

    Attributes:
        name: For the log.
        models: Names of the models it may see and change; None for all.
    """

    name: str
    models: Collection[str] | None = None


Verb = Literal["list", "refresh", "load", "unload", "reload", "rollback", "label"]


@dataclass(frozen=True, slots=True)
class Order:
    """An order, as it travels between processes.

    Attributes:
        verb: Name of the `Administrator`'s method.
        model: Name of the model; empty for all, where that is possible.
        version: Its argument; empty where it has none.
        label: Its argument; empty where it has none.
    """

    verb: Verb
    model: str = ""
    version: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """The outcome of an order.

    Attributes:
        models: Status of the models concerned.
        problem: Why the models folder could not be read the last time; empty if it could.
    """

    models: tuple[ModelStatus, ...]
    problem: str = ""


CarryOut = Callable[[Operator, Order], Awaitable[Listing]]
"""Carries out an order; errors as of `Administrator`."""


@dataclass(frozen=True, slots=True)
class OperatorCalls:
    """Administration through a protocol adapter that serves other callers, too.

    Attributes:
        calls: Running calls of operators, and who may make them.
        carry_out: Carries out an order.
    """

    calls: RunningCalls
    carry_out: CarryOut
