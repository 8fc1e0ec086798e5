"""Office documents: Office Open XML and OpenDocument, ZIP archives with XML. Other members are copied as they are.

Names of members are compared and written, and never are paths of files.
"""

import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from io import BytesIO
from typing import NamedTuple

from lxml.etree import _Element as Element

from dragoman.server.errors import InvalidRequest
from dragoman.server.service.formats.fragments import Fragments
from dragoman.server.service.formats.paragraphs import Dialect, Paragraph, parsed, serialized

# Limits of an archive: members, bytes of all when inflated, and of those that are parsed, whose trees are many times as large.
MAX_MEMBERS, MAX_BYTES, MAX_PARSED_BYTES = 4096, 64 * 2**20, 8 * 2**20
# First bytes of the container of encrypted documents, and of those of before 2007.
_COMPOUND_FILE = b"\xd0\xcf\x11\xe0"
_DAMAGED = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, OSError, NotImplementedError, RuntimeError, ValueError)
# Complex fields whose result is text of the document.
_READ_FIELDS, MAX_INSTRUCTION = ("HYPERLINK", "TOC"), 16


class _Kind(NamedTuple):
    """A kind of office document: its members with texts, which may be read only if they have a word, and its elements."""

    members: re.Pattern[str]
    dialect: Dialect


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


def _namespaces(name: str, strict: str) -> frozenset[str]:
    return frozenset((f"http://schemas.openxmlformats.org/{name}/2006/main", f"http://purl.oclc.org/ooxml/{strict}/main"))


_WORD = Dialect(
    _namespaces("wordprocessingml", "wordprocessingml"),
    ("p",),
    inline=_names("hyperlink ins moveTo smartTag bdo dir"),
    wrapped=_names("sdt"),
    breaks=_names("tab br cr ptab"),
    paired=_names(
        "bookmarkStart bookmarkEnd commentRangeStart commentRangeEnd fldChar moveFromRangeStart moveFromRangeEnd moveToRangeStart"
        " moveToRangeEnd permStart permEnd"
    ),
    dropped=_names("proofErr lastRenderedPageBreak"),
    run="r",
    text="t",
    ignored=_names("lang noProof"),
)
_DRAWING = Dialect(
    _namespaces("drawingml", "drawingml"),
    ("p",),
    breaks=_names("br"),
    run="r",
    text="t",
    ignored=_names("lang altLang dirty err noProof smtClean"),
    preserves_space=False,
)
_SHEET = Dialect(_namespaces("spreadsheetml", "spreadsheetml"), ("si", "is"), dropped=_names("rPh phoneticPr"), run="r", text="t")
_TEXT = Dialect(
    frozenset(("urn:oasis:names:tc:opendocument:xmlns:text:1.0",)),
    ("p", "h"),
    inline=_names("span a meta"),
    breaks=_names("tab line-break s"),
    paired=_names("bookmark-start bookmark-end reference-mark-start reference-mark-end"),
    dropped=_names("soft-page-break"),
    unread=_names("tracked-changes annotation"),
)
_KINDS = {
    "docx": _Kind(re.compile(r"word/(?:document|header|footer|footnotes|endnotes)\d*\.xml"), _WORD),
    "pptx": _Kind(re.compile(r"ppt/(?:slides/slide|notesSlides/notesSlide)\d+\.xml"), _DRAWING),
    "xlsx": _Kind(re.compile(r"xl/(?:sharedStrings|worksheets/[^/]+)\.xml"), _SHEET),
    "odt": _Kind(re.compile(r"(?:content|styles)\.xml"), _TEXT),
}
_TABLE = re.compile(r"xl/tables/[^/]+\.xml")


def read_office(name: str, content: bytes, fragments: Fragments) -> Callable[[str], bytes]:
    """Read a document of a kind; as a `Reader`."""
    if content.startswith(_COMPOUND_FILE):
        raise InvalidRequest("file", "is encrypted, or of a format of before 2007")
    kind = _KINDS[name]
    with _opened(content) as archive:
        wanted = [info for info in archive.infolist() if kind.members.fullmatch(info.filename) or _TABLE.match(info.filename)]
        if sum(info.file_size for info in wanted) > MAX_PARSED_BYTES:
            raise InvalidRequest("file", f"has texts and their forms of more than {MAX_PARSED_BYTES} bytes")
        members = {info.filename: archive.read(info) for info in wanted}
    tables = {member: members.pop(member) for member in list(members) if not kind.members.fullmatch(member)}
    if not members:
        raise InvalidRequest("file", f"is no {name} document, or is encrypted")
    columns = {column.get("name") for table in tables.values() for column in parsed(table).iter("{*}tableColumn")}
    found = dict[str, tuple[Element, list[Paragraph]]]()
    for member, data in members.items():
        if member.startswith("xl/worksheets/") and b"inlineStr" not in data:
            continue
        root = parsed(data)
        kept = _kept_runs(root) if kind.dialect is _WORD else set[Element]()
        paragraphs = (Paragraph(element, kind.dialect, kept) for element in kind.dialect.all(root, kind.dialect.paragraphs))
        # Formulas name columns of tables, whose heads have to be the same.
        texts = (each for each in paragraphs if not columns or "".join(each.content.itertext()) not in columns)
        found[member] = root, [paragraph for paragraph in texts if paragraph.read(fragments)]

    def write(_: str) -> bytes:
        written = dict[str, bytes]()
        for member, (root, paragraphs) in found.items():
            for paragraph in paragraphs:
                paragraph.write()
            if paragraphs:
                written[member] = serialized(root)
        return _rewritten(content, written)

    return write


READERS = {name: partial(read_office, name) for name in _KINDS}


@contextmanager
def _opened(content: bytes) -> Iterator[zipfile.ZipFile]:
    """Open an archive; raise `InvalidRequest` if it is damaged, encrypted or too large."""
    try:
        with zipfile.ZipFile(BytesIO(content)) as archive:
            infos = archive.infolist()
            if len(infos) > MAX_MEMBERS or sum(info.file_size for info in infos) > MAX_BYTES:
                raise InvalidRequest("file", f"has more than {MAX_MEMBERS} members, or {MAX_BYTES} bytes when it is inflated")
            if any(info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for info in infos):
                raise InvalidRequest("file", "is compressed by another method than Deflate")
            if len({info.filename for info in infos}) < len(infos):
                raise InvalidRequest("file", "has two members of one name")
            if any(info.flag_bits & 1 for info in infos):
                raise InvalidRequest("file", "is encrypted")
            yield archive
    except _DAMAGED:
        raise InvalidRequest("file", "is no ZIP archive, or is damaged") from None


def _rewritten(content: bytes, members: dict[str, bytes]) -> bytes:
    """Return an archive with other content of members; their order stays, as OpenDocument's first is its media type."""
    output = BytesIO()
    with _opened(content) as archive, zipfile.ZipFile(output, "w") as copy:
        for info in archive.infolist():
            data = members.get(info.filename)
            copied = zipfile.ZipInfo(info.filename, info.date_time)
            for field in ("compress_type", "create_system", "external_attr", "internal_attr", "comment"):
                setattr(copied, field, getattr(info, field))
            copy.writestr(copied, archive.read(info) if data is None else data)
    return output.getvalue()


def _kept_runs(root: Element) -> set[Element]:
    """Return the runs of complex fields, but for the text that those of `_READ_FIELDS` show."""
    kept, num_unread = set[Element](), 0
    fields = list[tuple[str, bool]]()  # instructions of those not yet ended, and whether their text is read
    for run in _WORD.all(root, ("r",)):
        is_kept = num_unread > 0
        for child in run:
            name, (instruction, is_read) = _WORD.name(child), fields[-1] if fields else ("", False)
            if name == "instrText" and fields:
                fields[-1] = (instruction + (child.text or "").lstrip())[:MAX_INSTRUCTION], is_read
            elif name == "fldChar":
                kind, is_kept = child.get(child.tag.replace("fldChar", "fldCharType")), True
                if kind == "begin":
                    fields.append(("", False))
                    num_unread += 1
                elif fields and kind == "separate" and not is_read and instruction.upper().startswith(_READ_FIELDS):
                    fields[-1] = instruction, True
                    num_unread -= 1
                elif fields and kind == "end":
                    fields.pop()
                    num_unread -= not is_read
        if is_kept or num_unread:
            kept.add(run)
    return kept
