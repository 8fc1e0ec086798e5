"""What an engine does at a moment, slot by slot, as whoever looks is told: msgspec structs, MessagePack on the wire.

Nothing here is made unless somebody asks, and no text or token of a request is in it.
"""

import heapq
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

MAX_CALLERS = 64
"""Callers that are told of by name; what others have is summed up under the empty name."""


class SlotUse(Struct, frozen=True, array_like=True):
    """A slot that a request holds.

    Attributes:
        slot: Row of the decode batch.
        request: Number of the request, the same for all of its slots; no other of the engine has it.
        is_prefill: Whether its source is still being read.
        num_source_tokens: Tokens of its source.
        num_tokens: Tokens generated so far, the forced prefix not included.
        max_new_tokens: Most that will be.
    """

    slot: int
    request: int
    is_prefill: bool
    num_source_tokens: int
    num_tokens: int
    max_new_tokens: int


class CallerUse(Struct, frozen=True, array_like=True):
    """What a caller has in an engine.

    Attributes:
        name: Of the caller; empty for nobody in particular.
        num_waiting: Requests in the queue.
        num_running: Requests in slots.
    """

    name: str
    num_waiting: int = 0
    num_running: int = 0


class StepTotals(Struct, frozen=True, array_like=True):
    """Decode steps, counted while somebody looks: only what they have grown by between two snapshots says anything.

    Attributes:
        num_steps: Steps.
        num_rows: Rows decoded in all of them, a token each.
        seconds: Their durations together.
    """

    num_steps: int = 0
    num_rows: int = 0
    seconds: float = 0.0


class EngineSnapshot(Struct, frozen=True, array_like=True):
    """One engine at one moment.

    Attributes:
        at: `time.monotonic()` then.
        slots: Slots that requests hold, by row.
        totals: See `StepTotals`.
        replica: Which of the model's engines it is.
    """

    at: float
    slots: list[SlotUse] = []
    totals: StepTotals = StepTotals()
    replica: int = 0


class Snapshot(Struct, frozen=True, array_like=True, tag="snapshot"):
    """A model at one moment, the answer to one `Watch`.

    Attributes:
        engines: Its engines that are ready, by number.
        callers: Those who have anything there, `MAX_CALLERS` at the most and one for the rest; who has most is first.
    """

    engines: list[EngineSnapshot]
    callers: list[CallerUse]


class Watch(Struct, frozen=True, array_like=True, tag="watch"):
    """Somebody looks: one `Snapshot` is the answer, taken before the next step. Nothing is sent to who does not ask again."""


def summed_up(uses: Iterable[CallerUse]) -> list[CallerUse]:
    """Return what callers have, each once and only those who have most by name; see `Snapshot.callers`."""
    by_name: dict[str, CallerUse] = {}
    for use in uses:
        by_name[use.name] = _sum(use.name, [by_name.get(use.name, CallerUse(use.name)), use])
    if len(by_name) > MAX_CALLERS:
        most = heapq.nlargest(MAX_CALLERS, (use for use in by_name.values() if use.name), key=_order)
        others = by_name.keys() - {use.name for use in most}
        by_name = {use.name: use for use in (*most, _sum("", [by_name[name] for name in others]))}
    return sorted(by_name.values(), key=_order, reverse=True)


def of_replica(snapshot: EngineSnapshot, replica: int) -> EngineSnapshot:
    """Return an engine's snapshot as that of one of several."""
    return replace(snapshot, replica=replica)


def _sum(name: str, uses: Iterable[CallerUse]) -> CallerUse:
    uses = list(uses)
    return CallerUse(name, sum(use.num_waiting for use in uses), sum(use.num_running for use in uses))


def _order(use: CallerUse) -> tuple[int, str]:
    return use.num_waiting + use.num_running, use.name
