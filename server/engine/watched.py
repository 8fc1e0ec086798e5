"""Snapshots of an engine for whoever looks, from the lists that its scheduler has anyway.

It counts steps only while somebody has asked within the last seconds, and then once a report, not once a step.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable

from dragoman.server.engine.messages import Step
from dragoman.server.engine.scheduler import Scheduler
from dragoman.server.engine.sequence import Sequence
from dragoman.server.engine.snapshot import CallerUse, EngineSnapshot, SlotUse, Snapshot, StepTotals, summed_up

LEASE_SECONDS = 3.0
"""How long after it was asked last an engine still counts its steps."""


class Watched:
    """Makes snapshots; takes no notice of anything while nobody asks."""

    def __init__(self, scheduler: Scheduler, num_generated: Callable[[Sequence], int], clock: Callable[[], float]) -> None:
        """Watch nothing yet.

        Args:
            scheduler: Of the engine.
            num_generated: Tells how many tokens have been generated for an answer of a sequence.
            clock: In seconds.
        """
        self._scheduler, self._num_generated, self._clock = scheduler, num_generated, clock
        self._totals = StepTotals()
        self._until: float | None = None

    @property
    def is_watched(self) -> bool:
        """Whether steps are counted."""
        return self._until is not None

    def count(self, steps: Iterable[Step]) -> None:
        """Count the steps of a report, if somebody may look again."""
        if self._until is None:
            return
        if self._clock() > self._until:
            self._until = None
        else:
            self._totals = _with(self._totals, steps)

    def snapshot(self, unfilled: Collection[Sequence], steps: Iterable[Step]) -> Snapshot:
        """Return how things stand between two steps, and count from now on.

        Args:
            unfilled: Running sequences whose sources are still being read.
            steps: Those since the last report.
        """
        now = self._clock()
        self._until = now + LEASE_SECONDS
        running = list(self._scheduler.running())
        slots = [slot for sequence in running for slot in self._slots(sequence, is_prefill=sequence in unfilled)]
        engine = EngineSnapshot(now, sorted(slots, key=lambda slot: slot.slot), _with(self._totals, steps))
        return Snapshot([engine], summed_up((*self._running(running), *self._scheduler.waiting_by_caller())))

    def _slots(self, sequence: Sequence, *, is_prefill: bool) -> list[SlotUse]:
        request, num_tokens = sequence.request, self._num_generated(sequence)
        return [
            SlotUse(row, request.id, is_prefill, sequence.num_source_tokens, num_tokens, request.max_new_tokens)
            for row in sequence.rows
        ]

    def _running(self, sequences: Iterable[Sequence]) -> list[CallerUse]:
        counts = Counter(sequence.request.share.caller for sequence in sequences)
        return [CallerUse(name, num_running=count) for name, count in counts.items()]


def _with(totals: StepTotals, steps: Iterable[Step]) -> StepTotals:
    """Return totals to which steps are added."""
    steps = list(steps)
    return StepTotals(
        totals.num_steps + len(steps),
        totals.num_rows + sum(step.num_rows for step in steps),
        totals.seconds + sum(step.seconds for step in steps),
    )
