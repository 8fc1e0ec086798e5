"""Runner interface: encode sources into rows, decode one token for every row, copy rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

if TYPE_CHECKING:
    from dragoman.server.runtime.alignment import Aligner


class Candidates(Struct, frozen=True, eq=False):
    """The K likeliest next tokens of N rows; independent of K and of the other rows.

    Attributes:
        ids: `[N, K]` int64, likeliest first, the lower id first in a tie.
        log_probs: `[N, K]` float32, natural logarithms over the whole vocabulary; zeros if 0 candidates were asked for.
        all_log_probs: N arrays `[V]` float32, of all tokens by id, until the next step; None if the runner has candidates alone.
    """

    ids: NDArray[np.int64]
    log_probs: NDArray[np.float32]
    all_log_probs: list[NDArray[np.float32]] | None = None

    def of(self, rows: Sequence[int], num_candidates: int) -> "Candidates":
        """Return the first `num_candidates` of `rows`, in this order; may share memory."""
        chosen = slice(rows[0], rows[0] + 1) if len(rows) == 1 else list(rows)
        everything = None if self.all_log_probs is None else [self.all_log_probs[row] for row in rows]
        return Candidates(self.ids[chosen, :num_candidates], self.log_probs[chosen, :num_candidates], everything)

    def kept(self, num_candidates: int) -> "Candidates":
        """Return a copy of the first `num_candidates`."""
        return Candidates(self.ids[:, :num_candidates].copy(), self.log_probs[:, :num_candidates].copy())


Numbers = NDArray[np.number[Any]]


@dataclass(frozen=True, slots=True)
class Held:
    """An encoded source in no row yet: its cross-attention caches in separate memory.

    `tokens` `[S, …]` are the concatenated numbers of all caches with an axis of source positions, `states` those of the others.
    """

    tokens: Numbers
    states: Numbers

    @property
    def nbytes(self) -> int:
        return self.tokens.nbytes + self.states.nbytes


class Holder(Protocol):
    """Encoding of sources before rows are free."""

    def encode(self, sources: Sequence[Sequence[int]]) -> list[Held]:
        """Encode sources (end-of-sequence included) as one batch, each into its own memory."""

    def place(self, held: Sequence[Held], rows: Sequence[int]) -> None:
        """Put encoded sources into rows, bit-identical to `Runner.prefill`."""


class Reader(Protocol):
    """Chunked prefill of prompts, between steps of other rows.

    A row whose prompt is being read may be stepped with the others at position 0, which changes nothing that was read.
    """

    def read(self, row: int, source_ids: Sequence[int], first: int, stop: int) -> None:
        """Read tokens `[first, stop)` of a prompt into a row that has read the tokens before; the first call begins with 0.

        The result does not depend on the pieces. `[0, 0)` is valid, for an empty prompt or to begin one.
        """


class Graphs(Protocol):
    """Captured steps of a device."""

    @property
    def is_disabled(self) -> bool:
        """Whether graphs were given up after a failed capture."""

    @property
    def has_pending(self) -> bool:
        """Whether shapes are left to capture."""

    def capture_next(self) -> None:
        """Capture one more step; only while all rows are empty."""


class Runner(Protocol):
    """A loaded model with its caches, used from one thread; `holder`, `reader`, `aligner` and `graphs` are None if unsupported."""

    device: str
    max_rows: int
    can_skip_log_probs: bool  # whether `step` takes a K of 0

    @property
    def memory(self) -> Mapping[str, int]: ...

    @property
    def holder(self) -> Holder | None: ...

    @property
    def reader(self) -> Reader | None: ...

    @property
    def aligner(self) -> "Aligner | None": ...

    @property
    def graphs(self) -> Graphs | None: ...

    def prefill(self, sources: Sequence[Sequence[int]], rows: Sequence[int]) -> None:
        """Encode sources (end-of-sequence included) into rows as one batch, or read prompts into them."""

    def step(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int) -> Candidates:
        """Decode one token for rows `[0, N)`; a step may be run again with another K.

        `tokens` `[N]` are each row's previous token, `positions` `[N]` the number of tokens decoded before. Returns candidates
        `[N, K]` in buffers that the next step with this K overwrites; K = 0 is for the likeliest without its log-probability.
        """

    def refetch(self, tokens: NDArray[np.int64], positions: NDArray[np.int64], num_candidates: int, first_row: int) -> Candidates:
        """Run rows `[first_row, first_row + N)` of the last step again with more candidates, in separate memory."""

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copy a row's source and the first `length` positions after it to another row."""

    def copy_positions(self, source: int, target: int, start: int, stop: int) -> None:
        """Copy positions `[start, stop)` of a row's self-attention caches to another row with the same source."""

    def rest(self) -> None:
        """Take note that no run follows until there is another request."""

    def cache_bytes(self) -> tuple[int, int]:
        """Return the bytes reserved for caches, and those used by rows of the last step."""
