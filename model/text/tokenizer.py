"""What a tokeniser does, of whatever kind: one side's text to ids and back. No torch, so that the server can import it."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

from dragoman.model.errors import InputError
from dragoman.model.text.special_tokens import Encode, SpecialToken

UNKNOWN_MARK: Final = "⁇".encode()


class TokenizerError(InputError):
    """A tokeniser file that is missing, is damaged, or asks for what is not done here."""


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

    Special tokens are not recognised in text: `</s>` typed by a user is four ordinary characters. What `reading` returns recognises
    those that it was given.
    """

    @property
    def kind(self) -> str:
        """What `text.json` calls it."""
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
        """Return what encodes a text in which the names of these tokens, none of which it knows otherwise, are the tokens."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of ids; special tokens are silent, and bytes that are not UTF-8 become U+FFFD, one a bad sequence."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """Return what a token adds to a text, in UTF-8; nothing for a special token, or one that only pads a model's vocabulary."""
        ...

    def word_bytes(self, token_id: int) -> bytes:
        """Return what a token is to the words of an encoded text: its bytes, and for what is unknown a mark without spaces."""
        ...

    def detokenizer(self) -> Detokenizer:
        """Return the start of an empty text."""
        ...

    def content(self) -> bytes:
        """Return the file that it is kept in; nothing for a kind that has none."""
        ...

    def settings(self) -> Mapping[str, Any]:
        """Return what it was made of beside the file, to be kept as JSON: the constructor's arguments."""
        ...
