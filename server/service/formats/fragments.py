"""Texts of a document with their inline content: HTML whose tags are numbers, as `tags.py` places them in a translation.

`<g1>…</g1>` is around words, `<wbr 2>` stands for what is kept as it is; both are of a fragment's items. All else is escaped text.
HTML has inline elements of any name; in XML they would be told by the text beside them.
"""

import html
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Literal, TypeVar

from dragoman.server.errors import InvalidRequest

# Each text is prepared on the event loop, for microseconds, and each line of a text file is read in about as long.
MAX_TEXTS, MAX_LINES = 20_000, 150_000

T = TypeVar("T")
Event = tuple[Literal["text", "open", "close", "kept"], str, T | None]
_LINE = re.compile(r"[^\r\n]*+(?:\r\n|\r|\n)|[^\r\n]+")
_TAG = re.compile(r"<(/?)(g|wbr )(\d+)>")


class DocumentTooLarge(InvalidRequest):
    """A document has more texts, or characters in them, than are translated at once."""


class Fragment(Generic[T]):
    """A text with inline content."""

    def __init__(self, text: str = "") -> None:
        self.translation = ""  # in HTML
        self._text, self._html = list[str](), list[str]()
        self._items, self._open, self._paired = list[T](), list[int](), set[int]()
        self.add(text)

    @property
    def text(self) -> str:
        """The text without tags."""
        return "".join(self._text)

    @property
    def html(self) -> str:
        """The text with tags."""
        return "".join(self._html)

    @property
    def has_words(self) -> bool:
        """Whether there is something to translate; models do not keep numbers alone as they are."""
        return any(map(str.isalpha, self.text))

    @property
    def has_tags(self) -> bool:
        """Whether there is more than text."""
        return bool(self._items)

    @property
    def is_changed(self) -> bool:
        """Whether the translation differs."""
        return self.translation != self.html

    def add(self, text: str) -> None:
        """Add a text."""
        self._text.append(text)
        self._html.append(html.escape(text, quote=False))

    def open(self, item: T) -> None:
        """Begin an element."""
        self._open.append(len(self._items))
        self._html.append(f"<g{len(self._items)}>")
        self._items.append(item)

    def close(self) -> None:
        """End the innermost element."""
        self._html.append(f"</g{self._open.pop()}>")

    def keep(self, item: T, *, is_paired: bool = False) -> None:
        """Add what is kept; those that are paired, as starts with ends, keep their order."""
        if is_paired:
            self._paired.add(len(self._items))
        self._html.append(f"<wbr {len(self._items)}>")
        self._items.append(item)

    def translated(self) -> Iterator[Event[T]]:
        """Yield the translation's texts, and the tags between them with their items."""
        paired = iter(sorted(self._paired))
        position = 0
        for found in [*_TAG.finditer(self.translation), None]:
            text = self.translation[position : found.start() if found else None]
            if text:
                yield "text", html.unescape(text), None
            if found:
                number, position = int(found[3]), found.end()
                if found[2] != "g":
                    yield "kept", "", self._items[next(paired) if number in self._paired else number]
                else:
                    yield "close" if found[1] else "open", "", self._items[number]


class Fragments:
    """The fragments of a document that have words, in order."""

    def __init__(self, max_characters: int) -> None:
        self._max_characters, self._size, self._num_parts = max_characters, 0, 0
        self._all = list[Fragment[object]]()

    def add(self, fragment: "Fragment[T]") -> bool:
        """Take a fragment if it has words, and return whether it has; raise `DocumentTooLarge`."""
        if not fragment.has_words:
            return False
        self._size += len(fragment.html)
        if self._size > self._max_characters:
            raise too_many_characters(self._max_characters)
        if len(self._all) == MAX_TEXTS:
            raise DocumentTooLarge("file", f"has more than {MAX_TEXTS} texts")
        self._all.append(fragment)  # type: ignore[arg-type]
        return True

    def count(self, num_parts: int) -> None:
        """Count elements that are read, of which there are as many as characters at most; raise `DocumentTooLarge`."""
        self._num_parts += num_parts
        if self._num_parts > self._max_characters:
            raise DocumentTooLarge("file", f"has more than {self._max_characters} elements in its paragraphs")

    @property
    def has_tags(self) -> bool:
        """Whether any has more than text; otherwise all are plain."""
        return any(fragment.has_tags for fragment in self._all)

    @property
    def texts(self) -> list[str]:
        """The fragments, in HTML if any has tags."""
        return [fragment.html for fragment in self._all] if self.has_tags else [fragment.text for fragment in self._all]

    @property
    def num_characters(self) -> int:
        """The number of characters without tags."""
        return sum(len(fragment.text) for fragment in self._all)

    def translate(self, translations: Sequence[str]) -> None:
        """Give each its translation, in the form of `texts`."""
        has_tags = self.has_tags
        for fragment, translation in zip(self._all, translations, strict=True):
            fragment.translation = translation if has_tags else html.escape(translation, quote=False)


# Reads a document's fragments; the function returned writes the document with translations into the language that is given.
Reader = Callable[[bytes, Fragments], Callable[[str], bytes]]


def too_many_characters(most: int) -> DocumentTooLarge:
    """Return the error of a document whose texts are too long."""
    return DocumentTooLarge("file", f"more than {most} characters, max_text_characters of the server")


def decoded(content: bytes) -> str:
    """Return a text file's text; raise `InvalidRequest` if it is not UTF-8."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        raise InvalidRequest("file", "is no UTF-8") from None


def lines_of(content: bytes) -> list[str]:
    """Return a text file's lines with their ends; raises as `decoded`, and `DocumentTooLarge`."""
    if content.count(b"\n") + content.count(b"\r") > MAX_LINES:
        raise DocumentTooLarge("file", f"has more than {MAX_LINES} lines")
    return _LINE.findall(decoded(content))
