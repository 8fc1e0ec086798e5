"""Sources that are encoded before there is a slot for them: which, how many, and what is kept of them until there is one.

The encoder runs for a source that has a slot; while others wait for one, those next in line are encoded in the same batch, for one
batch takes much less than two. Nothing is encoded that would not be soon, no run is made for it alone, and a batch grows only until
another source would hardly make it cheaper, so that nobody stalls for long.
"""

from collections.abc import Callable
from collections.abc import Sequence as Ordered

import structlog

from dragoman.server.engine.sequence import Sequence
from dragoman.server.runtime.runner import Held, Holder

log = structlog.get_logger("dragoman.engine")

MAX_BYTES = 2**26
"""Memory that what is kept may take."""


class Ahead:
    """What has been encoded of waiting sequences.

    Attributes:
        num_bytes: Memory it takes.
    """

    def __init__(self, max_requests: int, good_tokens: int, max_bytes: int = MAX_BYTES) -> None:
        """Start with nothing.

        Args:
            max_requests: Sequences to keep something of, at the most; 0 to encode nothing ahead.
            good_tokens: Tokens a batch has at the most that sources are added to.
            max_bytes: Memory that what is kept may take.
        """
        self._max_requests, self._good_tokens, self._max_bytes = max_requests, good_tokens, max_bytes
        self._held: dict[Sequence, Held] = {}
        self._refused: set[Sequence] = set()
        self._token_bytes = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        """Return how many sequences something is kept of."""
        return len(self._held)

    def __contains__(self, sequence: Sequence) -> bool:
        """Tell whether a sequence has been encoded."""
        return sequence in self._held

    def company(self, admitted: Ordered[Sequence], next_in_line: Callable[[int], list[Sequence]]) -> list[Sequence]:
        """Return the waiting sequences to encode with some that have their slots; forget those that have been overtaken.

        Args:
            admitted: Those that have to be encoded.
            next_in_line: Tells about so many of those whose turn is next.
        """
        budget = self._good_tokens - sum(sequence.num_source_tokens for sequence in admitted)
        if not self._max_requests or budget <= 0:
            return []
        line = next_in_line(self._max_requests)
        for sequence in self._held.keys() - set(line):
            self.take(sequence)
        chosen: list[Sequence] = []
        num_bytes = self.num_bytes
        for sequence in line:
            needed = self._token_bytes * sequence.num_source_tokens
            is_known = sequence in self._held or sequence in self._refused
            if is_known or sequence.num_source_tokens > budget or num_bytes + needed > self._max_bytes:
                continue
            chosen.append(sequence)
            budget -= sequence.num_source_tokens
            num_bytes += needed
        return chosen

    def encode(self, holder: Holder, group: Ordered[Sequence]) -> dict[Sequence, Held] | None:
        """Encode a batch; keep what is of waiting sequences, return the others'.

        Where it fails, those that wait are not tried again, and fail nobody: it is as if they had not been in it. So it is also
        with what there is no memory for, which is known when the first batch is encoded.
        """
        waiting = [sequence for sequence in group if sequence.admitted is None]
        try:
            encoded = dict(zip(group, holder.encode([sequence.request.source_ids for sequence in group]), strict=True))
        except Exception as error:
            log.warning("sources cannot be encoded ahead", num_requests=len(waiting), reason=f"{type(error).__name__}: {error}")
            self._refused.update(waiting)
            return None
        for sequence in waiting:
            held = encoded.pop(sequence)
            self._token_bytes = held.nbytes // sequence.num_source_tokens
            if self.num_bytes + held.nbytes <= self._max_bytes:
                self._held[sequence] = held
                self.num_bytes += held.nbytes
        return encoded

    def take(self, sequence: Sequence) -> Held | None:
        """Give away what is kept of a sequence, if anything is; it has got its slot, or will not."""
        self._refused.discard(sequence)
        held = self._held.pop(sequence, None)
        if held is not None:
            self.num_bytes -= held.nbytes
        return held
