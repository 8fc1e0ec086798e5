"""Interface of tokenisers, of whatever kind: one side's text to ids and back; special tokens in texts; files read within bounds.

No torch, so that the server can import it.
"""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

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


class Detokenizer(Protocol):
    """Text of a growing sequence of ids, in pieces that never hold half a character and add up to `Tokenizer.decode` exactly."""

    def push(self, ids: Iterable[int]) -> str:
        """Add ids and return the text that is now certain; a character still incomplete waits for its last byte."""
        ...

    def finish(self) -> str:
        """Return what was held back: U+FFFD for a character that was never completed, or nothing."""
        ...


class Tokenizer(Protocol):
    """One side's text.

    Special tokens are not recognised in text: `</s>` typed by a user is four ordinary characters. Only the encoder that `reading`
    returns recognises those that it was given.
    """

    @property
    def kind(self) -> str:
        """Its name in `text.json`."""
        ...

    @property
    def vocab_size(self) -> int:
        """All ids it knows are below this."""
        ...

    @property
    def eos_id(self) -> int:
        """The end-of-sequence token."""
        ...

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, without special tokens."""
        ...

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Encode many texts."""
        ...

    def reading(self, tokens: Sequence[SpecialToken]) -> Encode:
        """Return an encoder of texts in which the names of these tokens, none of which it knows otherwise, are the tokens."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are silent, and bytes that are not UTF-8 become U+FFFD, one a bad sequence."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return the UTF-8 that a token adds to a text; nothing for a special token, or one that only pads a model's vocabulary."""
        ...

    def word_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token in the words of an encoded text; the unknown token is a mark without spaces."""
        ...

    def detokenizer(self) -> Detokenizer:
        """Return the start of an empty text."""
        ...

    def content(self) -> bytes:
        """Return the content of its file; nothing for a kind that has none."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """Return the constructor's other arguments, to be kept as JSON."""
        ...


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
