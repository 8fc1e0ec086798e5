"""Sentence splitting, and the threads on which long texts are processed."""

import asyncio
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

# What may end without ending a sentence, in lower case.
# fmt: off
ABBREVIATIONS = frozenset((
    "adj", "al", "approx", "art", "aug", "av", "ave", "bd", "bldg", "bzgl", "bzw", "ca", "capt", "cf", "co", "col",
    "corp", "dec", "dept", "dipl", "div", "dr", "ed", "eds", "eg", "engl", "est", "etc", "evtl", "ext", "feb", "fig",
    "figs", "ft", "gen", "ggf", "gov", "hon", "hr", "hrsg", "ie", "inc", "incl", "ing", "inkl", "jan", "jr", "jul",
    "jun", "kap", "lt", "ltd", "lt", "m", "maj", "max", "me", "messrs", "mgr", "min", "mio", "mlle", "mm", "mme", "mr",
    "mrs", "ms", "mt", "no", "nos", "nov", "nr", "oct", "op", "orig", "p", "par", "pg", "ph", "phd", "pl", "pp",
    "prof", "pt", "ref", "rep", "rev", "sec", "sen", "sep", "sept", "sgt", "sig", "sog", "sr", "st", "str", "tab",
    "tel", "u", "ua", "univ", "usw", "v", "vgl", "vol", "vs", "z", "zb", "zzgl",
))
# fmt: on
# Of the last word before a stop.
MAX_WORD_CHARACTERS = 64
# Of stops and white space after a sentence.
MAX_SPACE_CHARACTERS = 4096
_BREAK = r"[\n\r\v\f\x85\u2028\u2029]"
# With all white space after it, and all lines that have neither letter nor digit: they are as many as bytes in a hostile text.
_LINE = re.compile(rf"{_BREAK}\s*+(?:(?:(?!{_BREAK})[\W_])++{_BREAK}\s*+)*+")
# Quantifiers give nothing back, and a run of stops is looked at once: otherwise a hostile text would take the square of its length.
_END = re.compile(
    r"""(?<![.!?…؟।])[.!?…؟।]++["'”’»«)\]]*+(?=\s++["'“‘„«»(\[¿¡-]*+[^\W_])\s++|[。！？]++[”’」』）]*+""",
)
_LAST_WORD = re.compile(r"((?:[^\W_]++\.)+)[\"'”’»«)\]]*+\Z")


def pieces_of(text: str, max_characters: int) -> Iterator[tuple[str, bool]]:
    """Yield a text's pieces, which together are it, and whether each is to be translated; of two in turn one always is.

    A sentence that has more than `max_characters` goes on to the end of its line. A piece may be empty: where there is none yet.
    """
    begin = end = 0
    for part, is_translated in _parts(text, max_characters):
        if is_translated:
            if begin < end:
                yield text[begin:end], False
            yield part, True
            begin = end + len(part)
        else:
            yield "", False
        end += len(part)
    if begin < end:
        yield text[begin:end], False


def _parts(text: str, max_characters: int) -> Iterator[tuple[str, bool]]:
    """Yield the same line by line, where more than one piece in turn may not be translated."""
    start = 0
    for match in _LINE.finditer(text):
        yield from _of_line(text[start : match.start()], max_characters)
        yield match[0], False
        start = match.end()
    yield from _of_line(text[start:], max_characters)


def put_together(pieces: Sequence[tuple[str, bool]], answers: Sequence[Sequence[str]], index: int) -> str:
    """Return the text that pieces become.

    Args:
        pieces: As `pieces_of` gives them.
        answers: Of each piece that is to be translated, the best one first.
        index: Which of them; the best one where there are fewer.
    """
    given = iter(answers)
    parts = []
    for piece, is_translated in pieces:
        if is_translated:
            answer = next(given)
            parts.append(answer[index] if index < len(answer) else answer[0])
        else:
            parts.append(piece)
    return "".join(parts)


def _of_line(line: str, max_characters: int) -> Iterator[tuple[str, bool]]:
    position = start = len(line) - len(line.lstrip())
    if start:
        yield line[:start], False
    while match := _END.search(line, position, start + max_characters + MAX_SPACE_CHARACTERS):
        position, stop = match.end(), match.start()
        last = line[max(start, stop - MAX_WORD_CHARACTERS) : min(position, stop + MAX_WORD_CHARACTERS)].rstrip()
        if _is_end(last, line[position : position + 8]):
            yield from _trimmed(line[start:position])
            start = position
        else:
            yield "", False
    yield from _trimmed(line[start:])


def _is_end(sentence: str, following: str) -> bool:
    """Whether a sentence, of which the last words are given, ends here, rather than a word that is short for another."""
    if following.lstrip("\"'“‘„«»([¿¡-")[:1].islower():
        return False
    if (last := _LAST_WORD.search(sentence)) is None:
        return True
    word = last[1].replace(".", "").lower()
    is_initial = len(word) == 1 and word.isalpha()
    is_dotted = "." in last[1][:-1] and len(word) <= 4
    return not (is_initial or is_dotted or word in ABBREVIATIONS or (word.isdigit() and len(word) <= 2))


def _trimmed(piece: str) -> Iterator[tuple[str, bool]]:
    """Yield a piece without the white space around it, and that."""
    text = piece.strip()
    if not any(map(str.isalnum, set(text))):
        if piece:
            yield piece, False
        return
    before = len(piece) - len(piece.lstrip())
    if before:
        yield piece[:before], False
    yield text, True
    if rest := piece[before + len(text) :]:
        yield rest, False


def has_several(text: str) -> bool:
    """Return whether a second sentence or line begins near the beginning of a text, of which no more is looked at."""
    return sum(is_translated for _, is_translated in pieces_of(text[:1024], 1024)) > 1


T = TypeVar("T")

# asyncio's own threads read configuration and bundles, which must not wait for callers. Of what has a caller no more run at once.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="texts")
# As long as a slice of work may hold up everything else on the event loop.
SLICE_SECONDS = 0.002


async def on_thread(work: Callable[..., T], *arguments: object) -> T:
    """Return the result of work that is bounded by the size of its arguments; work that has not begun ends with its task."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(work, *arguments))


class Slices:
    """Long work on the event loop in slices, in turns; it ends with the task that awaits it."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def collect(self, items: Iterator[T | None]) -> list[T]:
        """Return all items of an iterator, each of which must cost little, but None."""
        taken: list[T] = []
        while True:
            async with self._turn:
                end = time.perf_counter() + SLICE_SECONDS
                for item in items:
                    if item is not None:
                        taken.append(item)
                    if time.perf_counter() > end:
                        break
                else:
                    return taken
                await asyncio.sleep(0)  # in its turn: of all slices there is one between others' work
