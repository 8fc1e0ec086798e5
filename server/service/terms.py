"""Terms: translations that a request prescribes, matched on the words of its source.

A text is compared by units: words, single characters of scripts without spaces, and single symbols. White space between units is
ignored. From left to right, the longest term that begins with a unit matches; matches do not overlap.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

from msgspec import Struct, structs

from dragoman.model.text.tokenizer import Tokenizer
from dragoman.server.engine.messages import SearchOptions
from dragoman.server.errors import InvalidRequest
from dragoman.server.service.languages import encode_within
from dragoman.server.service.requests import MAX_CHARACTERS, Term
from dragoman.server.service.sentences import UNSPACED

MAX_TERMS, MAX_TARGETS = 1000, 8
# Matches of a text that are required of its answer, and those that are looked for.
MAX_REQUIRED, MAX_MATCHES = 8, 64
# Of all required terms of an answer at least; later terms are only looked for.
MAX_TOKENS = 64
# Ways of writing a term, and terms of a tokeniser whose tokens are kept.
MAX_ALTERNATIVES, MAX_KEPT = 16, 4096
# Width of the beam search of a request that asks for less.
NUM_BEAMS = 4
# Combining marks, and Indic scripts, whose vowels are marks.
_MARKS = "\u0300-\u036f\u0483-\u0489\u0591-\u05c7\u0610-\u061a\u064b-\u065f\u06d6-\u06ed\u0900-\u0963\u0966-\u0dff"
_CHARACTER = re.compile(f"[{UNSPACED}]")
_UNIT = re.compile(rf"[{UNSPACED}]|(?:[^\W{UNSPACED}]|[{_MARKS}])+|[^\w\s]")


class Match(Struct, frozen=True):
    """A term in a text; `targets` are the alternatives for it."""

    source: str  # as the request or the glossary has it
    targets: tuple[str, ...]
    case_sensitive: bool = False


class TermIndex:
    """Terms by their units."""

    def __init__(self, terms: Iterable[Term]) -> None:
        """Index terms; the first of equal ones wins."""
        self._exact, self._folded = dict[str, Term](), dict[str, Term]()  # by their units, as written and case-folded
        lengths: dict[str, set[int]] = {}
        for term in terms:
            if units := _UNIT.findall(term.source):
                if not term.source.isascii():
                    units = [_composed(unit) for unit in units]
                folded = [*map(str.casefold, units)]
                if (key := _key(folded)) not in self._folded:
                    known, own = (self._exact, _key(units)) if term.case_sensitive else (self._folded, key)
                    known.setdefault(own, term)
                lengths.setdefault(folded[0], set()).add(len(units))
        # Of terms by their first unit, descending.
        self._lengths = {unit: tuple(sorted(each, reverse=True)) for unit, each in lengths.items()}

    def __len__(self) -> int:
        return len(self._exact) + len(self._folded)

    def find(self, exact: Sequence[str], folded: Sequence[str], place: int) -> tuple[Term, int] | None:
        """Return the longest term whose units begin at a place, and their number."""
        for length in self._lengths.get(folded[place], ()):
            term = self._exact.get(_key(exact[place : place + length])) if self._exact else None
            if (term := term or self._folded.get(_key(folded[place : place + length]))) is not None:
                return term, length
        return None


@lru_cache(maxsize=16)
def index_of(terms: tuple[Term, ...]) -> TermIndex:
    """Return the index of a request's terms, which the segments of a text share; raise `InvalidRequest` as `check_terms`."""
    check_terms(terms)
    return TermIndex(terms)


def check_terms(terms: Sequence[Term]) -> None:
    """Raise `InvalidRequest` for too many terms, or for a term that is too long or blank."""
    check_num_terms(len(terms))
    for number, term in enumerate(terms):
        check_num_targets(number, len(term.targets))
        for name, text in (("source", term.source), *(("targets", target) for target in term.targets)):
            if (size := num_characters(text)) > MAX_CHARACTERS:
                raise InvalidRequest(f"terms[{number}].{name}", f"{size} characters; at most {MAX_CHARACTERS} are allowed")
            if not text.strip():
                raise InvalidRequest(f"terms[{number}].{name}", "is blank")


def num_characters(text: str) -> int:
    """Return the characters of a text, of which some may be written as several."""
    return len(text) if text.isascii() else max(len(text), len(unicodedata.normalize("NFKC", text[: MAX_CHARACTERS + 1])))


def check_num_terms(count: int) -> None:
    """Raise `InvalidRequest` if there are too many terms; adapters call this before converting them."""
    if count > MAX_TERMS:
        raise InvalidRequest("terms", f"{count} terms; at most {MAX_TERMS} are allowed")


def check_counts(terms: Sequence[Any]) -> None:
    """Raise `InvalidRequest` if terms of a message, not converted yet, or targets of one are too many."""
    check_num_terms(len(terms))
    for number, term in enumerate(terms):
        check_num_targets(number, len(term.targets))


def check_num_targets(number: int, count: int) -> None:
    """Raise `InvalidRequest` if a term has too many targets."""
    if count > MAX_TARGETS:
        raise InvalidRequest(f"terms[{number}].targets", f"{count} targets; at most {MAX_TARGETS} are allowed")


def find_terms(text: str, indexes: Sequence[TermIndex]) -> list[Match]:
    """Return the first `MAX_MATCHES` terms in a text, with each occurrence; of equally long terms that of the first index."""
    found = list(_units(text))
    exact = [unit for unit, _, _ in found]
    folded = list(map(str.casefold, exact))
    matches: list[Match] = []
    place = 0
    while place < len(found) and len(matches) < MAX_MATCHES:
        hits = [hit for index in indexes if (hit := index.find(exact, folded, place)) is not None]
        if not hits:
            place += 1
            continue
        term, length = max(hits, key=lambda hit: hit[1])
        written = text[found[place][1] : found[place + length - 1][2]]
        matches.append(Match(term.source, tuple(term.targets) or (written,), term.case_sensitive or not term.targets))
        place += length
    return matches


def with_terms(
    search: SearchOptions, text: str, indexes: Sequence[TermIndex], tokenizer: Tokenizer, max_slots: int
) -> tuple[SearchOptions, Sequence[Match]]:
    """Return search options that require the terms in a text, and these.

    A search of fewer than `NUM_BEAMS` beams has as many, within `max_slots`.
    """
    matches, required, num_tokens = find_terms(text, indexes), list[list[list[int]]](), 0
    for match in matches[:MAX_REQUIRED]:
        alternatives = _alternatives(match, tokenizer)
        num_tokens += min(map(len, alternatives), default=0)
        required += [alternatives] * bool(alternatives and num_tokens <= MAX_TOKENS)
    if required:
        search = structs.replace(search, terms=required, num_beams=max(search.num_beams, min(NUM_BEAMS, max_slots)))
    return search, matches


def unmet_terms(matches: Sequence[Match], answer: str) -> list[str]:
    """Return the sources of the terms that an answer does not have as often as the text, each once."""
    num_wanted: dict[Match, int] = {}
    for match in matches:
        num_wanted[match] = num_wanted.get(match, 0) + 1
    answers = {case_sensitive: _plain(answer, case_sensitive) for case_sensitive in {match.case_sensitive for match in num_wanted}}
    is_met = {match: _has(match, answers[match.case_sensitive], count) for match, count in num_wanted.items()}
    return list(dict.fromkeys(match.source for match in num_wanted if not is_met[match]))


def _has(match: Match, answer: str, num_wanted: int) -> bool:
    """Return whether a match's targets occur so often in an answer: from the start of a word, and perhaps with an ending."""
    targets = sorted({_plain(target, match.case_sensitive) for target in match.targets}, key=len, reverse=True)
    place = 0
    for _ in range(num_wanted):
        found = {target: start for target in targets if (start := _start(target, answer, place)) >= 0}
        if not found:
            return False
        targets = list(found)
        first = min(targets, key=found.__getitem__)  # of those at the same place the longest
        place = found[first] + len(first)
    return True


def _start(target: str, answer: str, place: int) -> int:
    """Return where a target begins in an answer, at the start of a word if it begins like one; -1 if nowhere."""
    place = answer.find(target, place)
    while place > 0 and target[:1].isalnum() and (answer[place - 1].isalnum() or answer[place - 1] == "_"):
        place = answer.find(target, place + 1)
    return place


def _units(text: str) -> Iterable[tuple[str, int, int]]:
    """Yield the units of a text, composed, with their places."""
    for found in _UNIT.finditer(text):
        yield _composed(found[0]), found.start(), found.end()


def _composed(unit: str) -> str:
    return unicodedata.normalize("NFC", unit)


def _key(units: Sequence[str]) -> str:
    return " ".join(units)


def _plain(text: str, case_sensitive: bool) -> str:
    """Return a text with one space between words, and around each character of a script without spaces."""
    text = " ".join(_CHARACTER.sub(r" \g<0> ", unicodedata.normalize("NFKC", text)).split())
    return text if case_sensitive else text.casefold()


_kept: WeakKeyDictionary[Tokenizer, dict[Match, list[list[int]]]] = WeakKeyDictionary()


def _alternatives(match: Match, tokenizer: Tokenizer) -> list[list[int]]:
    """Return the token ids of a match's targets, at the start of an answer and within; without those that cannot be written."""
    kept = _kept.setdefault(tokenizer, {})
    if (found := kept.get(match)) is None:
        if len(kept) >= MAX_KEPT:
            kept.clear()
        found = kept[match] = _encoded(match, tokenizer)
    return found


def _encoded(match: Match, tokenizer: Tokenizer) -> list[list[int]]:
    texts = list(match.targets)
    if not match.case_sensitive:
        texts += [target[:1].upper() + target[1:] for target in texts]
    found: dict[tuple[int, ...], None] = {}
    for text in dict.fromkeys(texts):
        encoded = [encode_within(tokenizer, f" {text}"), tokenizer.encode(text)]
        if _CHARACTER.match(text):
            encoded.append(encode_within(tokenizer, text))
        found |= dict.fromkeys(tuple(ids) for ids in encoded if _plain(tokenizer.decode(ids), True) == _plain(text, True))
    return [list(ids) for ids in found if 0 < len(ids) <= MAX_TOKENS][:MAX_ALTERNATIVES]
