"""Division of texts into sentences or lines, cuts of sentences that are too long, and time slices for large texts.

White space, blank lines, list marks and parts without letter or digit are kept as they are. A sentence ends with `.`, `!`, `?` or
`…` (and quotation marks or brackets after them) before white space and a possible start of another; not after an abbreviation, an
initial or a number of one or two digits. In scripts without spaces it ends with their own full stop. Rules that hold for all
languages: the language of a text is not always known.
"""

import asyncio
import re
import time
import unicodedata
from collections.abc import Callable, Iterator, Set
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

T = TypeVar("T")

# asyncio's default threads read configuration and bundles, which must not wait for callers' texts.
_THREADS = ThreadPoolExecutor(2, thread_name_prefix="texts")
# Longest blocking of the event loop by a slice.
SLICE_SECONDS = 0.002
# Lower-case words whose stop ends no sentence, and others whose stop ends none before a digit.
# fmt: off
ABBREVIATIONS = frozenset((
    "adj", "al", "approx", "aug", "av", "ave", "bd", "bldg", "bzgl", "bzw", "ca", "capt", "cf", "co", "col", "corp",
    "dec", "dept", "dipl", "div", "dr", "ed", "eds", "eg", "engl", "est", "etc", "evtl", "ext", "feb", "ft", "gen",
    "ggf", "gov", "hon", "hr", "hrsg", "ie", "inc", "incl", "ing", "inkl", "jan", "jr", "jul", "jun", "lt", "ltd", "m",
    "maj", "max", "messrs", "mgr", "min", "mio", "mlle", "mm", "mme", "mr", "mrs", "ms", "mt", "nov", "oct", "orig",
    "ph", "phd", "pl", "prof", "pt", "ref", "rep", "rev", "sen", "sep", "sept", "sgt", "sig", "sog", "sr", "st", "str",
    "tel", "u", "ua", "univ", "usw", "v", "vgl", "vs", "z", "zb", "zzgl",
))
# fmt: on
BEFORE_NUMBERS = frozenset(("art", "fig", "figs", "kap", "no", "nos", "nr", "op", "p", "par", "pg", "pp", "sec", "tab", "vol"))
# Limit for the last word before a stop.
MAX_WORD_CHARACTERS = 64
# Expected of a text that is cut.
CHARACTERS_PER_TOKEN = 4
# Most symbols after a sentence that are looked at.
MAX_SYMBOLS = 64
# Prefix of a text that is searched for a second sentence.
MAX_LOOKED_AT = 1024
# Characters of scripts without spaces between words, for a class of a regular expression: those that Unicode breaks into lines by a
# dictionary (Thai, Lao, Myanmar, Khmer, Tai), Tibetan, kana, Bopomofo and Han.
UNSPACED = (
    r"\u0e01-\u0e3a\u0e40-\u0e4e\u0e81-\u0ece\u0edc-\u0edf\u0f00-\u0fff\u1000-\u109f\u1780-\u17d3\u17d7\u17dc\u17dd\u1950-\u19df"
    r"\u1a20-\u1aad\ua9e0-\ua9ef\ua9fa-\ua9fe\uaa60-\uaadf\u2e80-\u2fd5\u3005-\u3007\u3021-\u3029\u3031-\u3035\u303b\u3041-\u312f"
    r"\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uff66-\uff9f\U0001aff0-\U0001b16f\U00020000-\U0003ffff"
)
_BREAK = r"[\n\r\v\f\x85\u2028\u2029]"
# Includes following white space and lines without letter or digit: a hostile text has as many as bytes.
_LINE = re.compile(rf"{_BREAK}\s*+(?:(?:(?!{_BREAK})[\W_])++{_BREAK}\s*+)*+")
# Possessive quantifiers, and one match attempt for a run of stops: otherwise a hostile text takes quadratic time.
_END = re.compile(
    r"""(?<![.!?…؟।])[.!?…؟।]++["'”’»«)\]]*+(?=\s++["'“‘„«»(\[¿¡-]*+[^\W_])\s++|[。！？]++[”’」』）]*+""",
)
_LAST_WORD = re.compile(r"((?:[^\W_]++\.)+)[\"'”’»«)\]]*+\Z")
# White space and list marks at the start of a line.
_MARK = re.compile(r"\s*+(?:(?:[-*+•◦‣▪●○·–—>#]++|\(?(?:\d{1,3}|[a-z])\))\s++)*+")
_NUMBER = re.compile(r"(\d{1,3})\.\s++")
_NUMBERS = re.compile(rf"(?:\A|{_BREAK})[ \t]*+(\d{{1,3}})\.[ \t]")
_CLAUSE, _SPACE = re.compile(r"""[,;:)\]–—]++["'”’»]*+(?=\s)|[，、；：]++"""), re.compile(r"\s++")
_SEVERAL = re.compile(rf"{_BREAK}|{_END.pattern}")


def split_text(text: str, *, is_by_line: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield consecutive parts of a text and whether to translate each; of two in turn at least one is to be translated.

    With `is_by_line` the lines are not divided. An empty part means that none is found yet.
    """
    begin = end = 0
    for part, is_translated in _parts(text, is_by_line):
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


def cut_text(text: str, num_tokens: Callable[[str], int], max_tokens: int, max_characters: int) -> Iterator[str]:
    """Yield consecutive parts of at most `max_tokens` tokens, none of which has more than `max_characters`.

    A part ends with a clause in its second half, else with a word, else where it has to. It may have fewer tokens than allowed, as
    only about twice the part before is counted: the time is linear.
    """
    guess = CHARACTERS_PER_TOKEN * max_tokens
    while text:
        size = min(len(text), max_characters, guess)
        while size > 1 and (count := num_tokens(text[:size])) > max_tokens:
            size = max(min(size - 1, size * max_tokens // count), 1)
        guess = max(2 * size, CHARACTERS_PER_TOKEN)
        if size < len(text):
            size = _last_end(_CLAUSE, text, size // 2, size) or _last_end(_SPACE, text, 1, size) or size
        yield text[:size]
        text = text[size:]


def _last_end(pattern: re.Pattern[str], text: str, begin: int, end: int) -> int:
    """Return the end of the last match in a part of a text; 0 without one. A pattern may look at the next character."""
    return max((match.end() for match in pattern.finditer(text, begin, end + 1) if match.end() <= end), default=0)


def has_several(text: str) -> bool:
    """Return whether a second sentence or line begins in the first `MAX_LOOKED_AT` characters of a text."""
    text = text[:MAX_LOOKED_AT]
    if _SEVERAL.search(text) is None:  # most texts; splitting takes fifteen times as long
        return False
    return sum(is_translated for _, is_translated in split_text(text)) > 1


def _parts(text: str, is_by_line: bool) -> Iterator[tuple[str, bool]]:
    """Yield the parts line by line, possibly with several untranslated ones in turn."""
    numbers = {int(found[1]) for found in _NUMBERS.finditer(text)}
    start = 0
    for match in _LINE.finditer(text):
        yield from _of_line(text[start : match.start()], numbers, is_by_line)
        yield match[0], False
        start = match.end()
    yield from _of_line(text[start:], numbers, is_by_line)


def _of_line(line: str, numbers: Set[int], is_by_line: bool) -> Iterator[tuple[str, bool]]:
    position = start = len(line) - len(_MARK.sub("", line, count=1))
    # A number with a stop is a mark beside its neighbours; alone it may be a date.
    if (found := _NUMBER.match(line, start)) and not numbers.isdisjoint({int(found[1]) - 1, int(found[1]) + 1}):
        position = start = found.end()
    if start:
        yield line[:start], False
    while not is_by_line and (match := _END.search(line, position)):
        position, stop = match.end(), match.start()
        last = line[max(start, stop - MAX_WORD_CHARACTERS) : min(position, stop + MAX_WORD_CHARACTERS)].rstrip()
        if _is_end(last, line[position : position + 8]):
            yield from trimmed(line[start:position])
            start = position
        else:
            yield "", False
    yield from trimmed(line[start:])


def _is_end(sentence: str, following: str) -> bool:
    """Return whether a sentence, given its last words, ends here rather than an abbreviation."""
    if following.lstrip("\"'“‘„«»([¿¡-")[:1].islower():
        return False
    if (last := _LAST_WORD.search(sentence)) is None:
        return True
    word = last[1].replace(".", "").lower()
    is_initial = len(word) == 1 and word.isalpha()
    is_dotted = "." in last[1][:-1] and len(word) <= 4
    is_numbered = word in BEFORE_NUMBERS and following[:1].isdigit()
    return not (is_initial or is_dotted or is_numbered or word in ABBREVIATIONS or (word.isdigit() and len(word) <= 2))


def trimmed(part: str) -> Iterator[tuple[str, bool]]:
    """Yield a part as text and surrounding white space."""
    text = part.strip()
    if not any(map(str.isalnum, set(text))):
        if part:
            yield part, False
        return
    if not text[-1].isascii():
        text = _without_emoji(text)
    before = len(part) - len(part.lstrip())
    if before:
        yield part[:before], False
    yield text, True
    if rest := part[before + len(text) :]:
        yield rest, False


def _without_emoji(text: str) -> str:
    """Return a sentence without the symbols that follow its stop: models drop them."""
    for end in range(len(text), max(len(text) - MAX_SYMBOLS, 0), -1):
        last = text[end - 1]
        if not (last.isspace() or unicodedata.category(last) in ("So", "Sk", "Mn", "Cf")):
            return text[:end] if last in ".!?…" else text
    return text


async def on_thread(work: Callable[..., T], *arguments: object) -> T:
    """Run bounded work on a thread and return its result; cancelling the task drops work that has not begun."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(work, *arguments))


class Slices:
    """Time slices for long work on the event loop; callers alternate, and so do the calls of each."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()
        self._turns_of: dict[str, tuple[asyncio.Lock, int]] = {}

    async def collect(self, items: Iterator[T | None], owner: str = "") -> list[T]:
        """Return all items of an iterator except None, until cancelled; each must be cheap. `owner` is the caller or peer."""
        own, count = self._turns_of.get(owner) or (asyncio.Lock(), 0)
        self._turns_of[owner] = own, count + 1
        try:
            taken: list[T] = []
            while True:
                async with own, self._turn:
                    if self._take(items, taken):
                        return taken
                    await asyncio.sleep(0)  # inside the lock: one slice between other tasks
        finally:
            own, count = self._turns_of[owner]
            if count == 1:
                del self._turns_of[owner]
            else:
                self._turns_of[owner] = own, count - 1

    @staticmethod
    def _take(items: Iterator[T | None], taken: list[T]) -> bool:
        """Take items for one time slice; return whether all are taken."""
        end = time.perf_counter() + SLICE_SECONDS
        for item in items:
            if item is not None:
                taken.append(item)
            if time.perf_counter() > end:
                return False
        return True
