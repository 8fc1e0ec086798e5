"""Decoders of `tokenizers` JSON files as the bytes of each token; one that does not go token by token is refused by name."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dragoman.model.text.tokenizer import Pieces, TokenizerError

_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


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
