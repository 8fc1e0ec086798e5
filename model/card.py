"""A checkpoint's card, its `README.md`: what it tells people, and the two lines that programs read."""

import re
import unicodedata
from collections.abc import Iterator
from pathlib import Path

from dragoman.model.errors import InputError

CARD_FILE = "README.md"
MAX_DOMAIN_CHARACTERS = 200

MAX_CARD_BYTES = 1 << 16
"""Bytes of a card that are read."""

# Of a line that may be the one: what is looked at.
_MAX_LINE_CHARACTERS = 1000
_DOMAIN = re.compile(r"[*_]{0,2}domain[*_]{0,2}:[*_]{0,2}[ \t]+(\S.*)", re.IGNORECASE)
_ONE_SENTENCE = re.compile(r"[*_]{0,2}sentences[*_]{0,2}:[*_]{0,2}[ \t]+one at a time\b", re.IGNORECASE)
_LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")
_TAG = re.compile(r"<[^>]*>")
_MARKS = re.compile(r"[*`<>]|(?<!\w)_+|_+(?!\w)")


class CardError(InputError):
    """A card that is there and cannot be read."""


def read_card(directory: Path) -> str:
    """Return the text of a checkpoint's card, at most `MAX_CARD_BYTES` of it; empty if there is none.

    Raises:
        CardError: If the card cannot be read.
    """
    path = directory / CARD_FILE
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            content = file.read(MAX_CARD_BYTES)
    except OSError as error:
        raise CardError(f"{path}: {error.strerror}") from error
    text = content.decode("utf-8-sig", errors="replace")  # replacements of invalid bytes are longer than the bytes
    return text.encode()[:MAX_CARD_BYTES].decode(errors="ignore")


def domain_of(card: str) -> str:
    """Return what text a model knows, in the words of its card.

    That is the first line `Domain: ...` that says something, in its front matter or in its text but not in a block of code, as
    `plain` makes it; empty if there is no such line.
    """
    found = (_DOMAIN.match(line[:_MAX_LINE_CHARACTERS]) for line in _lines(card))
    return next((domain for match in found if match and (domain := plain(match[1]))), "")


def is_of_one_sentence(card: str) -> bool:
    """Return whether a card says that its model knows one sentence at a time: whether it has a line `Sentences: one at a time`."""
    return any(_ONE_SENTENCE.match(line[:_MAX_LINE_CHARACTERS]) for line in _lines(card))


def _lines(text: str) -> Iterator[str]:
    """Yield the lines outside blocks of code."""
    is_code = False
    for line in text.splitlines():
        if line.startswith("```"):
            is_code = not is_code
        elif not is_code:
            yield line


def plain(text: str) -> str:
    """Return text as one line of at most `MAX_DOMAIN_CHARACTERS`, without quotes around it, markup, controls or writing direction.

    What has no letter or digit is nothing.
    """
    text = _TAG.sub(" ", _LINK.sub(r"\1", text))
    text = "".join(" " if char.isspace() else char for char in text if char.isspace() or unicodedata.category(char)[0] != "C")
    text = " ".join(_MARKS.sub("", text).split())
    while len(text) > 1 and text[0] == text[-1] and text[0] in "\"'":
        text = text[1:-1].strip()
    if len(text) > MAX_DOMAIN_CHARACTERS:
        text = text[: MAX_DOMAIN_CHARACTERS - 1].rpartition(" ")[0] or text[: MAX_DOMAIN_CHARACTERS - 1]
        text = text.rstrip() + "…"
    return text if any(map(str.isalnum, text)) else ""
