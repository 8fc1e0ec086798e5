"""What operators ask for of the models that are served, and what they are told: the port of faces to whoever leads versions."""

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dragoman.server.service.running import RunningCalls


@dataclass(frozen=True, slots=True)
class VersionStatus:
    """A version of a model, as it is now.

    Attributes:
        name: What its folder calls it, or what its content gives; empty while neither is known.
        version: What its content gives; empty while it has not been opened.
        state: Part of its life, in a word; `found` for what is not loaded.
        since: When that began, seconds since 1970; 0 for what is not loaded.
        cause: Why it is refused, in a word; empty if it is not.
        reason: The same in one line.
        labels: By which requests may name it, sorted.
        share: Of the requests that name no version, how many get it; 0 to 1.
        is_default: Whether it is the one that the policy prefers.
        num_answered: Requests that it has answered.
        num_failed: Requests that failed there through the server's fault.
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
    """What operators have asked for of a model since the start.

    Attributes:
        is_unloaded: Whether the model is not to be served at all.
        loaded: Versions beyond those that the policy asks for, sorted.
        unloaded: Versions that are as if they were not there, sorted.
        pinned: The version that all requests get which name none; empty if the policy decides.
        labels: Versions by label; an empty one takes the label away.
    """

    is_unloaded: bool = False
    loaded: tuple[str, ...] = ()
    unloaded: tuple[str, ...] = ()
    pinned: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A model, as it is now.

    Attributes:
        name: Of the model.
        is_ready: Whether requests for it are answered.
        versions: The newest first.
        problems: What is asked for and cannot be had, and what is wrong with its folder or file, a line each.
        requested: What operators have asked for.
    """

    name: str
    is_ready: bool = False
    versions: tuple[VersionStatus, ...] = ()
    problems: tuple[str, ...] = ()
    requested: Requested = Requested()


@dataclass(frozen=True, slots=True)
class Operator:
    """Who asks.

    Attributes:
        name: For the log.
        models: Names of the models it may see and change; None for all.
    """

    name: str
    models: Collection[str] | None = None


class Administration(Protocol):
    """Changes what is served, for as long as the server lives.

    Each change is answered when it is made, and raises what keeps it from being made: nothing has changed then. Whoever does not
    wait for it does not end it. Names are as operators give them. All of them raise:

        InvalidRequest: If a name cannot be one.
        NotInRepository: If there is no such model, for this operator, or no such version or label.
        NotPossible: If it cannot be done, with the reason.
        Unavailable: If the server starts or ends.
    """

    @property
    def problem(self) -> str:
        """Why the folder of models could not be looked at the last time; empty if it could."""
        ...

    def list(self, operator: Operator, model: str = "") -> Sequence[ModelStatus]:
        """Return how models are, sorted by name; all that the operator may see, or one."""
        ...

    async def load(self, operator: Operator, model: str, version: str) -> ModelStatus:
        """Serve a version beside the policy's; with an empty one what the policy asks for, all of it and nothing instead of it."""
        ...

    async def unload(self, operator: Operator, model: str, version: str) -> ModelStatus:
        """Serve a version no more; with an empty one the whole model."""
        ...

    async def reload(self, operator: Operator, model: str) -> ModelStatus:
        """Look at the folder now, and try again what was refused."""
        ...

    async def rollback(self, operator: Operator, model: str, version: str) -> ModelStatus:
        """Have a version answer all requests that name none; an empty one means the one that did so before."""
        ...

    async def set_label(self, operator: Operator, model: str, label: str, version: str) -> ModelStatus:
        """Have a label stand for a version; for none if that is empty."""
        ...

    async def refresh(self, operator: Operator) -> Sequence[ModelStatus]:
        """Look at all folders now; return how models are, when all are where they are to be."""
        ...


Verb = Literal["list", "refresh", "load", "unload", "reload", "rollback", "label"]


@dataclass(frozen=True, slots=True)
class Order:
    """Something that an operator asks for, whole, so that it can be carried from process to process.

    Attributes:
        verb: Which method of `Administration` it is for.
        model: Name of the model; empty for all, where that can be.
        version: As the method has it.
        label: As the method has it.
    """

    verb: Verb
    model: str = ""
    version: str = ""
    label: str = ""


@dataclass(frozen=True, slots=True)
class Listing:
    """How models are, once an order has been carried out: those that it was about.

    Attributes:
        models: Of them.
        problem: See `Administration`.
    """

    models: tuple[ModelStatus, ...]
    problem: str = ""


CarryOut = Callable[[Operator, Order], Awaitable[Listing]]
"""Carries out an order; errors are those of `Administration`."""


@dataclass(frozen=True, slots=True)
class OperatorCalls:
    """The way in for operators through a face that is not theirs alone.

    Attributes:
        calls: Those of operators that run, and who may make them: callers are always known there.
        carry_out: What does what is asked for.
    """

    calls: RunningCalls
    carry_out: CarryOut


async def carry_out(administration: Administration, operator: Operator, order: Order) -> Listing:
    """Carry out an order here; see `CarryOut`."""
    model, version = order.model, order.version
    models: Sequence[ModelStatus]
    match order.verb:
        case "list":
            models = administration.list(operator, model)
        case "refresh":
            models = await administration.refresh(operator)
        case "load":
            models = [await administration.load(operator, model, version)]
        case "unload":
            models = [await administration.unload(operator, model, version)]
        case "reload":
            models = [await administration.reload(operator, model)]
        case "rollback":
            models = [await administration.rollback(operator, model, version)]
        case "label":
            models = [await administration.set_label(operator, model, order.label, version)]
    return Listing(tuple(models), administration.problem)
