"""Subtitles: SubRip and WebVTT. The lines of a cue are one text; a dash at the start of a line begins another speaker's."""

import html
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import NamedTuple

from dragoman.server.errors import InvalidRequest
from dragoman.server.service.formats.fragments import Fragment, Fragments, lines_of

# Elements, time stamps of WebVTT, and codes such as `{\an8}`.
_TAG = re.compile(r"<(/?)([A-Za-z]++)[^<>]*+>|<[\d:.]++>|\{\\[^{}]*\}")
_WORD = re.compile(r"(?:<[^<>]*>|\{\\[^{}]*\}|[^\s])+")
_DASHES = ("-", "‐", "–", "—")


class _Lines(NamedTuple):
    """Lines of a cue that are one text: their numbers, and the text."""

    first: int
    end: int
    fragment: Fragment[tuple[str, str]]


def read_subtitles(is_escaped: bool, content: bytes, fragments: Fragments) -> Callable[[str], bytes]:
    """Read subtitles, in WebVTT with escaped text; as a `Reader`."""
    lines = lines_of(content)
    if is_escaped != lines[0].removeprefix("\ufeff").startswith("WEBVTT"):
        raise InvalidRequest("file", "does not begin with WEBVTT" if is_escaped else "is WebVTT; its name ends with .vtt")
    texts, has_cue = list[_Lines](), False
    for first, end in _cues(lines):
        has_cue = True
        starts = [number for number in range(first, end) if number == first or lines[number].lstrip().startswith(_DASHES)]
        for start, stop in pairwise([*starts, end]):
            text = " ".join(map(str.strip, lines[start:stop]))
            fragments.count(text.count("<") + text.count("{"))
            fragment = _fragment(text, is_escaped)
            if fragments.add(fragment):
                texts.append(_Lines(start, stop, fragment))
    if not has_cue:
        raise InvalidRequest("file", "has no cues of subtitles")

    def write(_: str) -> bytes:
        written, position = list[str](), 0
        for start, stop, fragment in texts:
            if fragment.is_changed:
                ends = [line[len(line.rstrip("\r\n")) :] for line in (lines[start], lines[stop - 1])]
                found = ends[0].join(_wrapped(_shown(fragment, is_escaped), [line.strip() for line in lines[start:stop]]))
                written += [*lines[position:start], found, ends[1]]
                position = stop
        return "".join([*written, *lines[position:]]).encode(errors="replace")

    return write


read_srt, read_vtt = partial(read_subtitles, False), partial(read_subtitles, True)


def _cues(lines: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the first line of each cue's text, and the line after its last."""
    number = 0
    while number < len(lines):
        number += 1
        if "-->" in lines[number - 1]:
            first = number
            while number < len(lines) and lines[number].strip() and not _is_next(lines, number):
                number += 1
            yield first, number


def _is_next(lines: Sequence[str], number: int) -> bool:
    """Return whether another cue begins, without a blank line before it."""
    return "-->" in lines[number] or (lines[number].strip().isdigit() and "-->" in "".join(lines[number + 1 : number + 2]))


def _fragment(text: str, is_escaped: bool) -> Fragment[tuple[str, str]]:
    """Return the text of a cue; tags without start or end are kept where they are."""
    tags, fragment, position = list(_TAG.finditer(text)), Fragment[tuple[str, str]](), 0
    ends, waiting = dict[int, int](), list[int]()
    for number, tag in enumerate(tags):
        if tag[2] and not tag[1]:
            waiting.append(number)
        elif tag[2] and waiting and tags[waiting[-1]][2] == tag[2]:
            ends[waiting.pop()] = number
    closing = set(ends.values())
    for number, tag in enumerate(tags):
        between = text[position : tag.start()]
        fragment.add(html.unescape(between) if is_escaped else between)
        position = tag.end()
        if number in ends:
            fragment.open((tag[0], tags[ends[number]][0]))
        elif number in closing:
            fragment.close()
        else:
            fragment.keep((tag[0], ""))
    fragment.add(html.unescape(text[position:]) if is_escaped else text[position:])
    return fragment


def _shown(fragment: Fragment[tuple[str, str]], is_escaped: bool) -> str:
    """Return a translation as the text of a cue."""
    parts = list[str]()
    for kind, text, item in fragment.translated():
        if kind == "text":
            parts.append(html.escape(text, quote=False) if is_escaped else text)
        elif item:
            parts.append(item[kind == "close"])
    return "".join(parts).replace("-->", "->")  # which would begin a cue


def _wrapped(text: str, before: Sequence[str]) -> list[str]:
    """Return a text in at most as many lines as before, and as long as these if that is possible."""
    words = _WORD.findall(text)
    sizes = [len(_TAG.sub("", word)) + 1 for word in words]
    width = max(len(_TAG.sub("", line)) for line in before) + 1
    if len(before) > 1:
        width = max(width, sum(sizes) // len(before))
    while True:
        lines, room = list[list[str]](), 0
        for word, size in zip(words, sizes, strict=True):
            if (room := room - size) < 0 and (len(before) > 1 or not lines):
                lines.append([])
                room = width - size
            lines[-1].append(word)
        if len(lines) <= len(before):
            return [" ".join(line) for line in lines] or [""]
        width += max(width // 16, 1)
