"""What the engine asks of whatever computes: encode sources into rows, decode one token for every row, copy rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dragoman.server.engine.search.candidates import Candidates

Numbers = NDArray[np.number[Any]]


@dataclass(frozen=True, slots=True)
class Held:
    """An encoded source that is in no row yet: what a decoder reads of it, in memory of its own.

    Attributes:
        tokens: `[S, …]`, for each token what all caches with an axis of source positions have of it, side by side.
        states: What the other caches have of the source, side by side.
    """

    tokens: Numbers
    states: Numbers

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return self.tokens.nbytes + self.states.nbytes


class Holder(Protocol):
    """A runner that can encode sources before there are rows for them."""

    def encode(self, sources: Sequence[Sequence[int]]) -> list[Held]:
        """Encode sources (end-of-sequence included) as one batch, each into memory of its own."""
        ...

    def place(self, held: Sequence[Held], rows: Sequence[int]) -> None:
        """Put encoded sources into rows, which are then as `Runner.prefill` leaves them, to the last bit."""
        ...


class Reader(Protocol):
    """A runner whose sources are prompts: it reads them piece by piece into rows, between steps that other rows take.

    A row of which a prompt is being read may be stepped with the others at position 0, which changes nothing of what it has read.
    """

    def read(self, row: int, source_ids: Sequence[int], first: int, stop: int) -> None:
        """Read tokens `[first, stop)` of a prompt into a row that has read those before; the first call begins with 0.

        What is read is the same to the last bit in whichever pieces. Of an empty prompt, and of one of which nothing is to be read
        yet, `[0, 0)` is read.
        """
        ...


class Graphs(Protocol):
    """What a runner knows of steps that are captured on a device, to be replayed."""

    @property
    def is_disabled(self) -> bool:
        """Whether steps that should be replayed are not, for a capture has failed."""
        ...

    @property
    def has_pending(self) -> bool:
        """Whether there is something left to capture."""
        ...

    def capture_next(self) -> None:
        """Capture one more step; call it while no row holds anything."""
        ...


class Runner(Protocol):
    """One loaded model with its caches. Used from one thread.

    Attributes:
        device: Name of what computes.
        max_rows: Rows of the decode batch at the most.
        holder: Itself, if it can encode sources ahead of rows; None if it cannot.
        reader: What reads prompts into its rows; None if sources are encoded.
        graphs: Its captured steps; None if it has none.
        memory: How it divides a device's memory, bytes of each part; nothing if it has none to divide.
    """

    device: str
    max_rows: int

    @property
    def memory(self) -> Mapping[str, int]: ...

    @property
    def holder(self) -> Holder | None: ...

    @property
    def reader(self) -> Reader | None: ...

    @property
    def graphs(self) -> Graphs | None: ...

    def prefill(self, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Put what a decoder reads of sources into rows: encoded as one batch, end-of-sequence included, or, of prompts, read."""
        ...

    def step(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Candidates:
        """Decode one token for rows `[0, N)`.

        Args:
            tokens: `[N]`, each row's previous token.
            positions: `[N]`, its position, which is the number of tokens the row has been fed after its source.
            num_candidates: K.

        Returns:
            Candidates `[N, K]`, in buffers that the next step of as many candidates overwrites. The same step may be done
            again, with another K.
        """
        ...

    def look(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int) -> Candidates:
        """Do a part of the last step again with more candidates: rows `[first_row, first_row + N)`, which were fed the same then.

        Returns:
            Candidates `[N, K]`, in memory of their own.
        """
        ...

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy a row's source, and what caches have of the first `length` positions after it, to another row."""
        ...

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy what caches that steps write have of positions `[start, stop)` of a row to another, which has the same source."""
        ...

    def cache_bytes(self) -> tuple[int, int]:
        """Return how much memory the caches have, and how much of it the rows take that were in use at the last step."""
        ...
