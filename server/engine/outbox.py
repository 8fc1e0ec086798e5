"""What an engine has to say, gathered by front end until the iteration is over."""

from collections import defaultdict
from collections.abc import Iterable

from dragoman.server.engine.messages import Finished, Report, Shrunk, Statistics, Tokens
from dragoman.server.engine.sequence import Sequence


class Outbox:
    """Tokens and ends since the last `take`."""

    def __init__(self) -> None:
        self._tokens: defaultdict[bytes, list[Tokens]] = defaultdict(list)
        self._finished: defaultdict[bytes, list[Finished]] = defaultdict(list)
        self._shrunk: defaultdict[bytes, list[Shrunk]] = defaultdict(list)

    @property
    def has_news(self) -> bool:
        """Whether there is something since the last `take`."""
        return bool(self._tokens or self._finished)

    def add_tokens(self, sequence: Sequence, token_ids: list[int]) -> None:
        """Report tokens of a streamed request."""
        self._tokens[sequence.origin].append(Tokens(sequence.request.id, token_ids))

    def add_finished(self, sequence: Sequence, finished: Finished) -> None:
        """Report an end."""
        self._finished[sequence.origin].append(finished)

    def add_shrunk(self, sequence: Sequence) -> None:
        """Report how many slots are left to a request that needs fewer; nobody waits to be told."""
        self._shrunk[sequence.origin].append(Shrunk(sequence.request.id, sequence.num_slots))

    def take(self, running: Iterable[Sequence], statistics: Statistics) -> dict[bytes, Report]:
        """Return a report for each front end that has news or something running, and forget the news."""
        origins = self._tokens.keys() | self._finished.keys() | {sequence.origin for sequence in running}
        return {
            origin: Report(
                self._tokens.pop(origin, []), self._finished.pop(origin, []), statistics, shrunk=self._shrunk.pop(origin, [])
            )
            for origin in origins
        }
