"""Inline tags, placeholders and untouched elements put into translations by word alignment.

Each element of a block becomes one range of target words, inside its parent's range and apart from its siblings', with as many as
possible of the words that are aligned to its own. (Comparing the stacks of tags of neighbouring words, as Bergamot's html.cpp does,
duplicates elements whose words are apart in the target, with their ids.)
"""

import math
import re
import unicodedata
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, groupby, islice, pairwise
from typing import NamedTuple

from dragoman.server.service.sentences import UNSPACED

# Source of markup; numbers stand for blocks, which are values of attributes.
Raw = Sequence[str | int]

# Limits that keep the time linear: levels of elements that are compared with words, different texts of kept elements searched for
# in a segment, characters of a source word that are looked at, and words tried for an element without any.
MAX_LEVELS, MAX_TEXTS, MAX_PIECE, MAX_TRIED = 16, 64, 64, 16
# A place before a word of the target or after all, and a rank among the kept elements there.
_Slot = tuple[int, float]
_BEFORE_WORD = 1e9
# Words of an element itself, and words of no source word in it.
OWN, ANY = -1, -2
# Signs that divide what is not divided by spaces; others belong to the word around them.
_DIVIDING = r"\[\](){}<>/|=\"“”„«»;!?…—–"
# Words, signs of punctuation around them, and characters of scripts without spaces, with what is combined: marks, variation
# selectors, modifiers of emoji, and what follows a joiner.
_MARKS = "".join(one for one in map(chr, range(0x300, 0x1FA00)) if unicodedata.category(one) in ("Mn", "Mc", "Me", "Cf", "Sk"))
_WORD = re.compile(
    rf"(?:[{UNSPACED}]|[^\W{UNSPACED}](?:[^\s{_DIVIDING}{UNSPACED}]*[^\W{UNSPACED}])?|\S)"
    rf"(?:[{_MARKS}\U000e0020-\U000e01ef]|(?<=\u200d)\S)*"
)
SPACE = " \t\n\r\f"
SPACES, _ALPHANUMERIC, _TO_WORD = re.compile(rf"[{SPACE}]+"), re.compile(r"[^\W_]"), re.compile(r"[\W_]*+(?=[^\W_])|\s*+")


class Translated(NamedTuple):
    """Translation of `block.text[start:end]`; `alignment` has links (`alignment.py`) of it or of parts, in the target's order."""

    start: int
    end: int
    text: str
    alignment: Sequence[tuple[int, int, int, int]] = ()


@dataclass(slots=True)
class Element:
    """Inline element with words, or what is kept as it is: placeholder, untouched element, markup that shows no text."""

    parent: int
    start: int  # in the text of the block
    end: int = 0  # equal to `start` if no text is shown
    open: Raw = ()  # all of a kept one
    close: Raw = ()
    children: list[int] = field(default_factory=list)
    last: int = 0  # last element inside
    has_words: bool = False  # of its own, not in its children
    is_kept: bool = False
    placeholders: Sequence[str] = ()
    has_space_before: bool = False
    has_space_after: bool = False


class Block:
    """Text between two boundaries: without tags, with characters for references, and with single spaces.

    `text` includes placeholders and the text of untouched inline elements. It is complete after `finish`.
    """

    def __init__(self, raw: Raw, escape: Callable[[str], str], *, is_nested: bool = True, quote: str = "") -> None:
        """Begin a block whose source is given; unless its tags are nested, all are kept, in order; `quote` is around changes."""
        self.text, self.raw, self.escape, self.is_nested, self.quote = "", raw, escape, is_nested, quote
        self.elements, self.kept = [Element(0, 0)], list[int]()  # in document order; the first stands for the block
        self.offsets, self.owners = [0], [0]  # in the text, where the element changes, and the innermost elements there
        self._parts, self._size, self._ends_with_space = list[str](), 0, True
        self._inner, self._unfollowed = [0], list[Element]()  # elements around, and those kept since the last text

    def open(self, raw: Raw) -> None:
        """Begin an element."""
        number, parent = len(self.elements), self._inner[-1]
        self.elements.append(Element(parent, self._size, open=raw, has_space_before=self._ends_with_space))
        self.elements[parent].children.append(number)
        self._inner.append(number)

    def close(self, raw: Raw) -> None:
        """End the innermost element."""
        element = self.elements[self._inner.pop()]
        element.close, element.end, element.last = raw, self._size, len(self.elements) - 1

    def keep(self, raw: Raw, text: str, placeholders: Sequence[str]) -> None:
        """Add what is kept; `text` is shown of it."""
        if text[:1].isspace():
            self.add(" ")
        self.kept.append(len(self.elements))
        self.open(raw)
        element = self.elements[-1]
        element.is_kept, element.placeholders = True, placeholders
        if shown := " ".join(text.split()):
            self.add(shown)
        self.close(())
        self._unfollowed.append(element)
        if text[-1:].isspace():
            self.add(" ")

    def add(self, text: str, *, is_preserved: bool = False) -> None:
        """Add text of the innermost element, whose white space may be preserved."""
        owner = self._inner[-1]
        self.elements[owner].has_words |= bool(text.strip())
        if text[:1].isspace():
            for kept in self._unfollowed:
                kept.has_space_after = True
        self._unfollowed.clear()
        if not is_preserved:
            text = SPACES.sub(" ", text)
            text = text[self._ends_with_space and text[:1] == " " :]
        elif not self._size and len(self.elements) == 1:
            text = text.lstrip(SPACE)
        if text:
            if owner != self.owners[-1]:
                self.offsets.append(self._size)
                self.owners.append(owner)
            self._parts.append(text)
            self._size += len(text)
            self._ends_with_space = text[-1].isspace()

    def finish(self) -> None:
        """End the block."""
        self.add(" ")
        self.close(())
        self.text = "".join(self._parts).rstrip(SPACE)

    def owner(self, position: int) -> int:
        """Return the innermost element of a character."""
        return self.owners[bisect_right(self.offsets, position) - 1]

    def render(self, segments: Sequence[Translated], resolve: Callable[[Raw], str]) -> str:
        """Return the markup with translated segments, which are in order; `resolve` returns the text of markup."""
        if all(segment.text == self.text[segment.start : segment.end] for segment in segments):
            return resolve(self.raw)
        words, position = list[_Word](), 0
        for segment in [*segments, Translated(len(self.text), len(self.text), "")]:
            for each in (Translated(position, segment.start, self.text[position : segment.start]), segment):
                words += _Segment(self, each).words() if each.start < each.end else ()
            position = segment.end
        if self.kept:
            _stand_for_kept(self, words)
        shown, gap = list[_Word](), ""
        for word in words:
            gap = max(gap, word.gap, key=len)
            if word.text or word.is_kept:
                word.gap, gap = gap, ""
                shown.append(word)
        text, source = _Target(self, [*shown, _Word(gap, "")]).markup(resolve), resolve(self.raw)
        before, after = source[: len(source) - len(source.lstrip(SPACE))], source[len(source.rstrip(SPACE)) :]
        return f"{before}{self.quote}{text}{self.quote}{after}"


def _is_sign(word: str) -> bool:
    return not word[0].isalnum() and _ALPHANUMERIC.search(word) is None


@dataclass(slots=True)
class _Word:
    """Target word and the white space before it; `is_kept` if it stands for its owner, without text for white space alone."""

    gap: str
    text: str
    owner: int = -1
    source: int = -1  # position of the source word
    is_kept: bool = False


class _Segment:
    """Target words of a segment, with their owners in the source."""

    def __init__(self, block: Block, segment: Translated) -> None:
        self._block, self._start, self._end, self._text = block, segment.start, segment.end, segment.text
        self._is_copied = segment.text == block.text[segment.start : segment.end]
        self._alignment, self._ends = segment.alignment, [entry[1] for entry in segment.alignment]

    def words(self) -> Iterator[_Word]:
        """Yield the words, copies of those with tags inside in parts; those found for kept elements without text."""
        block, text, position = self._block, self._text, 0
        for begin, end, kept in [*self._kept(), (len(text), len(text), -1)]:
            for found in _WORD.finditer(text, position, begin):
                start, size, cuts = found.start(), len(found[0]), list[int]()
                source = self._aligned(start, found.end())
                if size > 1 and (at := block.text.find(found[0], max(source - size + 1, 0), source + size)) >= 0:
                    source, cuts = at, block.offsets[bisect_right(block.offsets, at) : bisect_left(block.offsets, at + size)]
                for cut in (*cuts, source + size):
                    stop = start + cut - source
                    yield _Word(text[position:start], text[start:stop], block.owner(source) if source >= 0 else -1, source)
                    position = start = stop
                    source = cut
            yield _Word(text[position:begin], "", kept, is_kept=kept >= 0)
            position = end

    def _aligned(self, start: int, end: int) -> int:
        """Return the position of the source word that the longest piece of a target word is aligned to, or -1."""
        if self._is_copied:
            return self._start + start
        text, word, longest, piece = self._block.text, self._text[start:end], 0, (0, 0)
        for number in range(bisect_right(self._ends, start), len(self._ends)):
            begin, stop, first, last = self._alignment[number]
            if begin >= end:
                break
            if (size := min(stop, end) - max(begin, start)) > longest and first < last:
                longest, piece = size, (self._start + first, self._start + min(last, first + MAX_PIECE))
        if not longest:
            return -1
        is_sign = _is_sign(word)
        if is_sign and (position := text.rfind(word, *piece)) >= 0:
            return position
        position = next(_TO_WORD.finditer(text, *piece)).end()
        element = self._block.elements[self._block.owner(position)]
        if is_sign and (text[position].isalnum() or element.is_kept):  # signs attend to anything
            return self._end - 1 if end == len(self._text) and not text[self._end - 1].isalnum() else -1
        return position

    def _kept(self) -> list[tuple[int, int, int]]:
        """Return where the texts of kept elements are in the target, in order; -1 stands for another copy of a placeholder."""
        block, elements = self._block, self._block.elements
        first, last = (bisect_left(block.kept, place, key=lambda kept: elements[kept].start) for place in (self._start, self._end))
        inside = [(kept, one) for kept in block.kept[first:last] if (one := elements[kept]).start < one.end <= self._end]
        if self._is_copied or not inside:
            return [(one.start - self._start, one.end - self._start, kept) for kept, one in inside]
        numbers, found, taken = defaultdict[str, list[int]](list), list[tuple[int, int, int]](), bytearray(len(self._text))
        for kept, one in inside:
            for text in {block.text[one.start : one.end], *one.placeholders}:
                numbers[text].append(kept)
        placeholders, placed = {text for _, one in inside for text in one.placeholders}, set[int]()
        for text in sorted(islice(numbers, MAX_TEXTS), key=len, reverse=True):
            waiting, places = dict.fromkeys(kept for kept in numbers[text] if kept not in placed), [*self._occurrences(text)]
            for is_aligned in (True, False):
                for place in places:
                    end = place + len(text)
                    kept = block.owner(self._aligned(place, end)) if is_aligned else next(iter(waiting), -1)
                    is_found = kept in waiting or (text in placeholders and not is_aligned)
                    if is_found and not any(taken[place:end]):
                        found.append((place, end, kept))
                        taken[place:end] = b"\1" * len(text)
                        placed.add(kept)
                        waiting.pop(kept, None)
        return sorted(found)

    def _occurrences(self, text: str) -> Iterator[int]:
        """Yield where a text occurs, not as a part of a word."""
        place = self._text.find(text)
        while place >= 0:
            end = place + len(text)
            is_cut = text[0].isalnum() and place > 0 and self._text[place - 1].isalnum()
            if not is_cut and not (text[-1].isalnum() and self._text[end : end + 1].isalnum()):
                yield place
            place = self._text.find(text, end)


def _stand_for_kept(block: Block, words: list[_Word]) -> None:
    """Let the longest run of words that are aligned to a kept element stand for it, unless one does."""
    found, runs, position = {word.owner for word in words if word.is_kept}, dict[int, tuple[int, int]](), 0
    for owner, group in groupby(words, key=lambda word: word.owner):
        size = len(list(group))
        if owner >= 0 and block.elements[owner].is_kept and owner not in found:
            runs[owner] = max(runs.get(owner, (0, 0)), (size, -position))
        position += size
    left = sum(bool(word.text) for word in words) - len(block.elements) + len(block.kept)
    for size, position in runs.values():
        if (left := left - size) < 0:  # elements need words
            break
        words[-position].is_kept = True
        for word in words[1 - position : size - position]:
            word.gap = word.text = ""


class _Target:
    """Target words of a block, with the ranges of elements; those of kept ones are empty."""

    def __init__(self, block: Block, words: Sequence[_Word]) -> None:
        """Take words and kept elements found in the target; the last is empty and has the white space at the end."""
        self._block, self._elements = block, block.elements
        # Of kept elements: slots, and white space after those found in the target.
        self._slots, self._after = dict[int, _Slot](), dict[int, str]()
        self._words, self._gaps = list[_Word](), list[str]()  # white space before each slot
        self._anchors = list[tuple[int, _Slot, _Slot]]()  # positions in the source, and the slots before and after
        for rank, (before, word) in enumerate(pairwise([_Word("", ""), *words])):
            place = len(self._words)
            if before.is_kept:
                self._after[before.owner] = word.gap
            else:
                self._gaps.append(word.gap)
            if word.is_kept:
                self._slots[word.owner] = place, rank
                self._anchors.append((self._elements[word.owner].start, (place, rank - 0.5), (place, rank + 0.5)))
            elif word.text:
                self._words.append(word)
                if word.source >= 0:
                    self._anchors.append((word.source, (place, _BEFORE_WORD), (place + 1, -1)))
        self._anchors.sort()
        self._slots |= {kept: self._slot(self._elements[kept]) for kept in block.kept if kept not in self._slots}
        if not block.is_nested:
            self._keep_order()
        self._ranges = [(0, len(self._words))] * len(self._elements)
        self._needs = [0 if element.is_kept else 1 for element in self._elements]  # least words
        for number in range(len(self._elements) - 1, -1, -1):
            self._needs[number] = max(sum(self._needs[child] for child in self._elements[number].children), self._needs[number])
        self._budget = MAX_LEVELS * (len(self._words) + 4)
        # Of the text so far: white space that is due, whether some is before the last tags, and the last slot with its own.
        self._space, self._follows_space, self._entered = "", False, -1

    def _slot(self, element: Element) -> _Slot:
        """Return the slot of an element by its neighbours in the source: after the one that it follows, or before the next."""
        before, after = (bisect_left(self._anchors, (place,)) for place in (element.start, element.end))
        if before and (after == len(self._anchors) or not element.has_space_before):
            return self._anchors[before - 1][2]
        if after < len(self._anchors):
            return self._anchors[after][1]
        return round(element.start * len(self._words) / max(len(self._block.text), 1)), 0

    def _keep_order(self) -> None:
        """Give kept elements, of which some are tags, slots in the order of the source, with words between where it has any."""
        text, edges = self._block.text, [Element(0, 0), *(self._elements[number] for number in self._block.kept)]
        gaps = [bool(text[one.end : other.start].strip()) for one, other in pairwise([*edges, Element(0, len(text))])]
        slot, left = 0, sum(gaps)  # words between this slot and later ones
        for rank, (number, gap) in enumerate(zip(self._block.kept, gaps, strict=False)):
            left -= gap
            slot = max(min(max(self._slots[number][0], slot + gap), len(self._words) - left), slot)
            if slot != self._slots[number][0]:
                self._after.pop(number, None)
            self._slots[number] = slot, rank

    def markup(self, resolve: Callable[[Raw], str]) -> str:
        """Return the text with tags and kept elements; `resolve` returns the text of markup."""
        written, elements, escape = list[str](), self._elements, self._block.escape
        parts: list[int | str] = [*reversed(self._parts(0))]
        while parts:
            part = parts.pop()
            if isinstance(part, str):
                written.append(part)
            elif part < 0:
                text = self._words[~part].text
                written.append(self._spaced(~part, text if text.isalnum() else escape(text)))
            elif (element := elements[part]).is_kept:
                written.append(self._kept(part, resolve(element.open)))
            else:
                written.append(self._spaced(self._ranges[part][0], resolve(element.open), is_shown=False))
                parts.append(resolve(element.close))
                parts += reversed(self._parts(part))
        written.append(self._spaced(len(self._words), ""))
        return "".join(written).rstrip(" ")

    def _parts(self, number: int) -> list[int]:
        """Return an element's children, and its own words as complements, in order."""
        elements, (position, end), parts = self._elements, self._ranges[number], list[int]()
        if inner := [child for child in elements[number].children if not elements[child].is_kept]:
            for child, first, last in self._divided(number, inner):
                self._ranges[child], self._slots[child] = (first, last), (first, math.inf)
        for child in sorted(elements[number].children, key=self._slots.__getitem__):
            first, last = self._ranges[child]
            if elements[child].is_kept:
                first = last = max(position, min(self._slots[child][0], end))
                self._ranges[child] = first, last
                if first != self._slots[child][0]:
                    self._after.pop(child, None)
            parts += range(~position, ~first, -1)
            parts.append(child)
            position = last
        parts += range(~position, ~end, -1)
        return parts

    def _divided(self, number: int, children: Sequence[int]) -> Iterator[tuple[int, int, int]]:
        """Yield an element's children and their ranges inside its own.

        They are in the order of the middles of their words, each between those of its neighbours, and gain most: 3 for a word of
        their own, 2 for a sign, less 3 for a word of the element around, 4 for a sign.
        """
        (start, end), any_loss = self._ranges[number], 1 if self._elements[number].has_words else -1
        needs = [self._needs[child] for child in children]
        num_left = sum(needs)
        self._budget -= end - start
        if num_left > end - start or self._budget < 0:  # some may have no words
            ends = [start + (end - start) * before // num_left for before in accumulate(needs, initial=0)]
            yield from zip(children, ends, ends[1:], strict=False)
            return
        words, wanted = self._words[start:end], self._wanted(number, children)
        places = defaultdict[int, list[int]](list)
        for place, child in enumerate(wanted, start):
            places[child].append(place)
        order = sorted(((own := places[child] or [end])[len(own) // 2], child) for child in range(len(children)))
        low = before = start
        for (middle, child), (limit, _) in zip(order, [*order[1:], (end, 0)], strict=True):
            low, before = max(low, min(before, end - num_left)), middle
            num_left -= (need := needs[child])
            high = max(min(limit, end - num_left), low + need)
            sums, least, best, first, chosen = [0], math.inf, -math.inf, low, (low, high)
            for last in range(low + 1, high + 1):
                one, is_sign = wanted[last - start - 1], _is_sign(words[last - start - 1].text)
                gain = 3 - is_sign if one == child else -3 - is_sign if one == OWN else -any_loss if one == ANY else 0
                sums.append(sums[-1] + gain)
                if last >= low + need and sums[last - need - low] <= least:
                    first, least = last - need, sums[last - need - low]
                if sums[last - low] - least > best:
                    best, chosen = sums[last - low] - least, (first, last)
            yield children[child], *chosen
            low = chosen[1]

    def _wanted(self, number: int, children: Sequence[int]) -> list[int]:
        """Return for each word the child with its source word, or OWN, or ANY; children without words get one near theirs."""
        elements, (start, end), wanted = self._elements, self._ranges[number], list[int]()
        for word in self._words[start:end]:
            child = bisect_right(children, word.owner) - 1
            is_inside = child >= 0 and word.owner <= elements[children[child]].last
            wanted.append(child if is_inside else OWN if number <= word.owner <= elements[number].last else ANY)
        for child in set(range(len(children))).difference(wanted):
            element = elements[children[child]]
            near = min(max(self._slot(element)[0] - (not element.has_space_before) - start, 0), len(wanted) - 1)
            tried = (at for distance in range(MAX_TRIED) for at in (near + distance, near - distance) if 0 <= at < len(wanted))
            wanted[next((at for at in tried if wanted[at] < 0 and not _is_sign(self._words[start + at].text)), near)] = child
        return wanted

    def _kept(self, number: int, text: str) -> str:
        kept, after, place = self._elements[number], self._after.get(number), self._ranges[number][0]
        if after is None and kept.has_space_before and place and not self._follows_space:
            self._space = self._space or " "
        if after is not None or kept.has_space_before:
            text = self._spaced(place, text, is_shown=kept.start < kept.end)
        self._space = after if after is not None else " " if kept.has_space_after else self._space
        return text

    def _spaced(self, place: int, text: str, *, is_shown: bool = True) -> str:
        """Return text or markup at a slot after the white space before it, which stays outside of tags."""
        space, self._space = self._space, ""
        if place > self._entered:
            space, self._entered = max(space, self._gaps[place], key=len), place
        self._follows_space = not is_shown and (self._follows_space or bool(space))
        return self._block.escape(space) + text if space else text
