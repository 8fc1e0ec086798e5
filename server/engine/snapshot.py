"""Snapshots of engines, slot by slot, for live statistics: msgspec structs, MessagePack on the wire.

They are made on demand only, and hold no text or token of a request.
"""

import heapq
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

MAX_CALLERS = 64
"""Callers reported by name; the others are summed up under the empty name."""


class SlotUse(Struct, frozen=True, array_like=True):
    """A slot that a request holds.

    Attributes:
        slot: Row of the decode batch.
        request: Number of the request, the same for all of its slots and unique in the engine.
        is_prefill: Whether its source is still being read.
        num_source_tokens: Tokens of its source.
        num_tokens: Tokens generated so far, the forced prefix not included.
        max_new_tokens: Limit of these.
    """

    slot: int
    request: int
    is_prefill: bool
    num_source_tokens: int
    num_tokens: int
    max_new_tokens: int


class CallerUse(Struct, frozen=True, array_like=True):
    """Requests of a caller.

    Attributes:
        name: Of the caller; empty for unknown ones.
        num_waiting: Requests in the queue.
        num_running: Requests in slots.
    """

    name: str
    num_waiting: int = 0
    num_running: int = 0


class StepTotals(Struct, frozen=True, array_like=True):
    """Decode steps, counted only while snapshots are taken: their difference between two snapshots is meaningful.

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
        replica: Number of the engine among the model's.
    """

    at: float
    slots: list[SlotUse] = []
    totals: StepTotals = StepTotals()
    replica: int = 0


class Snapshot(Struct, frozen=True, array_like=True, tag="snapshot"):
    """A model at one moment, the answer to one `Watch`.

    Attributes:
        engines: Its engines that are ready, by number.
        callers: Callers with requests, `MAX_CALLERS` at the most and one entry for the rest; those with most first.
    """

    engines: list[EngineSnapshot]
    callers: list[CallerUse]


class Watch(Struct, frozen=True, array_like=True, tag="watch"):
    """Ask for one `Snapshot`, taken before the next step."""


def summed_up(uses: Iterable[CallerUse]) -> list[CallerUse]:
    """Return one entry a caller, by name only for those with most; see `Snapshot.callers`."""
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
