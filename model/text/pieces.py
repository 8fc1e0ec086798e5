"""What each token adds to a text, and the text of a growing sequence of them: decoding for every kind of tokeniser but our own."""

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence


class Pieces:
    """Bytes of tokens by id: those at the start of a text, where a space may be taken off, and those after it."""

    def __init__(self, later: Sequence[bytes], first: Mapping[int, bytes], opening: Collection[int]) -> None:
        """Take the table.

        Args:
            later: What a token adds; nothing for one that is silent. What lies beyond it only pads a model's vocabulary and is
                silent too.
            first: What it adds at the start of a text, where that is something else.
            opening: Tokens after which a text is still at its start; silent ones beyond the table are among them of themselves.
        """
        self._later = list(later)
        self._first = dict(first)
        self._opening = frozenset(opening)

    def __len__(self) -> int:
        """Return how many tokens the table has."""
        return len(self._later)

    def later(self, token_id: int) -> bytes:
        """Return what a token adds to a text."""
        return self._later[token_id] if token_id < len(self._later) else b""

    def first(self, token_id: int) -> bytes:
        """Return what a token adds to a text that is at its start."""
        return self._first[token_id] if token_id in self._first else self.later(token_id)

    def is_opening(self, token_id: int) -> bool:
        """Whether a text at its start is still there after this token."""
        return token_id in self._opening or token_id >= len(self._later)

    def detokenizer(self) -> "PieceDetokenizer":
        """Return the start of an empty text."""
        return PieceDetokenizer(self)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids."""
        detokenizer = self.detokenizer()
        return detokenizer.push(ids) + detokenizer.finish()


class PieceDetokenizer:
    """Text of a growing sequence of ids, in pieces that never hold half a character and add up to `Pieces.decode` exactly."""

    def __init__(self, pieces: Pieces) -> None:
        """Start an empty text."""
        self._pieces = pieces
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._is_at_start = True

    def push(self, ids: Iterable[int]) -> str:
        """Add ids and return the text that is now certain; a character still incomplete waits for its last byte."""
        pieces, added = self._pieces, []
        for token_id in ids:
            if self._is_at_start:
                added.append(pieces.first(token_id))
                self._is_at_start = pieces.is_opening(token_id)
            else:
                added.append(pieces.later(token_id))
        return self._decoder.decode(b"".join(added))

    def finish(self) -> str:
        """Return what was held back: U+FFFD for a character that was never completed, or nothing."""
        return self._decoder.decode(b"", final=True)
