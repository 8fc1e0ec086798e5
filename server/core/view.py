"""What whoever looks at the server sees of it at a moment: plain data without any text, in JSON with names in camel case."""

from collections.abc import Collection
from dataclasses import dataclass

from msgspec import Struct
from msgspec.structs import replace

from dragoman.server.core.callers import Caller
from dragoman.server.engine.snapshot import CallerUse, summed_up


class SlotView(Struct, frozen=True, rename="camel"):
    """A slot in use.

    Attributes:
        slot: Number among those of the model.
        request: Number of its request, the same for all of the request's slots.
        state: `prefill` while the source is being read, then `decode`.
        num_source_tokens: Tokens of the source.
        num_tokens: Tokens generated so far.
        max_new_tokens: Most that will be.
        engine: Which of the model's engines has it.
    """

    slot: int
    request: int
    state: str
    num_source_tokens: int
    num_tokens: int
    max_new_tokens: int
    engine: int


class CallerView(Struct, frozen=True, rename="camel"):
    """What a caller has there; the empty name is nobody in particular, or those whose names are not told."""

    name: str
    num_waiting: int
    num_running: int


class ModelView(Struct, frozen=True, rename="camel"):
    """A version of a model.

    Attributes:
        name: Of the model.
        version: What its content gives.
        label: What its folder calls it.
        state: `serving`; `starting` while no engine is ready; `asleep`.
        is_default: Whether it is the one that the model's policy prefers.
        device: What it runs on.
        precision: Of its weights.
        num_engines: Engines that share its requests.
        num_slots: Slots of all of them.
        num_slots_in_use: Those that requests hold.
        num_running: Requests in slots.
        num_waiting: Requests in the queue.
        num_waiting_tokens: Source tokens of those.
        queue_seconds: How long one that comes now is likely to wait.
        rows_per_step: Mean since the view before; None without steps.
        step_seconds: See `rows_per_step`.
        steps_per_second: Steps of all engines since the view before.
        tokens_per_second: Tokens decoded in these.
        cache_bytes_reserved: Memory that the caches have.
        cache_bytes_used: What rows in use take of it.
        slots: Those in use.
        callers: Who has requests there.
    """

    name: str
    version: str
    label: str
    state: str
    is_default: bool
    device: str
    precision: str
    num_engines: int
    num_slots: int
    num_slots_in_use: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_waiting_tokens: int = 0
    queue_seconds: float = 0.0
    rows_per_step: float | None = None
    step_seconds: float | None = None
    steps_per_second: float = 0.0
    tokens_per_second: float = 0.0
    cache_bytes_reserved: int = 0
    cache_bytes_used: int = 0
    slots: list[SlotView] = []
    callers: list[CallerView] = []


class View(Struct, frozen=True, rename="camel"):
    """The server.

    Attributes:
        time: Seconds since 1970.
        uptime_seconds: Since this front end began.
        is_ready: What /readyz says.
        is_draining: Whether it refuses new calls; no view follows then.
        models: Every version that requests can get.
    """

    time: float
    uptime_seconds: float
    is_ready: bool
    is_draining: bool
    models: list[ModelView]


@dataclass(frozen=True, slots=True)
class Viewer:
    """Who looks.

    Attributes:
        name: Of the caller; empty for nobody in particular.
        models: Names of the models it may see; None for all.
        is_operator: Whether it may administer, and so see who calls.
    """

    name: str = ""
    models: Collection[str] | None = None
    is_operator: bool = False

    @classmethod
    def of(cls, caller: Caller | None, *, is_operator: bool = False) -> "Viewer":
        """Return a caller, or nobody in particular, as one who looks."""
        return cls(is_operator=is_operator) if caller is None else cls(caller.name, caller.models, is_operator)

    def may_see(self, model: str) -> bool:
        """Return whether a model of this name is shown to it."""
        return self.models is None or model in self.models


def as_seen_by(view: View, viewer: Viewer) -> View:
    """Return what a viewer may see of a view: its models, and of callers only itself by name unless it is an operator."""
    models = [model for model in view.models if viewer.may_see(model.name)]
    if not viewer.is_operator:
        models = [replace(model, callers=_without_others(model.callers, viewer.name)) for model in models]
    return replace(view, models=models)


def _without_others(callers: list[CallerView], name: str) -> list[CallerView]:
    """Return callers with only one of them by name."""
    uses = summed_up(CallerUse(one.name if one.name == name else "", one.num_waiting, one.num_running) for one in callers)
    return [CallerView(use.name, use.num_waiting, use.num_running) for use in uses]
