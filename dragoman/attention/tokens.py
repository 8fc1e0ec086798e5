"""Tokens as they are shown: white space, what has no shape, and bytes that are no character can be seen."""

import unicodedata
from typing import Final

SPACE: Final = "␣"
MAX_CHARACTERS: Final = 24
_NAMED: Final = {"\n": "\\n", "\r": "\\r", "\t": "\\t"}
# Categories of Unicode that are not drawn, or change how the text beside them is: controls, formats, separators, surrogates,
# private use, and what is not assigned.
_UNSEEN: Final = {"Cc", "Cf", "Cs", "Co", "Cn", "Zs", "Zl", "Zp"}


def token(piece: bytes, special: str) -> str:
    """Return what stands for a token.

    Args:
        piece: What it adds to a text, in UTF-8; may be a part of a character, and is empty for a special token.
        special: Name of the token, should it be a special one.
    """
    if not piece:
        return f"⟨{special}⟩"
    shown = "".join(map(_seen, piece.decode("utf-8", "surrogateescape")))
    return shown if len(shown) <= MAX_CHARACTERS else f"{shown[: MAX_CHARACTERS - 1]}…"


def line(text: str) -> str:
    """Return a text with everything in it to be seen but ordinary spaces."""
    return "".join(character if character == " " else _seen(character) for character in text)


def _seen(character: str) -> str:
    if character == " ":
        return SPACE
    if character in _NAMED:
        return _NAMED[character]
    if "\udc80" <= character <= "\udcff":  # a byte, as surrogateescape has it
        return f"<0x{ord(character) - 0xDC00:02X}>"
    if unicodedata.category(character) in _UNSEEN:
        return f"<U+{ord(character):04X}>"
    return f"◌{character}" if unicodedata.combining(character) else character
