"""Tokenisers of whatever kind: one side's text to ids and back; special tokens in texts; files read within bounds.

No torch, so that the server can import it.
"""

import codecs
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from msgspec import Meta, Struct

from dragoman.model.errors import InputError
from dragoman.model.files import read_bounded

SPACE: Final = "▁"
UNKNOWN_MARK: Final = "⁇".encode()
MAX_FILE_BYTES: Final = 1 << 26
MAX_ID: Final = (1 << 24) - 1
_MAX_REASON_CHARACTERS: Final = 200
_NAME: Final = re.compile(rf"{SPACE}?(<[^\s<>{SPACE}]+>|\[[^\s\[\]{SPACE}]+\]|>>[^\s<>{SPACE}]+<<)")
Id = Annotated[int, Meta(ge=0, lt=1 << 24)]
Encode = Callable[[str], list[int]]


class TokenizerError(InputError):
    """A tokeniser file that is missing, is damaged, or asks for what is not done here."""


class SpecialToken(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A token by its name."""

    content: Annotated[str, Meta(min_length=1, max_length=1024)]  # the name
    id: Id  # the model's id
    lstrip: bool = False  # white space before the name belongs to it
    rstrip: bool = False  # white space after it does
    space_id: Id | None = None  # token of white space before the name that does not belong to it; None for nothing


class Pieces:
    """Bytes of tokens by id: those at the start of a text, where a space may be taken off, and those after it."""

    def __init__(self, later: Sequence[bytes], first: Mapping[int, bytes], opening: Collection[int]) -> None:
        """Take the table.

        Args:
            later: Bytes that a token adds; none for a silent one. Tokens beyond it only pad a model's vocabulary, and are silent.
            first: Bytes that it adds at the start of a text, where they differ.
            opening: Tokens after which a text is still at its start; those beyond the table are, without being named.
        """
        self._later = list(later)
        self._first = dict(first)
        self._opening = frozenset(opening)

    def later(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text."""
        return self._later[token_id] if token_id < len(self._later) else b""

    def first(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text that is at its start."""
        return self._first[token_id] if token_id in self._first else self.later(token_id)

    def is_opening(self, token_id: int) -> bool:
        """Return whether a text at its start is still there after this token."""
        return token_id in self._opening or token_id >= len(self._later)

    @classmethod
    def without_first_space(cls, later: Sequence[bytes]) -> "Pieces":
        """Return a table whose texts lose one space at their start."""
        first = {i: piece[1:] for i, piece in enumerate(later) if piece.startswith(b" ")}
        return cls(later, first, [i for i, piece in enumerate(later) if not piece])


class Detokenizer:
    """Text of a growing sequence of ids, in pieces that never hold half a character and add up to `Tokenizer.decode` exactly."""

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
        """Return the text held back: U+FFFD for a character that was never completed, or nothing."""
        return self._decoder.decode(b"", final=True)


class Tokenizer(ABC):
    """One side's text.

    Special tokens are not recognised in text: `</s>` typed by a user is four ordinary characters. Only the encoder that `reading`
    returns recognises those that it was given.
    """

    kind: ClassVar[str]  # its name in `text.json`
    vocab_size: int  # all ids it knows are below this
    eos_id: int  # the end-of-sequence token
    _table: Pieces

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts."""
        return list(map(self.encode, texts))

    def reading(self, tokens: Sequence[SpecialToken]) -> Encode:
        """Return an encoder of texts in which the names of these tokens, none of which it knows otherwise, are the tokens."""
        return splitting(tokens, self.encode)

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are silent, and bytes that are not UTF-8 become U+FFFD, one a bad sequence."""
        detokenizer = self.detokenizer()
        return detokenizer.push(ids) + detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 that a token adds to a text; nothing for a special token, or one that only pads a model's vocabulary."""
        return self._table.later(token_id)

    def word_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token in the words of an encoded text; the unknown token is a mark without spaces."""
        return self.token_bytes(token_id)

    def detokenizer(self) -> Detokenizer:
        """Return the start of an empty text."""
        return Detokenizer(self._table)

    def content(self) -> bytes:
        """Return the content of its file; nothing for a kind that has none."""
        return b""

    def settings(self) -> Mapping[str, Any]:
        """Return the constructor's other arguments, to be kept as JSON."""
        return {}


def is_name(piece: str) -> bool:
    """Return whether a token looks like a name rather than like text: `<2de>`, `[MASK]`, `>>fra<<`.

    Typed by a user, names stay the characters they are.
    """
    return _NAME.fullmatch(piece) is not None


def splitting(tokens: Iterable[SpecialToken], encode: Encode) -> Encode:
    """Return a function that encodes a text with these tokens; `encode` is given the text between them.

    Of names that begin at one place the longest counts, as in Transformers.
    """
    named = {token.content: token for token in tokens}
    pattern = re.compile("|".join(map(re.escape, sorted(named, key=len, reverse=True))) or r"(?!)")

    def encode_with_tokens(text: str) -> list[int]:
        ids, end, is_stripped = list[int](), 0, False
        for found in pattern.finditer(text):
            token, between = named[found[0]], text[end : found.start()]
            between = between.lstrip() if is_stripped else between
            between = between.rstrip() if token.lstrip else between
            ids += encode(between)
            if token.space_id is not None and between[-1:].isspace():
                ids.append(token.space_id)
            ids.append(token.id)
            end, is_stripped = found.end(), token.rstrip
        return ids + encode(text[end:].lstrip() if is_stripped else text[end:])

    return encode_with_tokens


def read(path: Path) -> bytes:
    """Return the content of a tokeniser's file.

    Raises:
        TokenizerError: Naming the file, if it cannot be read, is no regular file, or holds more than `MAX_FILE_BYTES`.
    """
    try:
        return read_bounded(path, MAX_FILE_BYTES)
    except OSError as error:
        why = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise TokenizerError(f"{path}: {why}") from error


def reason(error: BaseException) -> str:
    """Return a library's complaint about a file in one printable line; it may quote the file."""
    return " ".join(ascii(str(error))[1:-1].split())[:_MAX_REASON_CHARACTERS]
