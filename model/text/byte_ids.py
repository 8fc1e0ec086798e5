"""Bytes as tokens, as ByT5 has them: special tokens first, then the 256 bytes."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from dragoman.model.text.pieces import PieceDetokenizer, Pieces
from dragoman.model.text.special_tokens import Encode, SpecialToken, splitting
from dragoman.model.text.tokenizer import TokenizerError

MAX_SPECIAL_TOKENS = 1 << 16


class ByteTokenizer:
    """UTF-8, each byte a token; all other ids are silent."""

    kind = "bytes"

    def __init__(self, eos_id: int = 1, offset: int = 3, num_extra: int = 125) -> None:
        """Say where the bytes are.

        Args:
            eos_id: The end-of-sequence token.
            offset: The id of byte 0: so many special tokens come before it.
            num_extra: Silent tokens after byte 255.

        Raises:
            TokenizerError: If a number is out of range.
        """
        if not (0 <= offset <= MAX_SPECIAL_TOKENS and 0 <= num_extra <= MAX_SPECIAL_TOKENS):
            raise TokenizerError(f"{offset} and {num_extra} special tokens; at most {MAX_SPECIAL_TOKENS} are allowed")
        self.vocab_size = offset + 256 + num_extra
        if not 0 <= eos_id < self.vocab_size or offset <= eos_id < offset + 256:
            raise TokenizerError(f"eos_id {eos_id} is not that of a special token")
        self.eos_id, self._offset, self._num_extra = eos_id, offset, num_extra
        silent = [*range(offset), *range(offset + 256, self.vocab_size)]
        table = [b""] * offset + [bytes([byte]) for byte in range(256)] + [b""] * num_extra
        self._table = Pieces(table, {}, silent)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        return [byte + self._offset for byte in text.encode()]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts."""
        return list(map(self.encode, texts))

    def reading(self, tokens: Sequence[SpecialToken]) -> Encode:
        """Return what encodes a text with these tokens."""
        return splitting(tokens, self.encode)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are silent, and bytes that are not UTF-8 become U+FFFD, one a bad sequence."""
        return self._table.decode(ids)

    def token_bytes(self, token_id: int) -> bytes:
        """Return the byte of a token; nothing for a special one."""
        return self._table.later(token_id)

    def word_bytes(self, token_id: int) -> bytes:
        """Return `token_bytes`: nothing is unknown."""
        return self.token_bytes(token_id)

    def detokenizer(self) -> PieceDetokenizer:
        """Return the start of an empty text."""
        return self._table.detokenizer()

    def content(self) -> bytes:
        """Return nothing: there is no file."""
        return b""

    def settings(self) -> Mapping[str, Any]:
        """Return what it was made of."""
        return {"eos_id": self.eos_id, "offset": self._offset, "num_extra": self._num_extra}
