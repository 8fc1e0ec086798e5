"""Documents of callers: their kind by the extension, their texts, and the documents written again with translations."""

import re
from typing import Literal, NamedTuple

from msgspec import Struct

from dragoman.server.errors import InvalidRequest
from dragoman.server.service.formats.catalogs import read_po, read_xliff
from dragoman.server.service.formats.fragments import Fragments, Reader, decoded, too_many_characters
from dragoman.server.service.formats.office import READERS
from dragoman.server.service.formats.subtitles import read_srt, read_vtt
from dragoman.server.service.languages import shown

MAX_NAME_CHARACTERS = 255
_UNDECODED = re.compile("[\ud800-\udfff]")
_OPEN_XML = "application/vnd.openxmlformats-officedocument"


class Kind(NamedTuple):
    """A kind of documents; without a reader the whole is one text with the markup."""

    media_type: str
    read: Reader | None = None
    markup: Literal["none", "html"] = "none"


KINDS = {
    "txt": Kind("text/plain; charset=utf-8"),
    **dict.fromkeys(("htm", "html"), Kind("text/html", markup="html")),
    "srt": Kind("application/x-subrip", read_srt),
    "vtt": Kind("text/vtt", read_vtt),
    "docx": Kind(f"{_OPEN_XML}.wordprocessingml.document", READERS["docx"]),
    "pptx": Kind(f"{_OPEN_XML}.presentationml.presentation", READERS["pptx"]),
    "xlsx": Kind(f"{_OPEN_XML}.spreadsheetml.sheet", READERS["xlsx"]),
    "odt": Kind("application/vnd.oasis.opendocument.text", READERS["odt"]),
    "po": Kind("text/x-gettext-translation", read_po),
    **dict.fromkeys(("xliff", "xlf"), Kind("application/xliff+xml", read_xliff)),
}


class Imported(Struct, frozen=True):
    """A document as it came, and its texts; `num_characters` of these without our own tags."""

    kind: str
    content: bytes
    texts: list[str]
    markup: str
    num_characters: int
    max_characters: int

    @property
    def keep_placeholders(self) -> bool:
        """Whether the texts are a program's."""
        return KINDS[self.kind].read in (read_po, read_xliff)

    def written(self, translations: list[str], language: str) -> bytes:
        """Return the document with translations of its texts; raise `InvalidRequest` for damage that is found now.

        It is read once more, as its tree takes many times its size, and documents wait.
        """
        read = KINDS[self.kind].read
        if read is None:
            [text] = translations
            return text.encode(errors="replace")
        fragments = Fragments(self.max_characters)
        write = read(self.content, fragments)
        fragments.translate(translations)
        return write(language)


def imported(filename: str, content: bytes, max_characters: int) -> Imported:
    """Return a document with its texts, of which there may be none.

    Raises:
        InvalidRequest: If it is blank, of another kind, damaged, or no UTF-8.
        DocumentTooLarge: If the texts together have more than `max_characters`.
    """
    _, _, kind = filename.lower().rpartition(".")
    if not content.strip():
        raise InvalidRequest("file", "is missing or blank")
    if kind not in KINDS:
        raise InvalidRequest("file", f"documents of the kind {shown(kind)} are not translated; those of {', '.join(KINDS)} are")
    if _UNDECODED.search(filename) is not None or len(filename) > MAX_NAME_CHARACTERS:
        raise InvalidRequest("file", f"has a name that is no UTF-8, or has more than {MAX_NAME_CHARACTERS} characters")
    _, read, markup = KINDS[kind]
    if read is None:
        text = decoded(content)
        if len(text) > max_characters:
            raise too_many_characters(max_characters)
        return Imported(kind, content, [text], markup, len(text), max_characters)
    fragments = Fragments(max_characters)
    read(content, fragments)
    markup = "html" if fragments.has_tags else "none"
    return Imported(kind, content, fragments.texts, markup, fragments.num_characters, max_characters)


def media_type(filename: str) -> str:
    """Return the media type of a document that was imported."""
    return KINDS[filename.lower().rpartition(".")[2]].media_type
