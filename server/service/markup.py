"""Texts of HTML and XML: blocks of plain text to translate, and the markup around and inside them.

All markup is copied from the source, never written again, so that quotes, case, comments and white space stay as they are. Block
elements end a block, inline ones become ranges of its words (`tags.py`). In XML an element is inline if there is text beside it, or
beside an element around it. Not translated are comments, CDATA, elements with `translate="no"` or the class `notranslate`, and
`UNTOUCHED` elements of HTML.
"""

import html
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Literal
from xml.parsers import expat

# The tokenizer of the HTML standard, in linear time and with offsets: html.parser is quadratic on unclosed tags and does not know
# `<title>` or `<!-->`; lxml, selectolax and html5lib lose the source of tags. Its trees are not needed.
from turbohtml import Token, TokenType, tokenize

from dragoman.server.errors import InvalidRequest
from dragoman.server.service.languages import shown
from dragoman.server.service.tags import Block, Element, Kept, Raw, Translated

KINDS = ("html", "xml", "none")
READ_ATTRIBUTES = frozenset(("alt", "aria-label", "placeholder", "title"))
# Elements of HTML that end a block, first those that end a paragraph; others are inline.
_END_PARAGRAPHS = frozenset(
    re.findall(
        r"\w+",
        "address article aside blockquote center dd details dialog dir div dl dt fieldset figcaption figure footer form h1 h2 h3"
        " h4 h5 h6 header hgroup hr li listing main menu nav ol p plaintext pre search section summary table ul xmp",
    )
)
_BLOCKS = _END_PARAGRAPHS.union(
    re.findall(
        r"\w+",
        "audio body br button canvas caption col colgroup frame frameset head html label legend noframes noscript object optgroup"
        " option select tbody td template tfoot th thead title tr video",
    )
)
_VOID = frozenset(re.findall(r"\w+", "area base basefont bgsound br col embed frame hr img input link meta param source track wbr"))
# Untouched elements without text of their sentence, and others whose text the model copies.
_HIDDEN = frozenset(re.findall(r"\w+", "iframe listing math noembed noframes plaintext pre script style svg template textarea xmp"))
UNTOUCHED = _HIDDEN | {"code", "kbd", "samp", "tt", "var"}
# By start tag: elements whose end tags it implies.
_PARAGRAPH = frozenset(("p",))
_ITEMS, _CELLS, _ROWS = _PARAGRAPH | {"dd", "dt"}, _PARAGRAPH | {"td", "th"}, _PARAGRAPH | {"td", "th", "tr"}
_ENDED_BY = {
    **dict.fromkeys(_END_PARAGRAPHS, _PARAGRAPH),
    "li": _PARAGRAPH | {"li"},
    "option": frozenset(("option",)),
    **dict.fromkeys(("dd", "dt"), _ITEMS),
    **dict.fromkeys(("td", "th"), _CELLS),
    "tr": _ROWS,
    **dict.fromkeys(("tbody", "tfoot", "thead"), _ROWS | {"tbody", "tfoot", "thead"}),
}
_SPACE = " \t\n\r\f"
_SPACES, _LINE_END = re.compile(rf"[{_SPACE}]+"), re.compile(r"\r\n?|\n")
_CHARACTER = re.compile(r"\r\n|.", re.DOTALL)
_ATTRIBUTE = re.compile(r"""[\s/]*+([^\s/>=][^\s/>=]*+)(?:\s*+=\s*+("[^"]*+"|'[^']*+'|[^\s>]++))?""")
NOT_IN_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PROLOG = re.compile(r"\ufeff?\s*+<(?:\?xml\s|!DOCTYPE)")
# Each attempt at a match ends at white space or begins where a word does: the time is linear.
PLACEHOLDER = re.compile(
    r"""
    (?<![\w.+-])[\w.+-]++@[\w-]++(?:\.[\w-]++)+ # mail address
    | (?<!\w)(?:(?:https?|ftp)://|www\.)[^\s<>"]*[^\s<>".,;:!?)\]}'’”»]
    | (?<![\w&])\#\w*[^\W\d]\w* # hashtag
    | (?<![\d%])%(?:%|@|\{\w++\}|(?:\(\w++\)|\d++\$)?[-+\#0]*+\d*+(?:\.\d++)?(?:hh|h|ll?|[qjzL])?[diouxXeEfFgGaAcCsS](?!\w\w))
    | \{\{[^{}]{0,80}+\}\} | \$?\{[^{}\s]{0,80}+\} | (?<![\w$])\$[A-Za-z_]\w*+
    """,
    re.VERBOSE,
)
_PLACEHOLDER_OR_TAG = re.compile(rf"{PLACEHOLDER.pattern} | </?[A-Za-z][^<>]*+>", re.VERBOSE)


@dataclass(slots=True)
class _Token:
    """Part of a source: tag, text, or markup that is kept; `text` is what is shown of it."""

    kind: Literal["start", "end", "text", "kept"]
    raw: Raw
    name: str = ""
    text: str = ""
    is_block: bool = False
    is_untouched: bool = False  # with all inside
    is_preserved: bool = False  # its white space
    is_placeholder: bool = False

    @property
    def is_blank(self) -> bool:
        """Return whether it may lie outside of a block: white space, and markup that shows no text."""
        return self.kind in ("text", "kept") and not self.text.strip(_SPACE)


class Markup:
    """A text with markup: blocks to translate, and the text with their translations."""

    def __init__(self, text: str, kind: str, *, keeps_placeholders: bool = False, translates_attributes: bool = False) -> None:
        """Raise `InvalidRequest` if the kind is unknown or XML is malformed; HTML never is."""
        if kind not in KINDS:
            raise InvalidRequest("markup", f"{shown(kind)} is not one of {', '.join(KINDS)}")
        self.blocks: list[Block] = []
        self._parts, self._unquoted = Raw(), set[int]()
        self._kind = kind
        self._placeholder = (_PLACEHOLDER_OR_TAG if kind == "none" else PLACEHOLDER) if keeps_placeholders else None
        tokens = {"html": _html_tokens, "xml": _xml_tokens, "none": _plain_tokens}[kind](text)
        run = list[_Token]()
        for token in _merged(tokens, has_implied_ends=kind == "html"):
            if translates_attributes and token.name and token.kind != "end" and not token.is_untouched:
                token.raw = list(self._tag(str(token.raw[0]), token.name))
            if token.is_block:
                self._end_block(run)
                run.clear()
                self._parts += token.raw
            else:
                run.append(token)
        self._end_block(run)

    def render(self, answers: Sequence[Sequence[Translated]]) -> str:
        """Return the text with translations: for each block its segments, in order; the rest of a block is copied."""
        texts = list[str]()

        def resolve(parts: Raw) -> str:
            return "".join(part if isinstance(part, str) else texts[part] for part in parts)

        for number, (block, segments) in enumerate(zip(self.blocks, answers, strict=True)):
            text = block.render(segments, resolve)
            texts.append(f'"{text}"' if number in self._unquoted and text != resolve(block.raw) else text)
        return resolve(self._parts)

    def _tag(self, source: str, name: str) -> Iterator[str | int]:
        """Yield a tag's source with the numbers of blocks for the attributes that people read."""
        copied, position = 0, len(name) + 1
        while found := _ATTRIBUTE.match(source, position):
            position = found.end()
            if found[1].lower() in READ_ATTRIBUTES and found[2]:
                is_quoted = found[2][0] in "\"'"
                start, end = found.start(2) + is_quoted, found.end() - is_quoted
                text = html.unescape(source[start:end])
                if any(map(str.isalnum, text)):
                    yield source[copied:start]
                    value = self._block([_Token("text", [source[start:end]], text=text)], has_quotes=True)
                    yield from value
                    if not is_quoted:
                        self._unquoted.update(part for part in value if isinstance(part, int))
                    copied = end
        yield source[copied:]

    def _end_block(self, run: list[_Token]) -> None:
        """Add the tokens between two boundaries; those around the text, or around more than it, stay outside of the block."""
        single, first, last = _single_tags(run), 0, len(run)
        while first < last and (run[first].is_blank or first in single):
            first += 1
        while first < last and (run[last - 1].is_blank or last - 1 in single):
            last -= 1
        self._parts += _source(run[:first])
        self._parts += self._block(run[first:last], is_nested=single.isdisjoint(range(first, last)))
        self._parts += _source(run[last:])

    def _block(self, run: Sequence[_Token], *, is_nested: bool = True, has_quotes: bool = False) -> Raw:
        """Return the number of the block that is added for a run of tokens, or its source if there is nothing to translate."""
        source, divided, escape = _source(run), list[_Token](), _ESCAPES[self._kind, has_quotes]
        for token in run:
            divided += self._divided(token, escape) if token.kind == "text" else [token]
        if not any(token.kind == "text" and any(map(str.isalnum, token.text)) for token in divided):
            return source
        self.blocks.append(_Builder(divided, is_nested).block(source, escape))
        return [len(self.blocks) - 1]

    def _divided(self, token: _Token, escape: Callable[[str], str]) -> Iterator[_Token]:
        """Yield a text's placeholders and what is between them."""
        position, text = 0, token.text

        def part(start: int, end: int, is_placeholder: bool) -> _Token:
            raw: Raw = token.raw if end - start == len(text) else [escape(text[start:end])]
            kind: Literal["kept", "text"] = "kept" if is_placeholder else "text"
            return _Token(kind, raw, "", text[start:end], is_preserved=token.is_preserved, is_placeholder=is_placeholder)

        for found in self._placeholder.finditer(text) if self._placeholder else ():
            if position < found.start():
                yield part(position, found.start(), False)
            yield part(*found.span(), True)
            position = found.end()
        if position < len(text) or not text:
            yield part(position, len(text), False)


class _Builder:
    """A block made of tokens."""

    def __init__(self, tokens: Sequence[_Token], is_nested: bool) -> None:
        self._text, self._size, self._ends_with_space = list[str](), 0, True
        self._elements, self._kept = [Element(0)], list[Kept]()
        self._offsets, self._owners = [0], [0]
        self._unfollowed = list[Kept]()  # kept since the last text
        self._is_nested, ends = is_nested, _wordless(tokens) if is_nested else {}
        position, inner = 0, [0]
        while position < len(tokens):
            token, end = tokens[position], ends.get(position, position)
            if token.kind == "text":
                self._elements[inner[-1]].has_words |= bool(token.text.strip())
                self._add_text(token.text, inner[-1], token.is_preserved)
            elif token.kind == "start" and end == position and is_nested:
                inner.append(self._add_element(inner[-1], token.raw))
            elif token.kind == "end" and is_nested:
                element = self._elements[inner.pop()]
                element.close, element.last = token.raw, len(self._elements) - 1
            else:
                self._add_kept(tokens[position : end + 1], inner[-1])
            position = end + 1
        self._elements[0].last = len(self._elements) - 1
        for kept in self._unfollowed:
            kept.has_space_after = True

    def block(self, source: Raw, escape: Callable[[str], str]) -> Block:
        """Return the block, whose markup in the source is given."""
        text = "".join(self._text).rstrip(_SPACE)
        return Block(text, self._elements, self._kept, self._is_nested, self._offsets, self._owners, source, escape)

    def _add_element(self, parent: int, raw: Raw) -> int:
        self._elements[parent].children.append(len(self._elements))
        self._elements.append(Element(self._size, open=raw))
        return len(self._elements) - 1

    def _add_kept(self, tokens: Sequence[_Token], parent: int) -> None:
        text = "".join(token.text for token in tokens)
        shown = " ".join(text.split())
        if text[:1].isspace():
            self._add_text(" ", parent)
        placeholders = [token.text for token in tokens if token.is_placeholder]
        kept = Kept(parent, self._size, self._size + len(shown), _source(tokens), placeholders, self._ends_with_space)
        if shown:
            self._add_text(shown, ~len(self._kept))
        self._kept.append(kept)
        self._unfollowed.append(kept)
        if text[-1:].isspace():
            self._add_text(" ", parent)

    def _add_text(self, text: str, owner: int, is_preserved: bool = False) -> None:
        if text[:1].isspace():
            for kept in self._unfollowed:
                kept.has_space_after = True
        self._unfollowed.clear()
        if not is_preserved:
            text = _SPACES.sub(" ", text)
            text = text[self._ends_with_space and text[:1] == " " :]
        if text:
            if owner != self._owners[-1]:
                self._offsets.append(self._size)
                self._owners.append(owner)
            self._text.append(text)
            self._size += len(text)
            self._ends_with_space = text[-1].isspace()


def _single_tags(tokens: Sequence[_Token]) -> Set[int]:
    """Return the positions of tags that begin or end no element here, or one that overlaps another."""
    single, starts = set[int](), list[int]()
    for position, token in enumerate(tokens):
        if token.kind == "start":
            starts.append(position)
        elif token.kind == "end":
            if starts and tokens[starts[-1]].name == token.name:
                starts.pop()
            else:
                single.add(position)
    return single.union(starts)


def _wordless(tokens: Sequence[_Token]) -> dict[int, int]:
    """Return the ends of elements without words, by their starts."""
    ends, starts, num_words = dict[int, int](), list[tuple[int, int]](), 0
    for position, token in enumerate(tokens):
        if token.kind == "start":
            starts.append((position, num_words))
        elif token.kind == "end":
            start, before = starts.pop()
            if before == num_words:
                ends[start] = position
        elif token.kind == "text":
            num_words += bool(token.text.strip())
    return ends


def _escape_xml(text: str, quote: bool) -> str:
    return html.escape(NOT_IN_XML.sub("\ufffd", text), quote)


# By kind, and whether quotes are escaped.
_ESCAPES: dict[tuple[str, bool], Callable[[str], str]] = {
    ("none", False): str,
    **{("html", quote): partial(html.escape, quote=quote) for quote in (False, True)},
    **{("xml", quote): partial(_escape_xml, quote=quote) for quote in (False, True)},
}


def _source(tokens: Iterable[_Token]) -> Raw:
    return [part for token in tokens for part in token.raw]


def _merged(tokens: Iterable[_Token], *, has_implied_ends: bool) -> Iterator[_Token]:
    """Yield tokens, with one instead of those of an untouched element."""
    inner, num_open, kept, outside = list[str](), Counter[str](), list[_Token](), 0
    for token in tokens:
        is_end = token.kind == "end" and num_open[token.name] > 0
        ended = _ENDED_BY.get(token.name, ()) if has_implied_ends and token.kind == "start" else ()
        while is_end or (inner and inner[-1] in ended):
            num_open[name := inner.pop()] -= 1
            if is_end and name == token.name:
                break
        if kept and len(inner) <= outside:
            is_own_end = is_end and len(inner) == outside
            yield _untouched([*kept, token]) if is_own_end else _unended(kept)
            kept = []
            if is_own_end:
                continue
        if token.kind == "start":
            if not kept:
                outside = len(inner)
            inner.append(token.name)
            num_open[token.name] += 1
        if kept or (token.kind == "start" and token.is_untouched):
            kept.append(token)
        else:
            yield token
    if kept:
        yield _unended(kept)


def _unended(tokens: Sequence[_Token]) -> _Token:
    """Return the token of an untouched element without its end tag; it ends a block, so that no text is moved past it."""
    token = _untouched(tokens)
    token.is_block = True
    return token


def _untouched(tokens: Sequence[_Token]) -> _Token:
    start = tokens[0]
    text = "" if start.name in _HIDDEN else "".join(token.text for token in tokens)
    return _Token("kept", _source(tokens), text=text, is_block=start.is_block)


def _texts(source: str, text: str, is_preserved: bool = False) -> Iterator[_Token]:
    """Yield a text, and white space at its ends as tokens of its own."""
    start, end = len(source) - len(source.lstrip(_SPACE)), len(source.rstrip(_SPACE))
    if start >= end:
        yield _Token("text", [source], text=source, is_preserved=is_preserved)
        return
    if start:
        yield _Token("text", [source[:start]], text=source[:start], is_preserved=is_preserved)
        text = text.lstrip(_SPACE)
    rest = source[end:]
    yield _Token("text", [source[start:end]], text=text.rstrip(_SPACE) if rest else text, is_preserved=is_preserved)
    if rest:
        yield _Token("text", [rest], text=rest, is_preserved=is_preserved)


def _plain_tokens(source: str) -> Iterator[_Token]:
    return _texts(source, source, is_preserved=True)


def _xml_tokens(source: str) -> Iterator[_Token]:
    return _Xml(source).tokens()


def _html_tokens(source: str) -> Iterator[_Token]:
    lines = [0, *(found.end() for found in _LINE_END.finditer(source))]
    tag, text, start = None, "", 0  # a token reaches to the next
    for token in chain(tokenize(source, capture_source=True, resolve_references=False), [None]):
        end = len(source) if token is None else lines[token.line - 1] + token.col
        if tag is not None:
            yield _html_tag(tag, source[start:end])
            tag, start = None, end
        if token is not None and token.type in (TokenType.TEXT, TokenType.CHARACTER_REFERENCE):
            text += token.data or ""
            continue
        if token is None and text and _LINE_END.sub("\n", source[start:]).startswith(text):
            ends = [found.end() for found in _CHARACTER.finditer(source, start)]
            end = ends[len(text) - 1]
        if start < end:
            yield from _texts(source[start:end], text)
        if token is None and end < len(source):  # a tag that does not end is in no token
            yield _Token("kept", [source[end:]])
        tag, text, start = token, "", end


def _html_tag(token: Token, source: str) -> _Token:
    name = token.tag or ""
    is_block, is_void = name in _BLOCKS, name in _VOID or (token.self_closing and name in ("math", "svg"))
    if token.type is TokenType.END_TAG and not is_void:
        return _Token("end", [source], name, is_block=is_block)
    if token.type is not TokenType.START_TAG:
        return _Token("kept", [source], is_block=is_block)
    is_untouched = name in UNTOUCHED or (token.attr("translate") or "").lower() == "no"
    is_untouched |= "notranslate" in (token.attr("class") or "").split()
    return _Token("kept" if is_void else "start", [source], name, is_block=is_block, is_untouched=is_untouched)


class _Xml:
    """Tokens of XML, with expat's offsets."""

    def __init__(self, source: str) -> None:
        # A fragment has no root. Entities cannot grow or name files, as declarations are refused.
        self._root = "" if _PROLOG.match(source) else "x"
        self._data = (f"<x>{source}</x>" if self._root else source).encode(errors="surrogatepass")
        self._found = list[tuple[int, int, _Token]]()  # with offsets and elements
        # By element, of which the first is the document: parent, whether it has text of its own, and whether that is preserved.
        self._parents, self._has_text, self._is_preserved, self._inner = [0], [False], [False], [0]
        self._is_cdata = False
        self._parser = parser = expat.ParserCreate("utf-8")
        parser.StartElementHandler, parser.EndElementHandler, parser.CharacterDataHandler = self._start, self._end, self._text
        parser.StartCdataSectionHandler, parser.EndCdataSectionHandler = self._start_cdata, self._end_cdata
        parser.StartDoctypeDeclHandler = self._doctype
        for handler in ("CommentHandler", "ProcessingInstructionHandler", "SkippedEntityHandler", "XmlDeclHandler"):
            setattr(parser, handler, lambda *_: self._add(_Token("kept", [])))
        try:
            parser.Parse(self._data, True)
        except expat.ExpatError as error:
            column = error.offset + 1 - (len("<x>") if error.lineno == 1 and self._root else 0)
            place = f"line {error.lineno}, column {column}"
            raise InvalidRequest("text", f"is not well-formed XML: {expat.ErrorString(error.code)}, {place}") from None

    def tokens(self) -> Iterator[_Token]:
        """Yield the tokens; those of elements with text beside them, or around them, are inline."""
        is_inline = [False]
        for parent in self._parents[1:]:
            is_inline.append(is_inline[parent] or self._has_text[parent])
        found, first, last = self._found, 0, len(self._data)
        if self._root:
            found, first, last = found[1:-1], len("<x>"), last - len("</x>")
        ends, text = [*(start for start, _, _ in found[1:]), last], ""
        for number, ((_, element, token), end) in enumerate(zip(found, ends, strict=bool(found)), 1):
            if token.kind == "text":
                text += token.text
                if number == len(found) or found[number][2].kind != "text":
                    yield from _texts(self._data[first:end].decode(), text, self._is_preserved[element])
                    first, text = end, ""
            elif first < end:  # an empty-element tag also reports an end
                source, first = self._data[first:end].decode(), end
                token.raw, token.is_block = [source], token.kind != "kept" and not is_inline[element]
                if token.kind == "start" and source.endswith("/>"):
                    token.kind, token.is_block = "kept", False
                yield token

    def _add(self, token: _Token) -> None:
        self._found.append((self._parser.CurrentByteIndex, self._inner[-1], token))

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        parent = self._inner[-1]
        space = attributes.get("xml:space")
        self._inner.append(len(self._parents))
        self._parents.append(parent)
        self._has_text.append(False)
        self._is_preserved.append(space == "preserve" or (space is None and self._is_preserved[parent]))
        is_untouched = "no" in (attributes.get("translate"), attributes.get("its:translate"))
        self._add(_Token("start", [], name, is_untouched=is_untouched))

    def _end(self, name: str) -> None:
        self._add(_Token("end", [], name))
        self._inner.pop()

    def _text(self, text: str) -> None:
        self._has_text[self._inner[-1]] |= not text.isspace()
        if self._is_cdata:
            self._found[-1][2].text += text
        else:
            self._add(_Token("text", [], text=text))

    def _start_cdata(self) -> None:
        self._is_cdata = True
        self._add(_Token("kept", []))

    def _end_cdata(self) -> None:
        self._is_cdata = False

    def _doctype(self, _name: str, _system: str | None, _public: str | None, has_declarations: int) -> None:
        if has_declarations:
            raise InvalidRequest("text", "has a DOCTYPE with declarations, which are refused")
        self._add(_Token("kept", []))
