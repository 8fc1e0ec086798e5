"""Texts of HTML and XML: blocks of plain text to translate, and the markup around and inside them.

All markup is copied from the source, never written again, so that quotes, case, comments and white space stay as they are. Block
elements end a block, inline ones become ranges of its words (`tags.py`). In XML an element is inline if there is text beside it, or
beside an element around it. Not translated are comments, CDATA, elements with `translate="no"` or the class `notranslate`, and
`UNTOUCHED` elements of HTML.
"""

import html
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Literal
from xml.parsers import expat

# The tokenizer of the HTML standard, in linear time and with offsets: html.parser is quadratic on unclosed tags and does not know
# `<title>` or `<!-->`; lxml, selectolax and html5lib lose the source of tags. Its trees are not needed.
from turbohtml import TokenType, tokenize

from dragoman.server.errors import InvalidRequest
from dragoman.server.service.requests import MARKUPS, GenerateRequest, TagRules
from dragoman.server.service.tags import SPACE, Block, Raw, Translated

READ_ATTRIBUTES = frozenset(("alt", "aria-label", "placeholder", "title"))


def _names(names: str) -> frozenset[str]:
    return frozenset(names.split())


# Elements of HTML that end a block, first those that end a paragraph; others are inline.
_END_PARAGRAPHS = _names(
    "address article aside blockquote center dd details dialog dir div dl dt fieldset figcaption figure footer form h1 h2 h3 h4 h5"
    " h6 header hgroup hr li listing main menu nav ol p plaintext pre search section summary table ul xmp"
)
_BLOCKS = _END_PARAGRAPHS | _names(
    "audio body br button canvas caption col colgroup frame frameset head html label legend noframes noscript object optgroup"
    " option select tbody td template tfoot th thead title tr video"
)
_VOID = _names("area base basefont bgsound br col embed frame hr img input link meta param source track wbr")
# Untouched elements without text of their sentence, and others whose text the model copies.
_HIDDEN = _names("iframe listing math noembed noframes plaintext pre script style svg template textarea xmp")
UNTOUCHED = _HIDDEN | {"code", "kbd", "samp", "tt", "var"}
# By start tag: elements whose end tags it implies.
_ENDED_BY = {
    **dict.fromkeys(_END_PARAGRAPHS, _names("p")),
    **{"li": _names("p li"), "option": _names("option"), "tr": _names("p td th tr")},
    **dict.fromkeys(("dd", "dt"), _names("p dd dt")),
    **dict.fromkeys(("td", "th"), _names("p td th")),
    **dict.fromkeys(("tbody", "tfoot", "thead"), _names("p td th tr tbody tfoot thead")),
}
_LINE_END = re.compile(r"\r\n?|\n")
# Ends a tag that does not end, whatever its quotes.
_TAG_END = "\"'>"
_ATTRIBUTE = re.compile(r"""[\s/]*+([^\s/>=][^\s/>=]*+)(?:\s*+=\s*+("[^"]*+"|'[^']*+'|[^\s>]++))?""")
NOT_IN_XML = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_PROLOG = re.compile(r"\ufeff?\s*+<(?:\?xml\s|!DOCTYPE)")
# Parts of well-formed XML.
_XML = re.compile(
    r"""
    \A\ufeff | <!--.*?--> | <\?.*?\?> | <!\[CDATA\[(?P<cdata>.*?)\]\]> | &(?!\#|(?:lt|gt|amp|quot|apos);)[^;]++;
    | (?P<text>(?:[^<&]++|&(?:\#|(?:lt|gt|amp|quot|apos);))++)
    | <(?P<end>/?)(?P<name>[^\s/>]++)(?P<attributes>(?:"[^"]*+"|'[^']*+'|[^"'/>]++|/(?!>))*+)(?P<empty>/?)>
    """,
    re.VERBOSE | re.DOTALL,
)
# Each attempt at a match ends at white space or begins where a word does: the time is linear.
_PLACEHOLDERS = r"""
    (?<![\w.+-])[\w.+-]++@[\w-]++(?:\.[\w-]++)+ # mail address
    | (?<!\w)(?:(?:https?|ftp)://|www\.)[^\s<>"]*[^\s<>".,;:!?)\]}'’”»]
    | (?<![\w&])\#\w*[^\W\d]\w* # hashtag
    | (?<![\d%])%(?:%|@|\{\w++\}|(?:\(\w++\)|\d++\$)?[-+\#0]*+\d*+(?:\.\d++)?(?:hh|h|ll?|[qjzL])?[diouxXeEfFgGaAcCsS](?!\w\w))
    | \{\{[^{}]{0,80}+\}\} | \$?\{[^{}\s]{0,80}+\} | (?<![\w$])\$[A-Za-z_]\w*+
"""
_PLACEHOLDER = re.compile(f"({_PLACEHOLDERS})", re.VERBOSE)
_PLACEHOLDER_OR_TAG = re.compile(f"({_PLACEHOLDERS} | </?[A-Za-z][^<>]*+>)", re.VERBOSE)


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
    is_single: bool = False  # a tag that begins or ends no element of its block, or one that overlaps another

    @property
    def is_blank(self) -> bool:
        """Return whether it may lie outside of a block: white space, and markup that shows no text."""
        return self.is_single or (self.kind in ("text", "kept") and not self.text.strip(SPACE))


class Markup:
    """A text with markup: blocks to translate, and the text with their translations."""

    def __init__(self, request: GenerateRequest) -> None:
        """Divide the text of a request; raise `InvalidRequest` if XML is malformed; HTML never is."""
        self.blocks: list[Block] = []
        self._parts, self._kind = list[str | int](), request.markup or MARKUPS[0]
        placeholder = _PLACEHOLDER_OR_TAG if self._kind == MARKUPS[0] else _PLACEHOLDER
        self._placeholder = placeholder if request.keep_placeholders else None
        text, run = request.text, list[_Token]()
        tokens = (
            _TOKENS[self._kind](text, request.tag_rules)
            if self._kind in _TOKENS
            else [_Token("text", [text], text=text, is_preserved=True)]
        )
        for token in _merged(tokens, has_implied_ends=self._kind == "html"):
            if request.translate_attributes and token.name and token.kind != "end" and not token.is_untouched:
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

        for block, segments in zip(self.blocks, answers, strict=True):
            texts.append(block.render(segments, resolve))
        return resolve(self._parts)

    def _tag(self, source: str, name: str) -> Iterator[str | int]:
        """Yield a tag's source with the numbers of blocks for the attributes that people read."""
        copied = 0
        for found in _ATTRIBUTE.finditer(source, len(name) + 1):
            if found[1].lower() in READ_ATTRIBUTES and found[2]:
                is_quoted = found[2][0] in "\"'"
                start, end = found.start(2) + is_quoted, found.end() - is_quoted
                yield source[copied:start]
                token = _Token("text", [source[start:end]], text=html.unescape(source[start:end]))
                yield from self._block([token], quote="" if is_quoted else '"')
                copied = end
        yield source[copied:]

    def _end_block(self, run: list[_Token]) -> None:
        """Add the tokens between two boundaries; those around the text, or around more than it, stay outside of the block."""
        matched = {place for span in _ends(run).items() for place in span}
        for place, token in enumerate(run):
            token.is_single = token.kind in ("start", "end") and place not in matched
        shown = [place for place, token in enumerate(run) if not token.is_blank] or [0, -1]
        first, last = shown[0], shown[-1] + 1
        is_nested = not any(token.is_single for token in run[first:last])
        self._parts += [*_source(run[:first]), *self._block(run[first:last], is_nested=is_nested), *_source(run[last:])]

    def _block(self, run: Sequence[_Token], *, is_nested: bool = True, quote: str | None = None) -> Raw:
        """Return the number of the block that is added for a run of tokens, or its source if there is nothing to translate."""
        source, escape = _source(run), partial(_escape, kind=self._kind, quote=quote is not None)
        tokens = [part for token in run for part in self._divided(token, escape)]
        if not any(token.kind == "text" and any(map(str.isalnum, token.text)) for token in tokens):
            return source
        block, position = Block(source, escape, is_nested=is_nested, quote=quote or ""), 0
        ends = _ends(tokens) if is_nested else {}
        num_words = [0, *accumulate(token.kind == "text" and bool(token.text.strip()) for token in tokens)]
        while position < len(tokens):
            token, end = tokens[position], ends.get(position, position)
            if token.kind == "text":
                block.add(token.text, is_preserved=token.is_preserved)
            elif token.kind == "start" and num_words[position] < num_words[end]:
                block.open(token.raw)
            elif token.kind == "end" and is_nested:
                block.close(token.raw)
            else:
                kept = tokens[position : end + 1]
                placeholders = [token.text for token in kept if token.is_placeholder]
                block.keep(_source(kept), "".join(token.text for token in kept), placeholders)
                position = end
            position += 1
        block.finish()
        self.blocks.append(block)
        return [len(self.blocks) - 1]

    def _divided(self, token: _Token, escape: Callable[[str], str]) -> Iterator[_Token]:
        """Yield a text's placeholders and what is between them; other tokens as they are."""
        if not self._placeholder or token.kind != "text":
            yield token
            return
        for number, text in enumerate(self._placeholder.split(token.text)):
            if text or not number:
                raw: Raw = token.raw if len(text) == len(token.text) else [escape(text)]
                kind: Literal["kept", "text"] = "kept" if number % 2 else "text"
                yield _Token(kind, raw, text=text, is_preserved=token.is_preserved, is_placeholder=kind == "kept")


def _ends(tokens: Sequence[_Token]) -> dict[int, int]:
    """Return the positions of end tags by those of their start tags; without tags that overlap others or are single."""
    ends, starts = dict[int, int](), list[int]()
    for position, token in enumerate(tokens):
        if token.kind == "start":
            starts.append(position)
        elif token.kind == "end" and starts and tokens[starts[-1]].name == token.name:
            ends[starts.pop()] = position
    return ends


def _escape(text: str, kind: str, quote: bool) -> str:
    return text if kind == "none" else html.escape(NOT_IN_XML.sub("\ufffd", text) if kind == "xml" else text, quote)


def _source(tokens: Iterable[_Token]) -> list[str | int]:
    return [part for token in tokens for part in token.raw]


def _merged(tokens: Iterable[_Token], *, has_implied_ends: bool) -> Iterator[_Token]:
    """Yield tokens, with one instead of those of an untouched element."""
    inner, num_open, kept, outside = list[str](), defaultdict[str, int](int), list[_Token](), 0
    for token in tokens:
        is_end = token.kind == "end" and num_open[token.name] > 0
        ended = _ENDED_BY.get(token.name, ()) if has_implied_ends and token.kind == "start" else ()
        while is_end or (inner and inner[-1] in ended):
            num_open[name := inner.pop()] -= 1
            if is_end and name == token.name:
                break
        if kept and len(inner) <= outside:
            is_own_end = is_end and len(inner) == outside
            yield _untouched([*kept, token] if is_own_end else kept, is_ended=is_own_end)
            kept = []
            if is_own_end:
                continue
        if token.kind == "start":
            outside = outside if kept else len(inner)
            inner.append(token.name)
            num_open[token.name] += 1
        if kept or (token.kind == "start" and token.is_untouched):
            kept.append(token)
        else:
            yield token
    if kept:
        yield _untouched(kept, is_ended=False)


def _untouched(tokens: Sequence[_Token], *, is_ended: bool) -> _Token:
    """Return the token of an untouched element; without its end tag it ends a block, so that no text is moved past it."""
    text = "" if tokens[0].name in _HIDDEN else "".join(token.text for token in tokens)
    return _Token("kept", _source(tokens), text=text, is_block=tokens[0].is_block or not is_ended)


def _html_tokens(source: str, rules: TagRules) -> Iterator[_Token]:
    lines = [0, *(found.end() for found in _LINE_END.finditer(source))]
    tokens = list(tokenize(source + _TAG_END))
    starts = [0, *(lines[token.line - 1] + token.col for token in tokens[1:])]  # `</>` is in no token
    for token, start, end in zip(tokens, starts, [*starts[1:], None], strict=True):
        raw, name, is_end = [source[start:end]], token.tag or "", token.type is TokenType.END_TAG
        if token.type is TokenType.TEXT:
            if start < len(source):
                yield _Token("text", raw, text=(token.data or "")[: -len(_TAG_END) if end is None else None])
        elif name and end is not None:  # otherwise a comment, or a tag that does not end
            is_void = name in _VOID or (token.self_closing and name in ("math", "svg"))
            kind: Literal["start", "end", "kept"] = "kept" if is_void else "end" if is_end else "start"
            is_untouched = name in UNTOUCHED or name in rules.untouched or (token.attr("translate") or "").lower() == "no"
            is_untouched |= "notranslate" in (token.attr("class") or "").split()
            yield _Token(kind, raw, "" if is_end and is_void else name, "", rules.divides(name, name in _BLOCKS), is_untouched)
        else:
            yield _Token("kept", raw)


def _xml_tokens(source: str, rules: TagRules) -> Iterator[_Token]:
    """Yield the tokens; elements with text beside them, or around them, are inline."""
    _check_xml(source)
    found = list[tuple[_Token, int]]()  # with their elements
    # By element, of which the first is the document: parent, whether it has text of its own, and whether that is preserved.
    parents, has_text, is_preserved, inner = [0], [False], [False], [0]
    for part in _XML.finditer(source):
        raw, name, text, element = part[0], part["name"] or "", part["cdata"] or "", inner[-1]
        if part["text"]:
            text = html.unescape(raw) if "&" in raw else raw
            token = _Token("text", [raw], text=text, is_preserved=is_preserved[element])
        elif not name or name[0] == "!":
            token = _Token("kept", [raw], text=text)
        elif part["end"]:
            token = _Token("end", [raw], name)
            inner.pop()
        else:
            values = {key: value[1:-1] for key, value in _ATTRIBUTE.findall(part["attributes"])}
            is_untouched = name in rules.untouched or "no" in (values.get("translate"), values.get("its:translate"))
            token = _Token("kept" if part["empty"] else "start", [raw], name, is_untouched=is_untouched)
            if not part["empty"]:
                space = values.get("xml:space")
                is_preserved.append(space == "preserve" or (space is None and is_preserved[element]))
                parents.append(element)
                has_text.append(False)
                inner.append(element := len(parents) - 1)
        has_text[element] |= bool(text.strip())
        found.append((token, element))
    is_inline = [False]
    for parent in parents[1:]:
        is_inline.append(is_inline[parent] or has_text[parent])
    for token, element in found:
        if token.name:
            token.is_block = rules.divides(token.name, rules.has_outline and token.kind != "kept" and not is_inline[element])
        yield token


def _check_xml(source: str) -> None:
    """Raise `InvalidRequest` unless XML is well-formed. Entities cannot grow or name files, as declarations are refused."""
    root = "" if _PROLOG.match(source) else "<x>"  # a fragment has none

    def refuse(_name: str, _system: str | None, _public: str | None, has_declarations: int) -> None:
        if has_declarations:
            raise InvalidRequest("text", "has a DOCTYPE with declarations, which are refused")

    parser = expat.ParserCreate("utf-8")
    parser.StartDoctypeDeclHandler = refuse
    try:
        parser.Parse((f"{root}{source}</x>" if root else source).encode(errors="surrogatepass"), True)
    except expat.ExpatError as error:
        place = f"line {error.lineno}, column {error.offset + 1 - (len(root) if error.lineno == 1 else 0)}"
        raise InvalidRequest("text", f"is not well-formed XML: {expat.ErrorString(error.code)}, {place}") from None


_TOKENS = {"html": _html_tokens, "xml": _xml_tokens}
