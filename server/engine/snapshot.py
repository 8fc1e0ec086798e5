"""Snapshots of engines, slot by slot, for live statistics: made on demand only, without text or tokens of requests."""

import heapq
from collections.abc import Iterable

from msgspec import Struct
from msgspec.structs import replace

# Callers reported by name; the others are summed under the empty name.
MAX_CALLERS = 64


class SlotUse(Struct, frozen=True, array_like=True):
    """A slot held by a request."""

    slot: int  # row of the decode batch
    request: int  # number of the request, the same for all its slots and unique in the engine
    is_prefill: bool  # whether its source is still being read
    num_source_tokens: int
    num_tokens: int  # tokens generated so far, without the forced prefix
    max_new_tokens: int


class CallerUse(Struct, frozen=True, array_like=True):
    """Requests of a caller; the empty name is for unknown ones."""

    name: str
    num_waiting: int = 0
    num_running: int = 0


class StepTotals(Struct, frozen=True, array_like=True):
    """Decode steps, counted only while snapshots are taken: only differences between snapshots are meaningful."""

    num_steps: int = 0
    num_rows: int = 0  # rows decoded in all steps, a token each
    seconds: float = 0.0  # total duration


class EngineSnapshot(Struct, frozen=True, array_like=True):
    """State of one engine at `time.monotonic()` `at`; slots are in order of row, `replica` is the engine number."""

    at: float
    slots: list[SlotUse] = []
    totals: StepTotals = StepTotals()
    replica: int = 0


class Snapshot(Struct, frozen=True, array_like=True, tag="snapshot"):
    """State of a model, the answer to one `Watch`."""

    engines: list[EngineSnapshot]  # ready engines, by number
    callers: list[CallerUse]  # at most `MAX_CALLERS` callers with requests, most first, and one entry for the rest


class Watch(Struct, frozen=True, array_like=True, tag="watch"):
    """Request one `Snapshot`, taken before the next step."""


def summed_up(uses: Iterable[CallerUse]) -> list[CallerUse]:
    """Return one entry for each caller, by name only for those with most; see `Snapshot.callers`."""
    by_name: dict[str, CallerUse] = {}
    for use in uses:
        by_name[use.name] = _sum(use.name, [by_name.get(use.name, CallerUse(use.name)), use])
    if len(by_name) > MAX_CALLERS:
        most = heapq.nlargest(MAX_CALLERS, (use for use in by_name.values() if use.name), key=_order)
        others = by_name.keys() - {use.name for use in most}
        by_name = {use.name: use for use in (*most, _sum("", [by_name[name] for name in others]))}
    return sorted(by_name.values(), key=_order, reverse=True)


def of_replica(snapshot: EngineSnapshot, replica: int) -> EngineSnapshot:
    """Return an engine's snapshot with its engine number."""
    return replace(snapshot, replica=replica)


def _sum(name: str, uses: Iterable[CallerUse]) -> CallerUse:
    uses = list(uses)
    return CallerUse(name, sum(use.num_waiting for use in uses), sum(use.num_running for use in uses))


def _order(use: CallerUse) -> tuple[int, str]:
    return use.num_waiting + use.num_running, use.name
