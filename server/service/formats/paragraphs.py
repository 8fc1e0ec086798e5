"""Paragraphs of XML documents: the content of an element as fragments, and their translations in its place.

Texts lie in the paragraph itself and its inline elements (OpenDocument, XLIFF), or in runs, each with properties of its own (Office
Open XML). Runs with the properties of most of a paragraph's text are its text, others are elements of a fragment; translations get
runs of their own. What is neither text nor an inline element is moved as it is.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple

from lxml import etree
from lxml.etree import _Element as Element

from dragoman.server.errors import InvalidRequest
from dragoman.server.service.formats.fragments import DocumentTooLarge, Fragment, Fragments
from dragoman.server.service.markup import NOT_IN_XML

# Of a tree, each of which takes up to 250 bytes.
MAX_NODES = 1_000_000
_SPACE = "{http://www.w3.org/XML/1998/namespace}space"


@dataclass(frozen=True)
class Dialect:
    """Names of elements in a kind of XML; those of other namespaces are moved as they are."""

    namespaces: Set[str]
    paragraphs: Sequence[str] = ()
    inline: Set[str] = frozenset()
    wrapped: Set[str] = frozenset()  # inline, with their content in a child of the name and "Content"
    breaks: Set[str] = frozenset()  # which end a text, and a word inside of inline elements
    paired: Set[str] = frozenset()  # starts and ends, which keep their order
    dropped: Set[str] = frozenset()  # from a translated paragraph: what is true of its words only
    unread: Set[str] = frozenset()  # of any namespace, with the paragraphs inside
    run: str = ""
    text: str = ""
    ignored: Set[str] = frozenset()  # properties of runs that tell none from another
    preserves_space: bool = True  # by an attribute of its own

    def name(self, element: Element) -> str:
        """Return an element's local name; empty if it is none of the dialect's."""
        if not isinstance(element.tag, str):
            return ""
        namespace, _, name = element.tag.rpartition("}")
        return name if namespace[1:] in self.namespaces else ""

    def is_inline(self, element: Element) -> bool:
        """Return whether an element's content is a part of its paragraph."""
        is_kept = element.get("translate") == "no" or element.get("mtype") == "protected"
        return self.name(element) in self.inline and not is_kept

    def all(self, root: Element, names: Iterable[str]) -> Iterator[Element]:
        """Yield the elements of these names, without those inside of unread ones."""
        for element in root.iter(*(f"{{{space}}}{name}" if space else name for space in self.namespaces for name in names)):
            if not self.unread or not any(outer.tag.rpartition("}")[2] in self.unread for outer in element.iterancestors()):
                yield element


class _Kept(NamedTuple):
    """An element that is moved as it is, which may be a part of a run."""

    element: Element
    run: Element | None


class _Text(NamedTuple):
    text: str
    run: Element | None = None  # which it is a part of
    properties: tuple[object, ...] = ()  # that distinguish the run


class _Inner(NamedTuple):
    """An inline element, and the element in it that has its content."""

    outer: Element
    content: Element


@dataclass(slots=True)
class _Element:
    """An element of a fragment: a run's text, or an inline element."""

    run: Element | None  # of the text in it
    inner: _Inner | None = None


_Item = _Element | list[_Kept]
_Part = _Text | _Inner | list[_Kept]


@dataclass(slots=True)
class Paragraph:
    """A paragraph; `kept_runs` are not its text."""

    content: Element
    dialect: Dialect
    kept_runs: Set[Element] = frozenset()
    parts: "list[Fragment[_Item] | list[_Kept]]" = field(default_factory=list)
    _run: Element | None = None  # of most text

    def read(self, fragments: Fragments) -> bool:
        """Find the fragments, add them, and return whether there are any."""
        fragments.count(1 + int(self.content.xpath("count(descendant::*)")))
        parts = self._parts(self.content)
        while len(parts) == 1 and isinstance(inner := parts[0], _Inner):
            self.content = inner.content
            parts = self._parts(self.content)
        usual, fragment = _usual(parts), Fragment[_Item]()
        self._run = usual.run
        self.parts = [fragment]
        for part in parts:
            if isinstance(part, list) and self._has_break(part):
                fragment = Fragment()
                self.parts += [part, fragment]
            else:
                self._add(part, usual, fragment)
        added = [fragments.add(part) for part in self.parts if isinstance(part, Fragment)]
        return any(added)

    def write(self) -> None:
        """Put the translations in place, unless all are as the source."""
        if not any(isinstance(part, Fragment) and part.has_words and part.is_changed for part in self.parts):
            return
        last = self._clear(self.content)
        for part in self.parts:
            if isinstance(part, Fragment):
                if not part.has_words:
                    part.translation = part.html
                self._fill(part)
            else:
                self._move(self.content, part)
        self.content.extend(last)

    def _parts(self, content: Element) -> list[_Part]:
        """Return an element's texts, inline elements, and what is kept between them."""
        found, dialect = list[_Part](), self.dialect

        def keep(kept: _Kept) -> None:
            if found and isinstance(found[-1], list):
                found[-1].append(kept)
            else:
                found.append([kept])

        if not dialect.run and content.text:
            found.append(_Text(content.text))
        for child in content:
            name = dialect.name(child)
            inner = child.find(f"{child.tag}Content") if name in dialect.wrapped else child if dialect.is_inline(child) else None
            if inner is not None:
                found.append(_Inner(child, inner))
            elif name == dialect.run and name and child not in self.kept_runs:
                properties = _properties(child, dialect)
                for each in child:
                    if dialect.name(each) == dialect.text:
                        found.append(_Text(each.text or "", child, properties))
                    elif not dialect.name(each).endswith("Pr") and dialect.name(each) not in dialect.dropped:
                        keep(_Kept(each, child))
            elif name == dialect.text and name:
                found.append(_Text(child.text or ""))
            elif name not in dialect.dropped and not (dialect.run and name.endswith("Pr")):
                keep(_Kept(child, None))
            if not dialect.run and child.tail:
                found.append(_Text(child.tail))
        return found

    def _add(self, part: _Part, usual: _Text, fragment: Fragment[_Item]) -> None:
        """Add a part to a fragment, inside of an element with this usual text."""
        if isinstance(part, list):
            is_break = self._has_break(part)
            if is_break:
                fragment.add(" ")
            fragment.keep(part, is_paired=any(self._names(kept) & self.dialect.paired for kept in part))
            if is_break:
                fragment.add(" ")
        elif isinstance(part, _Inner):
            parts = self._parts(part.content)
            usual = _usual(parts)
            fragment.open(_Element(usual.run, part))
            for each in parts:
                self._add(each, usual, fragment)
            fragment.close()
        elif part.properties != usual.properties and part.text.strip():
            fragment.open(_Element(part.run))
            fragment.add(part.text)
            fragment.close()
        else:
            fragment.add(part.text)

    def _names(self, kept: _Kept) -> Set[str]:
        return {self.dialect.name(kept.element), *(self.dialect.name(child) for child in kept.element)}

    def _has_break(self, part: Sequence[_Kept]) -> bool:
        return any(self.dialect.name(kept.element) in self.dialect.breaks for kept in part)

    def _clear(self, content: Element) -> list[Element]:
        """Empty an element but for its properties, and return those that come last."""
        last, is_run = list[Element](), bool(self.dialect.run)
        if not is_run:
            content.text = None
        for child in list(content):
            name = self.dialect.name(child)
            if not is_run or not name.endswith("Pr") or name in self.dialect.dropped:
                content.remove(child)
            elif name.startswith("end"):
                last.append(child)
        return last

    def _fill(self, fragment: Fragment[_Item]) -> None:
        """Append a translation to the content."""
        places = [(self.content, self._run)]
        for kind, text, item in fragment.translated():
            content, run = places[-1]
            if kind == "text":
                self._append(content, run, NOT_IN_XML.sub("\ufffd", text))
            elif kind == "close":
                places.pop()
            elif isinstance(item, list):
                self._move(content, item)
            elif item is not None and item.inner is None:
                places.append((content, item.run))
            elif item is not None and item.inner is not None:
                self._clear(item.inner.content)
                item.inner.outer.tail = None
                content.append(item.inner.outer)
                places.append((item.inner.content, item.run))

    def _append(self, content: Element, run: Element | None, text: str) -> None:
        if not self.dialect.run:
            if len(content):
                content[-1].tail = (content[-1].tail or "") + text
            else:
                content.text = (content.text or "") + text
            return
        place = content if run is None else _copy(run, content)
        space = place.tag.rpartition("}")[0]
        element = etree.SubElement(place, f"{space}}}{self.dialect.text}")
        element.text = text
        if self.dialect.preserves_space:
            element.set(_SPACE, "preserve")

    @staticmethod
    def _move(content: Element, part: Sequence[_Kept]) -> None:
        place, source = content, None
        for element, run in part:
            if run is None:
                place = content
            elif run is not source:
                place = _copy(run, content)
            source = run
            element.tail = None
            place.append(element)


def _copy(run: Element, content: Element) -> Element:
    """Append a run with the same properties."""
    copy = etree.SubElement(content, run.tag, run.attrib)
    copy.extend(deepcopy(child) for child in run if isinstance(child.tag, str) and child.tag.endswith("}rPr"))
    return copy


def _usual(parts: Iterable[_Part]) -> _Text:
    """Return a text with the properties that most characters have."""
    sizes, found = Counter[tuple[object, ...]](), dict[tuple[object, ...], _Text]()
    for part in parts:
        if isinstance(part, _Text) and part.text.strip():
            sizes[part.properties] += len(part.text)
            found.setdefault(part.properties, part)
    return found[max(sizes, key=lambda key: sizes[key])] if sizes else _Text("")


def _properties(run: Element, dialect: Dialect) -> tuple[object, ...]:
    """Return what distinguishes a run's properties from those of others."""
    found = next((child for child in run if dialect.name(child) == "rPr"), None)
    if found is None:
        return ()
    attributes = (pair for pair in found.items() if pair[0] not in dialect.ignored)
    children = (child for child in found if dialect.name(child) not in dialect.ignored)
    parts = ((part.tag, *part.items()) for child in children for part in child.iter())
    return (*attributes, *parts)


def parsed(content: bytes) -> Element:
    """Return the root of a document in XML; raise `InvalidRequest` if it is malformed or has a DOCTYPE."""
    if content.count(b"<") + content.count(b"=") > MAX_NODES:
        raise DocumentTooLarge("file", f"has more than {MAX_NODES} elements and attributes in a part")
    parser = etree.XMLParser(resolve_entities=False, load_dtd=False, no_network=True, huge_tree=False, strip_cdata=False)
    try:
        root = etree.fromstring(content, parser)
    except (etree.XMLSyntaxError, ValueError):
        raise InvalidRequest("file", "has XML that is not well-formed, or nested too deeply") from None
    if root.getroottree().docinfo.doctype:
        raise InvalidRequest("file", "has XML with a DOCTYPE, which is refused")
    return root


def serialized(root: Element) -> bytes:
    """Return a document as XML, in its own encoding."""
    about = root.getroottree().docinfo
    found: bytes = etree.tostring(
        root.getroottree(), xml_declaration=True, encoding=about.encoding or "UTF-8", standalone=about.standalone or None
    )
    return found
