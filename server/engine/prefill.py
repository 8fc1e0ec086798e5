"""How what decoder layers read of a source comes into its row: encoded now, beside others, or encoded before."""

from collections.abc import Callable
from collections.abc import Sequence as Ordered

import structlog

from dragoman.server.engine.ahead import Ahead
from dragoman.server.engine.costs import Costs, grouped
from dragoman.server.engine.messages import Prefill
from dragoman.server.engine.scheduler import Limits
from dragoman.server.engine.sequence import Sequence
from dragoman.server.runtime.runner import Held, Runner

log = structlog.get_logger("dragoman.engine")


class Prefills:
    """Fills rows, in as few and as good batches as there are, and says what that took. See `Filling`.

    Attributes:
        ahead: Sources that have been encoded and have no slot yet.
        done: What was done since the last report, an entry for every time that rows were filled.
    """

    unfilled = ()
    num_unread_tokens = None

    def __init__(
        self,
        runner: Callable[[], Runner],
        costs: Costs,
        limits: Limits,
        clock: Callable[[], float],
        observe: Callable[[int, float], None],
        fail: Callable[[list[Sequence], str], None],
        refuse: Callable[[Sequence], None],
    ) -> None:
        """Take what is needed to fill rows.

        Args:
            runner: Returns what computes.
            costs: Of a batch.
            limits: Of sources encoded before they have a slot, and of tokens encoded together with these.
            clock: Tells the time.
            observe: Is told the tokens and seconds of each batch.
            fail: Ends sequences whose batch has raised, while the exception is being handled.
            refuse: Ends a sequence for whose source there is no memory even alone.
        """
        self._runner, self._costs, self._clock = runner, costs, clock
        self._observe, self._fail, self._refuse = observe, fail, refuse
        self.ahead = Ahead(limits.max_ahead, min(costs.good_tokens, limits.prefill_tokens_per_step))
        self.done: list[Prefill] = []

    def forget(self, sequence: Sequence) -> None:
        """See `Filling`."""
        self.ahead.take(sequence)

    def fill(self, admitted: Ordered[Sequence], next_in_line: Callable[[int], list[Sequence]]) -> list[Sequence]:
        """See `Filling`: those whose encoding has raised are not filled, and have ended."""
        started = self._clock()
        filled: set[Sequence] = set()
        missing = [sequence for sequence in admitted if sequence not in self.ahead]
        for sequence in admitted:
            if (held := self.ahead.take(sequence)) is not None:
                filled |= self._place({sequence: held}, started)
        company = self.ahead.company(missing, next_in_line) if missing and self._runner().holder is not None else []
        groups = [group for group in grouped([*missing, *company], self._costs) if any(s.admitted is not None for s in group)]
        for group in groups:
            filled |= self._encode(group)
        num_tokens = sum(sequence.num_source_tokens for group in groups for sequence in group)
        num_encoded = sum(map(len, groups))
        self.done.append(Prefill(num_encoded, num_tokens, self._clock() - started, len(admitted)))
        return [sequence for sequence in admitted if sequence in filled]

    def _encode(self, group: list[Sequence]) -> set[Sequence]:
        """Encode a batch, and fill the rows of those of it that have some; return these."""
        started, holder = self._clock(), self._runner().holder
        own = [sequence for sequence in group if sequence.admitted is not None]
        if len(own) < len(group) and holder is not None and (encoded := self.ahead.encode(holder, group)) is not None:
            self._observe(sum(sequence.num_source_tokens for sequence in group), self._clock() - started)
            return self._place(encoded, started)
        try:
            self._runner().prefill([sequence.request.source_ids for sequence in own], [sequence.rows[0] for sequence in own])
        except MemoryError:
            return self._encode_apart(own)
        except Exception:
            self._fail(own, "prefill failed")
            return set()
        self._observe(sum(sequence.num_source_tokens for sequence in own), self._clock() - started)
        for sequence in own:
            sequence.prefill_seconds = self._clock() - started
        return set(own)

    def _encode_apart(self, group: list[Sequence]) -> set[Sequence]:
        """Encode sources one by one that a device has no memory for together; refuse one for which there is none even alone."""
        if len(group) > 1:
            return set().union(*(self._encode([sequence]) for sequence in group))
        log.warning("no memory for a source", num_tokens=group[0].num_source_tokens)
        self._refuse(group[0])
        return set()

    def _place(self, encoded: dict[Sequence, Held], started: float) -> set[Sequence]:
        """Fill rows with what has been encoded; return those of which that has succeeded."""
        holder = self._runner().holder
        assert holder is not None, "what is held was encoded by a holder"
        try:
            holder.place(list(encoded.values()), [sequence.rows[0] for sequence in encoded])
        except Exception:
            self._fail(list(encoded), "prefill failed")
            return set()
        for sequence in encoded:
            sequence.prefill_seconds = self._clock() - started
        return set(encoded)
