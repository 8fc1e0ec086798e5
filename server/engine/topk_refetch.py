"""Top-k refetch: more candidates for searches that cannot choose from those of a plain step.

A plain step returns few candidates for each row. A search that needs more is paused: the next steps feed its rows the same tokens
again, which rewrites what their caches hold, while more candidates are fetched for these rows alone, within a share of the engine's
time. Pausing changes no answer, since a search's candidates depend on itself alone.
"""

from collections.abc import Callable
from typing import NamedTuple

from dragoman.server.engine.rows import Rows
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.sequence import Sequence
from dragoman.server.runtime.runner import Candidates, Runner

# Share of the engine's time for refetches while others run: as long as the steps themselves.
SHARE = 1 / 2

# Debt beyond this is dropped, so that one stall of the machine does not delay refetches for long.
MAX_DEBT_SECONDS = 1.0

# Most rows of a refetch while others run.
ROWS_AT_ONCE = 4

# Most candidates of a refetch over all rows: 24 MiB.
MAX_CANDIDATES_AT_ONCE = 2**21


class TimeBudget:
    """Share of time for work in pieces; a piece may start without debt, and take any time. Without a clock."""

    def __init__(self, share: float) -> None:
        """Start without debt; the share is above 0 and below 1."""
        assert 0 < share < 1
        self._ratio = share / (1 - share)
        self._debt_seconds = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a piece of work may start."""
        return self._debt_seconds <= 0

    def earn(self, seconds: float) -> None:
        """Record other work; unused credit is lost at the next call."""
        self._debt_seconds = max(self._debt_seconds, 0.0) - seconds * self._ratio

    def spend(self, seconds: float) -> None:
        """Record the work's duration."""
        self._debt_seconds = min(self._debt_seconds + seconds, MAX_DEBT_SECONDS)

    def clear(self) -> None:
        """Drop the debt, when there is no other work."""
        self._debt_seconds = 0.0


class _Place(NamedTuple):
    sequence: Sequence
    hypothesis: int
    num_candidates: int


class TopKRefetch:
    """Paused searches, in the order of their refetches."""

    def __init__(self, runner: Runner, rows: Rows, clock: Callable[[], float]) -> None:
        self._runner, self._rows, self._clock = runner, rows, clock
        self._waiting: dict[Sequence, Search] = {}
        self._budget = TimeBudget(SHARE)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, search: Search) -> None:
        """Pause a search."""
        self._waiting[sequence] = search

    def discard(self, sequence: Sequence) -> None:
        """Remove a sequence's search, if it is paused."""
        self._waiting.pop(sequence, None)

    def hold(self) -> None:
        """Feed the rows of paused searches the tokens of the last step again."""
        for sequence, search in self._waiting.items():
            for row, hypothesis in zip(sequence.rows, search.live, strict=True):
                self._rows.feed_again(row, hypothesis.token_ids)

    def take(self, step_seconds: float, *, is_anyone_else: bool, fail: Callable[[list[Sequence]], None]) -> list[Sequence]:
        """Do the refetches there is time for after a step, or all if no other request runs; return sequences that can choose now.

        `fail` is called while the exception of a refetch is being handled.
        """
        budget = self._budget
        if is_anyone_else:
            budget.earn(step_seconds)
        else:
            budget.clear()
        able: list[Sequence] = []
        while self._waiting and (budget.is_open or not is_anyone_else):
            started = self._clock()
            able += self._refetch(ROWS_AT_ONCE if is_anyone_else else len(self._rows.tokens), fail)
            if is_anyone_else:
                budget.spend(self._clock() - started)
        return able

    def _refetch(self, max_rows: int, fail: Callable[[list[Sequence]], None]) -> list[Sequence]:
        """Fetch candidates for the next search's row, and adjacent rows that want the same K."""
        first, places = self._next_run(max_rows)
        sequences = list(dict.fromkeys(place.sequence for place in places))
        part = slice(first, first + len(places))
        try:
            candidates = self._runner.refetch(self._rows.tokens[part], self._rows.positions[part], places[0].num_candidates, first)
        except Exception:
            fail(sequences)  # calls `discard` for each
            return []
        for i, place in enumerate(places):
            try:
                if (search := self._waiting.get(place.sequence)) is not None:
                    search.take_refetched(place.hypothesis, Candidates(candidates.ids[i : i + 1], candidates.log_probs[i : i + 1]))
            except Exception:
                fail([place.sequence])
        able: list[Sequence] = []
        for sequence in sequences:
            search = self._waiting.pop(sequence, None)
            if search is not None and search.wanted:
                self._waiting[sequence] = search  # to the end of the order
            elif search is not None:
                able.append(sequence)
        return able

    def _next_run(self, max_rows: int) -> tuple[int, list[_Place]]:
        """Return the first row to fetch for, and the run of places from it on with equal K."""
        places = {
            sequence.rows[hypothesis]: _Place(sequence, hypothesis, count)
            for sequence, search in self._waiting.items()
            for hypothesis, count in search.wanted.items()
        }
        first = next(iter(places))
        count = places[first].num_candidates
        run = [places[first]]
        most = max(min(max_rows, MAX_CANDIDATES_AT_ONCE // count), 1)
        while len(run) < most and (place := places.get(first + len(run))) is not None and place.num_candidates == count:
            run.append(place)
        return first, run
