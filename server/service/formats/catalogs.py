"""Catalogs of programs' texts: gettext's PO and XLIFF. Untranslated and fuzzy units are filled and marked for review, others stay.

`translate-toolkit` and `polib` wrap and order lines anew, in 50 µs a unit, and the first may not be shipped under our license.
"""

import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

from lxml.etree import _Element as Element

from dragoman.server.errors import InvalidRequest
from dragoman.server.service.formats.fragments import Fragment, Fragments, lines_of
from dragoman.server.service.formats.paragraphs import Dialect, Paragraph, parsed, serialized

# Of a unit: three for its source, and one for each plural form, of which no language has more than six.
MAX_FORMS = 16
_FIELD = re.compile(r'(msgctxt|msgid_plural|msgid|msgstr(?:\[\d+\])?)?\s*"((?:[^"\\]|\\.)*+)"\s*')
_CHARSET = re.compile(r"charset=([\w:-]+)")
_ESCAPES = {"a": "\a", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t", "v": "\v", '"': '"', "\\": "\\"}
_ESCAPED = {character: f"\\{name}" for name, character in _ESCAPES.items()}
_ESCAPE, _TO_ESCAPE = re.compile(r"\\(.)"), re.compile('[\a\b\f\n\r\t\v"\\\\]')


@dataclass(slots=True)
class _Unit:
    """An entry of a PO file, with numbers of lines."""

    flags: int = -1
    first: int = -1  # line that is no comment
    texts: dict[str, list[str]] = field(default_factory=dict)
    lines: dict[str, tuple[int, int]] = field(default_factory=dict)


class _Filled(NamedTuple):
    first: int
    end: int
    name: str
    fragment: Fragment[None]


def read_po(content: bytes, fragments: Fragments) -> Callable[[str], bytes]:
    """Read a PO file; as a `Reader`."""
    lines = lines_of(content)
    filled, fuzzy = list[_Filled](), dict[int, bool]()  # by line: whether it has flags
    for unit in _units(lines):
        text, is_fuzzy = _joined(unit, "msgid"), unit.flags >= 0 and "fuzzy" in re.split(r"[,\s]+", lines[unit.flags])
        if not text and "msgctxt" not in unit.texts:
            found = _CHARSET.search(_joined(unit, "msgstr"))
            if found and found[1].lower() not in ("utf-8", "utf8", "us-ascii", "ascii", "charset"):
                raise InvalidRequest("file", "is no UTF-8, by its charset")
            continue
        names = [name for name in unit.texts if name.startswith("msgstr")]
        if not is_fuzzy and any(_joined(unit, name) for name in names):
            continue
        forms = Fragment[None](text), Fragment[None](_joined(unit, "msgid_plural"))
        is_plural = [bool(forms[1].text) and (name != "msgstr[0]" or len(names) == 1) for name in names]
        added = [fragments.add(forms[number]) if number in is_plural else False for number in range(2)]
        filled += (_Filled(*unit.lines[name], name, forms[one]) for name, one in zip(names, is_plural, strict=True) if added[one])
        if any(added) and not is_fuzzy:
            fuzzy[unit.flags if unit.flags >= 0 else unit.first] = unit.flags >= 0

    def write(_: str) -> bytes:
        end = "\r\n" if lines[0].endswith("\r\n") else "\n"
        changed = dict[int, str]()
        for first, stop, name, fragment in filled:
            text = "".join(part for _, part, _ in fragment.translated())
            changed |= dict.fromkeys(range(first, stop), "")
            changed[first] = _field(name, text, end)
        for number, has_flags in fuzzy.items():
            line = lines[number]
            changed[number] = f"#, fuzzy,{line[2:]}" if has_flags else f"#, fuzzy{end}{line}"
        return "".join(changed.get(number, line) for number, line in enumerate(lines)).encode(errors="replace")

    return write


def _units(lines: list[str]) -> Iterator[_Unit]:
    """Yield the entries; raise `InvalidRequest` for a line that is no part of one."""
    unit, name = _Unit(), ""
    for number, line in enumerate(lines):
        line = line.strip().removeprefix("\ufeff")
        is_flags = line.startswith("#,")
        if not line or (line.startswith("#") and not is_flags):
            continue
        found = None if is_flags else _FIELD.fullmatch(line)
        begun = found[1] if found else ""
        if name.startswith("msgstr") and begun is not None and not begun.startswith("msgstr"):
            yield unit
            unit, name = _Unit(), ""
        if is_flags:
            unit.flags = number
            continue
        name, is_continued = begun or name, begun is None
        if found is None or not name or (name in unit.texts) is not is_continued or len(unit.texts) > MAX_FORMS:
            raise InvalidRequest("file", f"has a line {number + 1} that is none of a PO file")
        unit.first = number if unit.first < 0 else unit.first
        unit.texts.setdefault(name, []).append(found[2])
        unit.lines[name] = unit.lines.get(name, (number, 0))[0], number + 1
    if "msgid" in unit.texts:
        yield unit


def _joined(unit: _Unit, name: str) -> str:
    return _ESCAPE.sub(lambda found: _ESCAPES.get(found[1], found[0]), "".join(unit.texts.get(name, ())))


def _field(name: str, text: str, end: str) -> str:
    """Return the lines of a text, each of which ends where one of the text does."""
    lines = [_TO_ESCAPE.sub(lambda found: _ESCAPED[found[0]], line) for line in re.findall(r"[^\n]*\n|[^\n]+", text)]
    if len(lines) == 1:
        return f'{name} "{lines[0]}"{end}'
    return "".join([f'{name} ""{end}', *(f'"{line}"{end}' for line in lines)])


_XLIFF = Dialect(
    frozenset(("", "urn:oasis:names:tc:xliff:document:1.1", "urn:oasis:names:tc:xliff:document:1.2"))
    | {f"urn:oasis:names:tc:xliff:document:2.{minor}" for minor in range(3)},
    inline=frozenset(("g", "mrk", "pc")),
    paired=frozenset(("bpt", "ept", "bx", "ex", "sc", "ec", "sm", "em")),
)
# By the first digit of the version: elements with a source and a target, states of those to fill, and the state of a filled one.
_UNITS = {
    "1": (("trans-unit",), ("new", "needs-translation", "needs-adaptation", "needs-l10n"), "needs-review-translation"),
    "2": (("segment",), ("initial",), "translated"),
}


def read_xliff(content: bytes, fragments: Fragments) -> Callable[[str], bytes]:
    """Read XLIFF 1.2 or 2; as a `Reader`."""
    root = parsed(content)
    version = root.get("version", "")[:1]
    if _XLIFF.name(root) != "xliff" or version not in _UNITS:
        raise InvalidRequest("file", "is no XLIFF of version 1 or 2")
    names, states, filled = _UNITS[version]
    paragraphs = list[Paragraph]()
    for unit in _XLIFF.all(root, names):
        children = {_XLIFF.name(child): child for child in unit}
        source, old = children.get("seg-source", children.get("source")), children.get("target")
        state = (unit if version == "2" or old is None else old).get("state")
        has_text = old is not None and bool("".join(old.itertext()).strip())
        if source is None or not _is_translated(unit) or (has_text and state not in states):
            continue
        target = deepcopy(source)
        target.attrib.clear()
        target.attrib.update({} if old is None else old.attrib)
        target.tag = source.tag.replace("seg-source", "target").replace("source", "target")
        paragraph = Paragraph(target, _XLIFF)
        if not paragraph.read(fragments):
            continue
        paragraphs.append(paragraph)
        (unit if version == "2" else target).set("state", filled)
        if old is None:
            target.tail = source.tail
            unit.insert(unit.index(source) + 1, target)
        else:
            target.tail = old.tail
            unit.replace(old, target)

    def write(language: str) -> bytes:
        for paragraph in paragraphs:
            paragraph.write()
        attribute = "trgLang" if version == "2" else "target-language"
        for element in ([root] if version == "2" else _XLIFF.all(root, ("file",))) if paragraphs else ():
            element.set(attribute, element.get(attribute, language))
        return serialized(root)

    return write


def _is_translated(unit: Element) -> bool:
    outer = (each for each in (unit, *unit.iterancestors()) if each.get("translate"))
    return unit.get("approved") != "yes" and next((each.get("translate") != "no" for each in outer), True)
