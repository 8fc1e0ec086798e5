"""Outcomes of a batch in the order of its requests, and how far it may be read ahead of them."""

from collections.abc import Generator, Iterator
from contextlib import closing

from dragoman.client.batch import Outcome
from dragoman.client.results import Result


class InOrder:
    """Results by their places: each waits for those before it.

    Attributes:
        max_ahead: Requests that may be read and not given out.
        num_read: Requests read; whoever reads them counts.

    Args:
        concurrency: Requests under way at once; twice as many may be read ahead, so that a slow one does not leave others idle.
    """

    def __init__(self, concurrency: int) -> None:
        self.max_ahead = 2 * concurrency
        self._outcomes: dict[int, Outcome] = {}
        self._num_given = 0
        self.num_read = 0

    @property
    def has_room(self) -> bool:
        """Whether another request may be read."""
        return self.num_read - self._num_given < self.max_ahead

    def results(self, outcomes: Generator[Outcome, None, None]) -> Generator[Result, None, None]:
        """Yield the results of outcomes in order, up to the first failure, and end them.

        Raises:
            CallError: As `put`.
        """
        with closing(outcomes):
            for outcome in outcomes:
                yield from self.put(outcome)

    def put(self, outcome: Outcome) -> Iterator[Result]:
        """Take an outcome in; yield the results that are next now.

        Raises:
            CallError: If the next one is a failure.
        """
        self._outcomes[outcome.index] = outcome
        while (found := self._outcomes.pop(self._num_given, None)) is not None:
            if found.error is not None:
                raise found.error
            assert found.result is not None
            self._num_given += 1
            yield found.result
