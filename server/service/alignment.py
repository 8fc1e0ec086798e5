"""Links between the characters of an answer and of its source, from the alignment of their tokens.

The engine aligns the tokens of an answer where a bundle has heads for it; elsewhere the scorer's attention does, for one more pass
over both texts.
"""

import re
from collections.abc import Sequence
from typing import NamedTuple

from dragoman.model.text.tokenizers import Tokenizers

_WORD = re.compile(r"\S+")


class Link(NamedTuple):
    """Characters `[start, end)` of an answer that stand for characters of its source."""

    target_start: int
    target_end: int
    source_start: int
    source_end: int


def links(
    tokenizers: Tokenizers,
    source_ids: Sequence[int],
    source: str,
    target_ids: Sequence[int],
    target: str,
    alignment: Sequence[int],
) -> list[Link]:
    """Return the link of each token of an answer that has text, in order.

    `source_ids` are the tokens of `source` alone; `alignment` is the source token of each of `target_ids`.
    """
    sources = token_spans([*map(tokenizers.source.word_bytes, source_ids)], source)
    targets = token_spans([*map(tokenizers.target.token_bytes, target_ids)], target)
    return [Link(*span, *sources[i]) for span, i in zip(targets, alignment, strict=True) if span[0] < span[1]]


def token_spans(pieces: Sequence[bytes], text: str) -> list[tuple[int, int]]:
    """Return the characters of a text that each token stands for, without white space before it.

    The tokens' own text, `pieces` joined, may differ from it as far as tokenisers normalise: words, separated by white space, are
    matched by their number, and characters of a word by their place in it.
    """
    own = b"".join(pieces).decode("utf-8", "surrogateescape")
    if (places := _places(own, text)) is None:
        return [(0, 0)] * len(pieces)
    characters: Sequence[int] = range(len(own))  # of each byte
    if not own.isascii():
        sizes = (len(character.encode("utf-8", "surrogateescape")) for character in own)
        characters = [i for i, size in enumerate(sizes) for _ in range(size)]
    spans: list[tuple[int, int]] = []
    stop = 0
    for piece in pieces:
        start, stop = stop, stop + len(piece)
        first, last = (characters[start], characters[stop - 1] + 1) if piece else (0, 0)
        while first < last and own[first].isspace():
            first += 1
        spans.append((places[first], max(places[first], places[last])) if first < last else (0, 0))
    return spans


def _places(own: str, text: str) -> Sequence[int] | None:
    """Return the places in a text of those between the characters of the tokens' own; None if either is blank."""
    shift = len(own) - len(text)
    if own.endswith(text) and not own[:shift].strip():  # most texts; matching words takes as long as all the rest
        return [*[0] * shift, *range(len(text) + 1)]
    words, own_words = ([match.span() for match in _WORD.finditer(each)] for each in (text, own))
    if not own_words or not words:
        return None
    if len(words) != len(own_words):
        words, own_words = ([(each[0][0], each[-1][1])] for each in (words, own_words))
    places = list[int]()
    for (start, end), (first, last) in zip(own_words, words, strict=True):
        places += [first] * (start - len(places))
        size, ratio = end - start, (last - first) / (end - start)
        places += range(first, last + 1) if ratio == 1 else [first + round(i * ratio) for i in range(size + 1)]
    places += [places[-1]] * (len(own) + 1 - len(places))
    return places
