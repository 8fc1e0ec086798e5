"""Searches that could not choose from the candidates of a step, and the wider looks at its rows that they wait for.

A plain step sees few candidates of every row. The few searches for which these are not enough are paused: their rows are fed the
same tokens again in the next steps, which writes what is in their caches already, while the others go on. Looks at more candidates
are taken of those rows alone, a few at a time, and as long as others run for no more than a share of the engine's time. Pausing
changes no answer: what a search sees depends on itself alone.
"""

from collections.abc import Callable
from dataclasses import dataclass

from dragoman.server.engine.allowance import Allowance
from dragoman.server.engine.rows import Rows
from dragoman.server.engine.search.search import Search
from dragoman.server.engine.sequence import Sequence
from dragoman.server.runtime.runner import Candidates, Runner

SHARE = 1 / 2
"""Of the engine's time, that looks may take while others run: as long as the steps themselves."""

ROWS_AT_ONCE = 4
"""Rows of a look while others run, at the most."""

MAX_CANDIDATES_AT_ONCE = 2**21
"""Of all rows of a look together: 24 MiB."""


@dataclass(frozen=True, slots=True)
class Place:
    """A row that is waited for.

    Attributes:
        sequence: Whose it is.
        hypothesis: Index of the row's hypothesis.
        num_candidates: K that is wanted.
    """

    sequence: Sequence
    hypothesis: int
    num_candidates: int


class Looks:
    """Who waits for a look, in turn."""

    def __init__(self, runner: Callable[[], Runner], rows: Rows, clock: Callable[[], float]) -> None:
        self._runner, self._rows, self._clock = runner, rows, clock
        self._waiting: dict[Sequence, Search] = {}
        self._allowance = Allowance(SHARE)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._waiting

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence, search: Search) -> None:
        """Let a search wait that could not choose."""
        self._waiting[sequence] = search

    def discard(self, sequence: Sequence) -> None:
        """Forget a search, if it is there: its request has ended."""
        self._waiting.pop(sequence, None)

    def hold(self) -> None:
        """Feed the rows that wait what they were fed in the last step."""
        for sequence, search in self._waiting.items():
            for row, hypothesis in zip(sequence.rows, search.live, strict=True):
                self._rows.feed_again(row, hypothesis.token_ids)

    def take(self, step_seconds: float, *, is_anyone_else: bool, fail: Callable[[list[Sequence]], None]) -> list[Sequence]:
        """Take the looks there is time for after a step.

        Args:
            step_seconds: How long the step took.
            is_anyone_else: Whether requests run that do not wait for a look; all looks are taken where none do.
            fail: Called while the exception is handled that a look of some sequences raised.

        Returns:
            Sequences whose search can choose now; they do not wait any more.
        """
        allowance = self._allowance
        if is_anyone_else:
            allowance.earn(step_seconds)
        else:
            allowance.clear()
        able: list[Sequence] = []
        while self._waiting and (allowance.is_open or not is_anyone_else):
            started = self._clock()
            able += self._look(ROWS_AT_ONCE if is_anyone_else else len(self._rows.tokens), fail)
            if is_anyone_else:
                allowance.spend(self._clock() - started)
        return able

    def _look(self, max_rows: int, fail: Callable[[list[Sequence]], None]) -> list[Sequence]:
        """Look at the rows of the one whose turn it is, and at those beside them that want the same."""
        first, places = self._next_run(max_rows)
        sequences = list(dict.fromkeys(place.sequence for place in places))
        part = slice(first, first + len(places))
        try:
            candidates = self._runner().look(self._rows.tokens[part], self._rows.positions[part], places[0].num_candidates, first)
        except Exception:
            fail(sequences)  # which takes them out of here
            return []
        for i, place in enumerate(places):
            try:
                self._show(place, Candidates(candidates.ids[i : i + 1], candidates.log_probs[i : i + 1]))
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

    def _show(self, place: Place, candidates: Candidates) -> None:
        if (search := self._waiting.get(place.sequence)) is not None:
            search.look(place.hypothesis, candidates)

    def _next_run(self, max_rows: int) -> tuple[int, list[Place]]:
        """Return rows side by side that want as many candidates, from the one whose turn it is on: its number, and all."""
        places = {
            sequence.rows[hypothesis]: Place(sequence, hypothesis, count)
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
