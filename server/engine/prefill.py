"""Prefill of rows: sources encoded in batches, or prompts read in pieces between steps.

Prefetch: an encoder run has a fixed cost, and slots become free one or two at a time. So a run includes sources of waiting
sequences until the fixed cost hardly counts (`Costs.good_tokens`); their encoded sources are held until they have slots. No run is
made for waiting sequences alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from collections.abc import Sequence as Ordered
from itertools import islice

import structlog

from dragoman.server.engine.costs import Costs, grouped
from dragoman.server.engine.messages import Prefill
from dragoman.server.engine.sequence import Sequence
from dragoman.server.engine.settings import Limits
from dragoman.server.runtime.runner import Held, Reader, Runner

log = structlog.get_logger("dragoman.engine")

MAX_PREFETCH_BYTES = 2**26


class Prefiller(ABC):
    """Fills rows, at once or over several iterations; `done` is the work since the last report."""

    def __init__(
        self,
        limits: Limits,
        clock: Callable[[], float],
        fail: Callable[[list[Sequence], str], None],
        refuse: Callable[[Sequence], None],
    ) -> None:
        """Start with nothing.

        `fail` ends sequences whose prefill has raised, while the exception is being handled; `refuse` ends a sequence whose source
        does not fit in memory even alone.
        """
        self._limits, self._clock, self._fail, self._refuse = limits, clock, fail, refuse
        self.done: list[Prefill] = []

    @property
    def unfilled(self) -> Collection[Sequence]:
        """Running sequences whose rows are not filled; `fill` is called in every iteration while there are any."""
        return ()

    @property
    def num_unread_tokens(self) -> int | None:
        """Source tokens still to be read of unfilled sequences; None where every source is encoded at once."""
        return None

    @abstractmethod
    def fill(self, admitted: Ordered[Sequence], waiting: Collection[Sequence]) -> list[Sequence]:
        """Do one iteration's work for sequences that have just got their rows; return the sequences whose rows are filled now.

        Waiting sequences, the next one first, may be prefetched.
        """

    @abstractmethod
    def forget(self, sequence: Sequence) -> None:
        """Drop the state of a sequence that has ended."""


class EncoderPrefiller(Prefiller):
    """Encodes sources in the batches of least cost, prefetching for waiting sequences."""

    def __init__(
        self,
        runner: Runner,
        costs: Costs,
        limits: Limits,
        clock: Callable[[], float],
        fail: Callable[[list[Sequence], str], None],
        refuse: Callable[[Sequence], None],
        max_bytes: int = MAX_PREFETCH_BYTES,
    ) -> None:
        super().__init__(limits, clock, fail, refuse)
        self._runner, self._costs, self._max_bytes = runner, costs, max_bytes
        self._good_tokens = min(costs.good_tokens, limits.prefill_tokens_per_step)
        self._held: dict[Sequence, Held] = {}
        self._refused: set[Sequence] = set()
        self._token_bytes = self._num_bytes = 0

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence's encoded source."""
        self._take(sequence)

    def fill(self, admitted: Ordered[Sequence], waiting: Collection[Sequence]) -> list[Sequence]:
        """Encode and place sources; sequences whose encoding has raised have ended and are not returned."""
        started = self._clock()
        filled: set[Sequence] = set()
        missing: list[Sequence] = []
        for sequence in admitted:
            if (held := self._take(sequence)) is not None:
                filled |= self._place({sequence: held}, started)
            else:
                missing.append(sequence)
        prefetched = self._choose(missing, waiting) if missing and self._runner.holder is not None else []
        groups = [group for group in grouped([*missing, *prefetched], self._costs) if any(s.admitted is not None for s in group)]
        for group in groups:
            filled |= self._encode(group)
        num_encoded = sum(map(len, groups))
        num_tokens = sum(sequence.num_source_tokens for group in groups for sequence in group)
        self.done.append(Prefill(num_encoded, num_tokens, self._clock() - started, len(admitted)))
        return [sequence for sequence in admitted if sequence in filled]

    def _choose(self, missing: Ordered[Sequence], waiting: Collection[Sequence]) -> list[Sequence]:
        budget = self._good_tokens - sum(sequence.num_source_tokens for sequence in missing)
        chosen: list[Sequence] = []
        num_bytes = self._num_bytes
        for sequence in islice(waiting, self._limits.max_prefetch if budget > 0 else 0):
            needed = self._token_bytes * sequence.num_source_tokens
            is_known = sequence in self._held or sequence in self._refused
            if is_known or sequence.num_source_tokens > budget or num_bytes + needed > self._max_bytes:
                continue
            chosen.append(sequence)
            budget -= sequence.num_source_tokens
            num_bytes += needed
        return chosen

    def _encode(self, group: list[Sequence]) -> set[Sequence]:
        """Encode a batch and fill the rows of its running sequences; return these."""
        started = self._clock()
        own = [sequence for sequence in group if sequence.admitted is not None]
        if len(own) < len(group) and (encoded := self._prefetch(group)) is not None:
            return self._place(encoded, started)
        try:
            self._runner.prefill([sequence.request.source_ids for sequence in own], [sequence.rows[0] for sequence in own])
        except MemoryError:
            if len(own) > 1:
                return set().union(*(self._encode([sequence]) for sequence in own))
            log.warning("no memory for a source", num_tokens=own[0].num_source_tokens)
            self._refuse(own[0])
            return set()
        except Exception:
            self._fail(own, "prefill failed")
            return set()
        for sequence in own:
            sequence.prefill_seconds = self._clock() - started
        return set(own)

    def _prefetch(self, group: list[Sequence]) -> dict[Sequence, Held] | None:
        """Encode a batch and hold waiting sequences' sources; return the others', or None on failure."""
        holder = self._runner.holder
        assert holder is not None
        waiting = [sequence for sequence in group if sequence.admitted is None]
        try:
            encoded = dict(zip(group, holder.encode([sequence.request.source_ids for sequence in group]), strict=True))
        except Exception as error:
            log.warning("sources cannot be encoded ahead", num_requests=len(waiting), reason=f"{type(error).__name__}: {error}")
            self._refused.update(waiting)  # waiting sequences are not retried; the caller encodes the others without them
            return None
        for sequence in waiting:
            held = encoded.pop(sequence)
            self._token_bytes = held.nbytes // sequence.num_source_tokens
            if self._num_bytes + held.nbytes <= self._max_bytes:
                self._held[sequence] = held
                self._num_bytes += held.nbytes
        return encoded

    def _place(self, encoded: dict[Sequence, Held], started: float) -> set[Sequence]:
        """Fill rows with encoded sources; return the sequences for which that succeeded."""
        holder = self._runner.holder
        assert holder is not None
        try:
            holder.place(list(encoded.values()), [sequence.rows[0] for sequence in encoded])
        except Exception:
            self._fail(list(encoded), "prefill failed")
            return set()
        for sequence in encoded:
            sequence.prefill_seconds = self._clock() - started
        return set(encoded)

    def _take(self, sequence: Sequence) -> Held | None:
        self._refused.discard(sequence)
        if (held := self._held.pop(sequence, None)) is not None:
            self._num_bytes -= held.nbytes
        return held


class PromptPrefiller(Prefiller):
    """Reads prompts in order of admission, a limited number of tokens in each iteration, so that running requests do not stall.

    Meanwhile steps write to the row at position 0, which the next piece overwrites. Results are bit-identical however it is cut.
    """

    def __init__(
        self,
        reader: Reader,
        limits: Limits,
        clock: Callable[[], float],
        fail: Callable[[list[Sequence], str], None],
        refuse: Callable[[Sequence], None],
    ) -> None:
        super().__init__(limits, clock, fail, refuse)
        self._reader = reader
        self._num_read: dict[Sequence, int] = {}

    @property
    def unfilled(self) -> Collection[Sequence]:
        """Sequences whose prompt is not read completely."""
        return self._num_read.keys()

    @property
    def num_unread_tokens(self) -> int:
        """Prompt tokens still to be read."""
        return sum(sequence.num_source_tokens - num_read for sequence, num_read in self._num_read.items())

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence's progress."""
        self._num_read.pop(sequence, None)

    def fill(self, admitted: Ordered[Sequence], waiting: Collection[Sequence]) -> list[Sequence]:
        """Read the next pieces; return the sequences whose prompt is complete."""
        started = self._clock()
        for sequence in admitted:
            self._num_read[sequence] = 0
            self._read(sequence, 0)
        filled = [sequence for sequence in admitted if sequence in self._num_read and not sequence.num_source_tokens]
        num_rows = num_tokens = 0
        for sequence in [sequence for sequence in self._num_read if sequence.num_source_tokens]:
            num_left = sequence.num_source_tokens - self._num_read[sequence]
            size = min(num_left, self._limits.prefill_tokens_per_step - num_tokens)
            if not size:
                break
            if self._read(sequence, size):
                num_rows, num_tokens = num_rows + 1, num_tokens + size
                if size == num_left:
                    filled.append(sequence)
        for sequence in filled:
            del self._num_read[sequence]
        self.done.append(Prefill(num_rows, num_tokens, self._clock() - started, len(admitted)))
        return filled

    def _read(self, sequence: Sequence, size: int) -> bool:
        """Read the next `size` tokens of a prompt into its row; return whether that succeeded."""
        started, first = self._clock(), self._num_read[sequence]
        try:
            self._reader.read(sequence.rows[0], sequence.request.source_ids, first, first + size)
        except MemoryError:
            log.warning("no memory for a source", num_tokens=sequence.num_source_tokens)
            self._refuse(sequence)
            return False
        except Exception:
            self._fail([sequence], "prefill failed")
            return False
        self._num_read[sequence] = first + size
        sequence.prefill_seconds += self._clock() - started
        return True
