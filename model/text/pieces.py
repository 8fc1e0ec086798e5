"""Decoding: the bytes that each token adds to a text, and the text of a growing sequence of tokens.

`pieces_of` reads them off the decoder of a `tokenizers` JSON file; a decoder that does not go token by token is refused by name.
"""

import codecs
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from dragoman.model.text.tokenizer import TokenizerError

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


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
        """Return the text held back: U+FFFD for a character that was never completed, or nothing."""
        return self._decoder.decode(b"", final=True)


def byte_alphabet() -> dict[str, int]:
    """Map the characters that byte-level BPE writes for bytes back to the bytes (GPT-2's table).

    Printable Latin-1 stands for itself; the other bytes, in order, are U+0100 onwards.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(256) if byte not in set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


def pieces_of(decoder: Any, tokens: Sequence[str | None]) -> Pieces:
    """Return the bytes that each token adds to a text.

    Args:
        decoder: The `decoder` of the file, as its JSON has it.
        tokens: By id; None for a silent one.

    Raises:
        TokenizerError: If the decoder is one whose text is not that of its tokens one after another.
    """
    steps = _steps(decoder)
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["Metaspace"]:
        return _metaspace(steps[0], tokens)
    num_cut = 0
    if kinds[-2:] in (["Fuse", "Strip"], ["ByteLevel", "Strip"]):  # else each token would be stripped
        num_cut = _num_cut(steps.pop())
    if steps[-1].get("type") == "Fuse":  # puts tokens together, which changes no text
        steps.pop()
    kinds = [str(step.get("type")) for step in steps]
    if kinds == ["ByteLevel"]:
        write = _byte_level()
    elif kinds and set(kinds) <= {"Replace", "ByteFallback"}:
        write = _written(steps)
    else:
        raise TokenizerError(f"the decoder {_named(decoder)} is not one whose text can be told token by token")
    later = [b"" if token is None else write(token) for token in tokens]
    return Pieces.without_first_space(later) if num_cut else Pieces(later, {}, ())


def _steps(decoder: Any) -> list[Mapping[str, Any]]:
    """Return the steps of a decoder."""
    steps = decoder.get("decoders") if isinstance(decoder, dict) and decoder.get("type") == "Sequence" else [decoder]
    if not isinstance(steps, list) or not steps or not all(isinstance(step, dict) for step in steps):
        raise TokenizerError("there is no decoder, without which the text of tokens is not known")
    return list(steps)


def _named(decoder: Any) -> str:
    """Return the types that a decoder is made of."""
    return "+".join(ascii(step.get("type"))[1:-1][:40] for step in _steps(decoder)[:8])


def _metaspace(step: Mapping[str, Any], tokens: Sequence[str | None]) -> Pieces:
    """Return the pieces of a decoder that writes spaces for a character and drops those of the first token that is not silent."""
    space = step.get("replacement")
    if not isinstance(space, str) or len(space) != 1:
        raise TokenizerError("the decoder Metaspace has no character for spaces")
    is_first_cut = step.get("prepend_scheme", "always" if step.get("add_prefix_space", True) else "never") != "never"
    later = [b"" if token is None else token.replace(space, " ").encode() for token in tokens]
    first = {
        i: token.replace(space, "").encode()
        for i, token in enumerate(tokens)
        if is_first_cut and token is not None and space in token
    }
    return Pieces(later, first, [i for i, token in enumerate(tokens) if token is None])


def _num_cut(step: Mapping[str, Any]) -> int:
    """Return the number of spaces that are taken off the start of a text."""
    if (step.get("content"), step.get("stop")) == (" ", 0) and step.get("start") in (0, 1):
        return int(step["start"])
    raise TokenizerError("the decoder Strip takes off more than one space at the start of a text")


def _byte_level() -> Callable[[str], bytes]:
    """Return a writer of tokens of byte-level characters; a token of others is text as it is."""
    byte_of = byte_alphabet()

    def write(token: str) -> bytes:
        if all(character in byte_of for character in token):
            return bytes(byte_of[character] for character in token)
        return token.encode()

    return write


def _written(steps: Sequence[Mapping[str, Any]]) -> Callable[[str], bytes]:
    """Return a writer of tokens in which strings are replaced, and which may be the name of a byte."""
    replaced: list[tuple[str, str]] = []
    has_bytes = False
    for step in steps:
        if step.get("type") == "ByteFallback":
            has_bytes = True
            continue
        pattern, content = step.get("pattern"), step.get("content")
        wanted = pattern.get("String") if isinstance(pattern, dict) else None
        if not isinstance(wanted, str) or not wanted or not isinstance(content, str):
            raise TokenizerError("the decoder Replace has no string to replace")
        if has_bytes:
            raise TokenizerError("the decoder Replace comes after ByteFallback, when tokens are bytes no more")
        replaced.append((wanted, content))

    def write(token: str) -> bytes:
        for wanted, content in replaced:
            token = token.replace(wanted, content)
        if has_bytes and _BYTE_TOKEN.fullmatch(token):
            return bytes([int(token[3:5], 16)])
        return token.encode()

    return write
