"""What the engine asks of whatever puts what a decoder reads of sources into their rows."""

from collections.abc import Callable, Collection
from collections.abc import Sequence as Ordered
from typing import Protocol

from dragoman.server.engine.messages import Prefill
from dragoman.server.engine.sequence import Sequence


class Filling(Protocol):
    """Fills rows, at once or over several iterations.

    Attributes:
        done: What was done since the last report.
    """

    done: list[Prefill]

    @property
    def unfilled(self) -> Collection[Sequence]:
        """Running sequences whose rows are not filled yet; `fill` is to be called in every iteration while there are any."""
        ...

    @property
    def num_unread_tokens(self) -> int | None:
        """Source tokens that are still to be read of these; None where every source is encoded at once."""
        ...

    def fill(self, admitted: Ordered[Sequence], next_in_line: Callable[[int], list[Sequence]]) -> list[Sequence]:
        """Do an iteration's part of the work; return the sequences whose rows are filled now.

        Args:
            admitted: Sequences that have just got their rows.
            next_in_line: Tells about so many of those that wait whose turn is next.
        """
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop what there is of a sequence, which has ended."""
        ...
