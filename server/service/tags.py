"""Inline tags, placeholders and untouched elements put into translations by word alignment.

Each element of a block becomes one range of target words, inside its parent's range and apart from its siblings', with as many as
possible of the words that are aligned to its own. (Comparing the stacks of tags of neighbouring words, as Bergamot's html.cpp does,
duplicates elements whose words are apart in the target, with their ids.)
"""

import math
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, groupby, islice
from typing import NamedTuple

# Source of markup; numbers stand for blocks, which are values of attributes.
Raw = list[str | int]

# Limits that keep the time linear: levels of elements that are compared with words, different texts of kept items searched for in a
# segment, characters of a source word that are looked at, and words tried for an element without any.
MAX_LEVELS, MAX_TEXTS, MAX_PIECE, MAX_TRIED = 16, 64, 64, 16
# A place before a word of the target or after all, and a rank among the kept items there.
_Slot = tuple[int, float]
# Words of an element itself, and words of no source word in it.
OWN, ANY = -1, -2
# Scripts without spaces between words: Thai to Khmer, kana and Han.
_UNSPACED = r"\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u2e80-\u2fdf\u3005-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff"
_UNSPACED += r"\U00020000-\U0003ffff"
# Signs that divide what is not divided by spaces; others belong to the word around them.
_DIVIDING = r"\[\](){}<>/|=\"“”„«»;!?…—–"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}](?:[^\s{_DIVIDING}{_UNSPACED}]*[^\W{_UNSPACED}])?|\S")
_ZERO_WIDTH_JOINER = "\u200d"


class Translated(NamedTuple):
    """Translation of `block.text[start:end]`.

    `alignment` has (target start, target end, source start, source end), characters of the segment, in target order. It may lack
    parts of the target, or all of it.
    """

    start: int
    end: int
    text: str
    alignment: Sequence[tuple[int, int, int, int]] = ()


@dataclass(slots=True)
class Element:
    """Inline element with words; the first of a block stands for the block."""

    start: int  # in the text of the block
    open: Raw = field(default_factory=list)
    close: Raw = field(default_factory=list)
    children: list[int] = field(default_factory=list)
    last: int = 0  # last element inside; elements are numbered in document order
    has_words: bool = False  # of its own, not in its children


@dataclass(slots=True)
class Kept:
    """Untouched element, placeholder, or markup that shows no text: stays as it is, between words and in its parent."""

    parent: int
    start: int  # in the text of the block; equal to `end` if no text is shown
    end: int
    raw: Raw
    placeholders: list[str]
    has_space_before: bool
    has_space_after: bool = False


@dataclass
class Block:
    """Text between two boundaries: without tags, with characters for references, and with single spaces.

    `text` includes placeholders and the text of untouched inline elements.
    """

    text: str
    elements: list[Element]
    kept: list[Kept]
    is_nested: bool  # otherwise tags are kept items, in order
    offsets: list[int]  # in the text, where the owner changes
    owners: list[int]  # elements; kept items are ~0, ~1, …
    raw: Raw
    escape: Callable[[str], str]

    def owner(self, position: int) -> int:
        """Return the innermost element, or the kept item, of a character."""
        return self.owners[bisect_right(self.offsets, position) - 1]

    @cached_property
    def tagged_words(self) -> dict[str, list[int]]:
        """Positions of words with tags inside."""
        found = dict[str, list[int]]()
        for start, end in _words(self.text):
            if bisect_right(self.offsets, start) < bisect_left(self.offsets, end):
                found.setdefault(self.text[start:end], []).append(start)
        return found

    def render(self, segments: Sequence[Translated], resolve: Callable[[Raw], str]) -> str:
        """Return the markup with translated segments, which are in order; `resolve` returns the text of markup."""
        if all(segment.text == self.text[segment.start : segment.end] for segment in segments):
            return resolve(self.raw)
        words, position = list[_Word](), 0
        for segment in [*segments, Translated(len(self.text), len(self.text), "")]:
            if position < segment.start:
                words += _Segment(self, Translated(position, segment.start, self.text[position : segment.start])).words()
            words += _Segment(self, segment).words()
            position = segment.end
        return _Target(self, words).markup(resolve)


def _words(text: str, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield words, signs of punctuation around them, and characters of scripts without spaces, with combining marks after them."""
    first = last = -1
    for found in _WORD.finditer(text, start, len(text) if end is None else end):
        begin, stop = found.span()
        if begin != last or not _is_combined(text[begin - 1], text[begin]):
            if last >= 0:
                yield first, last
            first = begin
        last = stop
    if last >= 0:
        yield first, last


def _is_combined(before: str, character: str) -> bool:
    if character.isascii():
        return False
    return before == _ZERO_WIDTH_JOINER or unicodedata.category(character) in ("Mn", "Mc", "Me", "Cf", "Sk")


def _is_sign(word: str) -> bool:
    return not any(map(str.isalnum, word))


@dataclass(slots=True)
class _Word:
    """Target word and the white space before it; with `kept` it stands for that item, without text for white space alone."""

    gap: str
    text: str
    owner: int | None = None
    source: int = -1  # position of the source word
    kept: int | None = None

    @property
    def is_sign(self) -> bool:
        return _is_sign(self.text)


class _Segment:
    """Target words of a segment, with their owners in the source."""

    def __init__(self, block: Block, segment: Translated) -> None:
        self._block, self._start, self._text = block, segment.start, segment.text
        self._source = block.text[segment.start : segment.end]
        self._is_copied = segment.text == self._source
        self._alignment = sorted(segment.alignment)
        self._is_guessed = not self._alignment and not self._is_copied
        if self._is_guessed:  # as if the order of words were the same
            ratio = len(self._source) / max(len(segment.text), 1)
            self._alignment = [(start, end, int(start * ratio), int(start * ratio) + 1) for start, end in _words(segment.text)]
        self._ends = list(accumulate((entry[1] for entry in self._alignment), max))

    def words(self) -> Iterator[_Word]:
        text, position = self._text, 0
        for begin, end, kept in [*self._kept(), (len(text), len(text), None)]:
            for start, stop, source in self._aligned_words(position, begin):
                owner = None if source < 0 else self._block.owner(source)
                if owner is not None and owner < 0 and self._is_guessed:
                    owner = self._block.kept[~owner].parent
                yield _Word(text[position:start], text[start:stop], owner, source)
                position = stop
            yield _Word(text[position:begin], "", kept=kept)
            position = end

    def _aligned_words(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        """Yield words and the positions of their source words; copies of words with tags inside in parts."""
        for begin, stop in _words(self._text, start, end):
            source = self._aligned(begin, stop)
            if places := self._block.tagged_words.get(self._text[begin:stop]):
                source, offsets = places[max(bisect_right(places, source) - 1, 0)], self._block.offsets
                for offset in offsets[bisect_right(offsets, source) : bisect_left(offsets, source + stop - begin)]:
                    yield begin, begin + offset - source, source
                    begin, source = begin + offset - source, offset
            yield begin, stop, source

    def _aligned(self, start: int, end: int) -> int:
        """Return the position of the source word that most of a target word is aligned to, or -1."""
        if self._is_copied:
            return self._start + start
        word, weights, strongest = self._text[start:end], dict[int, int](), dict[int, tuple[int, int]]()
        is_sign = _is_sign(word)
        for number in range(bisect_right(self._ends, start), len(self._alignment)):
            begin, stop, source, source_end = self._alignment[number]
            if begin >= end:
                break
            weight, piece = min(stop, end) - max(begin, start), self._source[source : min(source_end, source + MAX_PIECE)]
            if weight > 0 and piece:
                shift = piece.rfind(word) if is_sign else next((at for at, one in enumerate(piece) if one.isalnum()), -1)
                position = self._start + source + (shift if shift >= 0 else len(piece) - len(piece.lstrip()))
                owner = self._block.owner(position)
                weights[owner] = weights.get(owner, 0) + weight
                strongest[owner] = max(strongest.get(owner, (0, 0)), (weight, -position))
        if not weights:
            return -1
        best = max(weights, key=lambda owner: weights[owner])
        position = -strongest[best][1]
        found = self._block.text[position]
        if is_sign and (found.isalnum() or (best < 0 and found != word)):  # signs attend to anything
            is_last = end == len(self._text) and not self._source[-1].isalnum()
            return self._start + len(self._source) - 1 if is_last else -1
        return position

    def _kept(self) -> list[tuple[int, int, int | None]]:
        """Return where the texts of kept items are in the target, in order; None stands for another copy of a placeholder."""
        block, start, end = self._block, self._start, self._start + len(self._source)
        first, last = (bisect_left(block.kept, place, key=lambda kept: kept.start) for place in (start, end))
        inside = [(number, one) for number, one in enumerate(block.kept[first:last], first) if one.start < one.end <= end]
        if self._is_copied:
            return [(one.start - start, one.end - start, number) for number, one in inside]
        numbers, found, taken = defaultdict[str, list[int]](list), list[tuple[int, int, int | None]](), bytearray(len(self._text))
        for number, one in inside:
            for text in {block.text[one.start : one.end], *one.placeholders}:
                numbers[text].append(number)
        placeholders, placed = {text for _, one in inside for text in one.placeholders}, set[int]()
        for text in sorted(islice(numbers, MAX_TEXTS), key=len, reverse=True):
            places = [place for place in self._occurrences(text) if not any(taken[place : place + len(text)])]
            aligned = {block.owner(self._aligned(place, place + len(text))): place for place in reversed(places)}
            waiting = [number for number in numbers[text] if number not in placed]
            chosen: dict[int, int | None] = {aligned[~number]: number for number in waiting if ~number in aligned}
            others = (number for number in waiting if ~number not in aligned)
            for place in places:
                if place not in chosen and ((other := next(others, None)) is not None or text in placeholders):
                    chosen[place] = other
            for place, kept in chosen.items():
                found.append((place, place + len(text), kept))
                taken[place : place + len(text)] = b"\1" * len(text)
            placed.update(number for number in chosen.values() if number is not None)
        return sorted(found, key=lambda one: one[0])

    def _occurrences(self, text: str) -> Iterator[int]:
        """Yield where a text occurs, not as a part of a word."""
        place = self._text.find(text)
        while place >= 0:
            end = place + len(text)
            is_cut = text[0].isalnum() and place > 0 and self._text[place - 1].isalnum()
            if not is_cut and not (text[-1].isalnum() and self._text[end : end + 1].isalnum()):
                yield place
            place = self._text.find(text, end)


class _Target:
    """Target words of a block: slots of kept items before, between and after them, and ranges of elements."""

    def __init__(self, block: Block, words: list[_Word]) -> None:
        self._block = block
        self._words, self._gaps = list[_Word](), list[str]()  # white space before each slot
        # Of kept items, and white space after those found in the target.
        self._slots, self._after = dict[int, _Slot](), dict[int, str]()
        self._anchors = list[tuple[int, _Slot, _Slot]]()  # positions in the source, and the slots before and after
        self._fill(words)
        self._anchors.sort()
        for number, kept in enumerate(block.kept):
            if number not in self._slots:
                self._slots[number] = self._slot(kept)
        if not block.is_nested:
            self._keep_order()
        # Of the text so far: white space that is due, whether some is before the last tags, and the last slot with its own.
        self._space, self._follows_space, self._entered = "", False, -1
        self._needs = [1] * len(block.elements)  # least words
        for number in range(len(block.elements) - 1, -1, -1):
            self._needs[number] = max(sum(self._needs[child] for child in block.elements[number].children), 1)
        self._ranges = [(0, len(self._words))] * len(block.elements)
        self._budget = MAX_LEVELS * (len(self._words) + 4)
        for number, element in enumerate(block.elements):
            if element.children:
                self._divide(number, *self._ranges[number])

    def _fill(self, words: list[_Word]) -> None:
        """Take words and slots of kept items."""
        _stand_for_kept(self._block, words)
        gap, last = "", -1  # last kept item of the slot
        for word in [*words, None]:
            gap = max(gap, word.gap if word else "", key=len)
            if word and word.kept is None and not word.text:
                continue
            if last >= 0:
                self._after[last] = gap
            else:
                self._gaps.append(gap)
            gap, last = "", -1
            place, rank = len(self._words), len(self._slots)
            if word and word.kept is not None:
                last = word.kept
                self._slots[last] = place, rank
                self._anchors.append((self._block.kept[last].start, (place, rank - 0.5), (place, rank + 0.5)))
            elif word:
                self._words.append(word)
                if word.source >= 0:
                    self._anchors.append((word.source, (place, math.inf), (place + 1, -1)))

    def _slot(self, kept: Kept) -> _Slot:
        """Return the slot of a kept item by its neighbours in the source: after the one that it follows, or before the next."""
        before, after = (bisect_left(self._anchors, (place,)) for place in (kept.start, kept.end))
        if before and (after == len(self._anchors) or not kept.has_space_before):
            return self._anchors[before - 1][2]
        return self._anchors[after][1] if after < len(self._anchors) else (0, 0)

    def _keep_order(self) -> None:
        """Give kept items, of which some are tags, slots in the order of the source, with words between them where it has any."""
        kept, text = self._block.kept, self._block.text
        starts, ends = [0, *(one.end for one in kept)], [*(one.start for one in kept), len(text)]
        gaps = [int(bool(text[start:end].strip())) for start, end in zip(starts, ends, strict=True)]
        slots, slot = list[int](), 0
        for number in range(len(kept)):
            slots.append(slot := max(self._slots[number][0], slot + gaps[number]))
        slot = len(self._words)
        for number in reversed(range(len(kept))):
            slot = max(min(slots[number], slot - gaps[number + 1]), 0)
            if slot != self._slots[number][0]:
                self._after.pop(number, None)
            self._slots[number] = slot, number

    def _divide(self, number: int, start: int, end: int) -> None:
        """Choose the ranges of an element's children inside its own."""
        children, size = self._block.elements[number].children, end - start
        needs = [self._needs[child] for child in children]
        self._budget -= size
        if sum(needs) > size or self._budget < 0:  # some may have no words
            ends = [start + size * end // sum(needs) for end in accumulate(needs, initial=0)]
            for child, first, last in zip(children, ends, ends[1:], strict=False):
                self._ranges[child] = first, last
            return
        wanted = self._wanted(number, start, end)
        places = defaultdict[int, list[int]](list)
        for place, child in enumerate(wanted):
            places[child].append(place)
        middles = sorted(
            (places[child][len(places[child]) // 2] if child in places else size, child) for child in range(len(children))
        )
        for child, first, last in self._best_ranges(number, start, wanted, needs, middles):
            self._ranges[children[child]] = start + first, start + last

    def _wanted(self, number: int, start: int, end: int) -> list[int]:
        """Return for each word the child with its source word, or OWN, or ANY; children without words get one near theirs."""
        elements, children, wanted = self._block.elements, self._block.elements[number].children, list[int]()
        for word in self._words[start:end]:
            owner = -1 if word.owner is None else word.owner
            child = bisect_right(children, owner) - 1
            is_inside = child >= 0 and owner <= elements[children[child]].last
            wanted.append(child if is_inside else OWN if owner == number else ANY)
        for child in set(range(len(children))).difference(wanted):
            begin = elements[children[child]].start
            place = bisect_left(self._anchors, (begin,))
            source, (before, _), (after, _) = self._anchors[place - 1] if place else (begin, (0, 0), (0, 0))
            is_apart = begin - source > MAX_PIECE or any(map(str.isspace, self._block.text[source:begin]))
            near = after if is_apart else before  # the word that the element is a part of
            near = min(max(near - start, 0), len(wanted) - 1)
            tried = (at for distance in range(MAX_TRIED) for at in (near + distance, near - distance) if 0 <= at < len(wanted))
            wanted[next((at for at in tried if wanted[at] < 0 and not self._words[start + at].is_sign), near)] = child
        return wanted

    def _best_ranges(
        self, number: int, start: int, wanted: list[int], needs: list[int], middles: list[tuple[int, int]]
    ) -> Iterator[tuple[int, int, int]]:
        """Yield children and their ranges, in the order of their middles, each between the middles of its neighbours.

        They have the largest sum of scores: 3 for a word in its element, 2 for a sign, 4 for a sign that stays outside of others'.
        """
        size, signs = len(wanted), [word.is_sign for word in self._words[start : start + len(wanted)]]
        any_score, lost = (1, 0) if self._block.elements[number].has_words else (-1, -1)
        scores = (3 + sign if one == OWN else any_score if one == ANY else lost for one, sign in zip(wanted, signs, strict=True))
        outside = list(accumulate(scores, initial=0))
        # Ends of the child before with their scores, less the scores of words outside up to there.
        previous, choices = [(0, 0)], list[tuple[int, dict[int, tuple[int, int]]]]()
        low, latest = 0, size - sum(needs)
        for rank, (_, child) in enumerate(middles):
            need = needs[child]
            first = max(low, min(middles[rank - 1][0] if rank else 0, latest))
            low, latest = first + need, latest + need
            last = min(latest, max(middles[rank + 1][0] if rank + 1 < len(middles) else size, low))
            inside = [0, *accumulate(3 - signs[place] if wanted[place] == child else 0 for place in range(first, last))]
            ends, choice, reached = list[tuple[int, int]](), dict[int, tuple[int, int]](), 0
            best, before = (-math.inf, (0, 0)), (-math.inf, 0)
            for end in range(low, last + 1):
                begin = end - need
                while reached < len(previous) and previous[reached][0] <= begin:
                    before = max(before, (previous[reached][1], previous[reached][0]))
                    reached += 1
                best = max(best, (before[0] + outside[begin] - inside[begin - first], (begin, before[1])))
                ends.append((end, int(best[0]) + inside[end - first] - outside[end]))
                choice[end] = best[1]
            previous = ends
            choices.append((child, choice))
        end = max(previous, key=lambda one: one[1])[0]
        for child, choice in reversed(choices):
            begin, before_end = choice[end]
            yield child, begin, end
            end = before_end

    def markup(self, resolve: Callable[[Raw], str]) -> str:
        """Return the text with tags and kept items; elements are generators on a stack, as they may be nested deeply."""
        kept = defaultdict[int, deque[int]](deque)
        for number in sorted(self._slots, key=lambda number: self._slots[number]):
            kept[self._block.kept[number].parent].append(number)
        written = list[str]()
        stack = [self._element(0, kept, resolve)]
        while stack:
            part = next(stack[-1], None)
            if part is None:
                stack.pop()
            elif isinstance(part, int):
                stack.append(self._element(part, kept, resolve))
            else:
                written.append(part)
        written.append(self._spaced(len(self._words), ""))
        return "".join(written).rstrip(" ")

    def _element(self, number: int, kept: dict[int, deque[int]], resolve: Callable[[Raw], str]) -> Iterator[str | int]:
        """Yield the text of an element, and the numbers of its children in their places."""
        element, (position, end), waiting = self._block.elements[number], self._ranges[number], kept[number]
        if element.open:
            yield self._spaced(position, resolve(element.open), is_shown=False)
        for child in [*sorted(element.children, key=lambda child: self._ranges[child]), None]:
            until = end if child is None else self._ranges[child][0]
            for place in range(position, until + 1):
                while waiting and (self._slots[waiting[0]][0] <= place or (child is None and place == until)):
                    one = waiting.popleft()
                    yield self._kept(one, place, resolve(self._block.kept[one].raw))
                if place < until:
                    yield self._spaced(place, self._block.escape(self._words[place].text))
            if child is not None:
                yield child
                position = self._ranges[child][1]
        yield resolve(element.close)

    def _kept(self, number: int, place: int, text: str) -> str:
        kept, after = self._block.kept[number], self._after.get(number) if place == self._slots[number][0] else None
        is_found, is_shown = after is not None, kept.start < kept.end
        if not is_found and kept.has_space_before and place and not self._follows_space:
            self._space = self._space or " "
        if is_found or kept.has_space_before:
            text = self._spaced(place, text, is_shown)
        self._space = after if after is not None else " " if kept.has_space_after else self._space
        return text

    def _spaced(self, place: int, text: str, is_shown: bool = True) -> str:
        """Return text or markup at a slot after the white space before it, which stays outside of tags."""
        space, self._space = self._space, ""
        if place > self._entered:
            space, self._entered = max(space, self._gaps[place], key=len), place
        self._follows_space = not is_shown and (self._follows_space or bool(space))
        return self._block.escape(space) + text


def _stand_for_kept(block: Block, words: list[_Word]) -> None:
    """Let the longest run of words that are aligned to a kept item stand for it, unless one does."""
    found, runs, position = {word.kept for word in words}, dict[int, tuple[int, int]](), 0
    for owner, group in groupby(words, key=lambda word: word.owner):
        size = len(list(group))
        if owner is not None and owner < 0 and ~owner not in found:
            runs[~owner] = max(runs.get(~owner, (0, 0)), (size, -position))
        position += size
    left = sum(bool(word.text) for word in words) - len(block.elements)
    for number, (size, position) in runs.items():
        left -= size
        if left < 0:  # elements need words
            break
        words[-position].kept = number
        for word in words[1 - position : size - position]:
            word.gap = word.text = ""
    for word in words:
        if word.owner is not None and word.owner < 0:
            word.owner = block.kept[~word.owner].parent
