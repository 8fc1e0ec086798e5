"""Top-k refetch: more candidates for searches that cannot choose from those of a plain step.

A plain step returns few candidates of every row. The few searches for which these are not enough are paused: their rows are fed
the same tokens again in the next steps, which writes what is in their caches already, while the others go on. More candidates are
fetched for those rows alone, a few at a time, and while others run for no more than a share of the engine's time. Pausing changes
no answer: the candidates of a search depend on itself alone.
"""

from collections.abc import Callable
from typing import NamedTuple

from dragoman.server.engine.rows import Rows
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.sequence import Sequence
from dragoman.server.runtime.runner import Candidates, Runner

SHARE = 1 / 2
"""Of the engine's time, for refetches while others run: as long as the steps themselves."""

MAX_DEBT_SECONDS = 1.0
"""Debt beyond this is forgiven, so that one stall of the machine does not hold up refetches for long."""

ROWS_AT_ONCE = 4
"""Rows of a refetch while others run, at the most."""

MAX_CANDIDATES_AT_ONCE = 2**21
"""Of all rows of a refetch together: 24 MiB."""


class TimeBudget:
    """A share of time for work in pieces, each of which begins while nothing is owed and may take as long as it takes.

    On average the work takes at most its share, however long a piece is. No clock of its own.
    """

    def __init__(self, share: float) -> None:
        """Allow a share of all time, above 0 and below 1."""
        assert 0 < share < 1
        self._ratio = share / (1 - share)
        self._debt_seconds = 0.0

    @property
    def is_open(self) -> bool:
        """Whether a piece of work may begin."""
        return self._debt_seconds <= 0

    def earn(self, seconds: float) -> None:
        """Note time that others had. Time not used up before they have had more is lost."""
        self._debt_seconds = max(self._debt_seconds, 0.0) - seconds * self._ratio

    def spend(self, seconds: float) -> None:
        """Note time that the work took."""
        self._debt_seconds = min(self._debt_seconds + seconds, MAX_DEBT_SECONDS)

    def clear(self) -> None:
        """Forget the debt: there are no others."""
        self._debt_seconds = 0.0


class _Place(NamedTuple):
    """A row to fetch candidates for: its sequence, the index of its hypothesis, and the K that is wanted."""

    sequence: Sequence
    hypothesis: int
    num_candidates: int


class TopKRefetch:
    """The paused searches, in the order of their refetches."""

    def __init__(self, runner: Runner, rows: Rows, clock: Callable[[], float]) -> None:
        self._runner, self._rows, self._clock = runner, rows, clock
        self._waiting: dict[Sequence, Search] = {}
        self._budget = TimeBudget(SHARE)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, search: Search) -> None:
        """Pause a search that could not choose."""
        self._waiting[sequence] = search

    def discard(self, sequence: Sequence) -> None:
        """Forget a search, if it is there: its request has ended."""
        self._waiting.pop(sequence, None)

    def hold(self) -> None:
        """Feed the rows of paused searches the tokens of the last step again."""
        for sequence, search in self._waiting.items():
            for row, hypothesis in zip(sequence.rows, search.live, strict=True):
                self._rows.feed_again(row, hypothesis.token_ids)

    def take(self, step_seconds: float, *, is_anyone_else: bool, fail: Callable[[list[Sequence]], None]) -> list[Sequence]:
        """Do the refetches there is time for after a step.

        Args:
            step_seconds: Duration of the step.
            is_anyone_else: Whether requests run that are not paused; all refetches are done where none do.
            fail: Called while the exception is handled that a refetch for some sequences raised.

        Returns:
            Sequences whose search can choose now; they are not paused any more.
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
        """Fetch candidates for the rows of the next search, and for rows beside them that want the same."""
        first, places = self._next_run(max_rows)
        sequences = list(dict.fromkeys(place.sequence for place in places))
        part = slice(first, first + len(places))
        try:
            candidates = self._runner.look(self._rows.tokens[part], self._rows.positions[part], places[0].num_candidates, first)
        except Exception:
            fail(sequences)  # which takes them out of here
            return []
        for i, place in enumerate(places):
            try:
                if (search := self._waiting.get(place.sequence)) is not None:
                    search.look(place.hypothesis, Candidates(candidates.ids[i : i + 1], candidates.log_probs[i : i + 1]))
            except Exception:
                fail([place.sequence])
        able: list[Sequence] = []
        for sequence in sequences:
            search = self._waiting.pop(sequence, None)
            if search is not None and search.wanted:
                self._waiting[sequence] = search  # behind the others
            elif search is not None:
                able.append(sequence)
        return able

    def _next_run(self, max_rows: int) -> tuple[int, list[_Place]]:
        """Return the number of the first row to fetch for, and it with the rows beside it that want as many candidates."""
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
