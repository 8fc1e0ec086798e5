import importlib.util
import random
import re
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.model.corpus import DataError
from dragoman.model.errors import InputError
from dragoman.model.phrases import MAX_SOURCE_WORDS, MAX_TARGET_WORDS, AlignedPair, Words, align
from tests.model.conftest import Aligner


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A man's T-shirt, wet.", ["a", "man's", "t-shirt", ",", "wet", "."]),
        ("L'homme qu'elle a vu aujourd'hui", ["l'", "homme", "qu'", "elle", "a", "vu", "aujourd'hui"]),
        ("It's Ed's QU'IL s’il", ["it's", "ed's", "qu'", "il", "s’", "il"]),
        ("l’eau – déjà", ["l’", "eau", "–", "déjà"]),
        ("", []),
    ],
)
def test_words_are_elisions_words_and_signs(text: str, words: list[str]) -> None:
    assert Words.of(text).lower == words


@given(st.text())
def test_words_are_where_their_spans_say(text: str) -> None:
    words = Words.of(text)
    assert [text[start:end].lower() for start, end in words.spans] == words.lower
    assert not "".join(text[end:start] for (_, end), (start, _) in zip(words.spans, words.spans[1:], strict=False)).strip()


def pair(num_sources: int, num_targets: int, sure: set[tuple[int, int]], possible: set[tuple[int, int]]) -> AlignedPair:
    sentences = (Words.of(" ".join("abcdefghij"[:count])) for count in (num_sources, num_targets))
    return AlignedPair(*sentences, sure, sure | possible)


LINKS = st.sets(st.tuples(st.integers(0, 7), st.integers(0, 8)), max_size=14)


@given(LINKS, LINKS)
def test_phrases_are_the_consistent_ones(sure: set[tuple[int, int]], possible: set[tuple[int, int]]) -> None:
    """Against the definition: of all rectangles, those that no link leaves, whose sides are as small as their links allow."""
    aligned = pair(8, 9, sure, possible)
    expected = set()
    for start, last in combinations_with_replacement(range(8), 2):
        for first, end in combinations_with_replacement(range(9), 2):
            rows, columns = range(start, last + 1), range(first, end + 1)
            inside = {(i, j) for i, j in aligned.possible if i in rows and j in columns}
            crossing = {(i, j) for i, j in aligned.possible if (i in rows) != (j in columns)}
            is_tight = {min(j for _, j in inside), max(j for _, j in inside)} == {first, end} if inside else False
            is_sure = any(i == last for i, _ in sure) and any(j == end for _, j in sure)
            if is_tight and not crossing and is_sure and len(rows) <= MAX_SOURCE_WORDS and len(columns) <= MAX_TARGET_WORDS:
                expected.add((rows, columns))
    found = [(phrase.source, phrase.target) for phrase in aligned.phrases()]
    assert set(found) == expected
    assert len(found) == len(expected)


def test_links_are_those_of_the_aligner(aligner: Aligner) -> None:
    path = aligner(forward="0-0 1-1\n\n", reverse="0-0 1-0\n0-0\n")
    first, second = align(["A dog", "Cats"], ["Un chien", "Des chats"], path)
    assert (first.sure, first.possible) == ({(0, 0)}, {(0, 0), (1, 1), (1, 0)})
    assert (second.sure, second.possible) == (set(), {(0, 0)})
    assert [side.text for side in (first.source, second.target)] == ["A dog", "Des chats"]


def test_the_aligner_reads_words_in_lower_case(aligner: Aligner, tmp_path: Path) -> None:
    align(["A dog's T-shirt."], ["L'habit d'un chien."], aligner(forward="0-0\n", reverse="0-0\n"))
    assert (tmp_path / "seen").read_text() == "a dog's t-shirt .\nl' habit d' un chien .\n"


def test_an_aligner_that_is_absent_is_named() -> None:
    with pytest.raises(InputError, match=r"no-such-aligner: no such program; `pip install eflomal`"):
        align(["A dog"], ["Un chien"], "no-such-aligner")


@pytest.mark.parametrize(
    ("links", "complaint"),
    [
        (("0-0\n0-0\n", "0-0\n"), "forward links: 2 lines for 1 sentences"),
        (("0-0 2-1\n", "0-0\n"), "forward links, line 1: 2-1 names a word that the line does not have"),
        (("0-0\n", "here-there\n"), "reverse links, line 1: 'here-there' is not a link"),
    ],
)
def test_links_that_do_not_fit_the_text_are_refused(aligner: Aligner, links: tuple[str, str], complaint: str) -> None:
    with pytest.raises(DataError, match=complaint):
        align(["A dog"], ["Un chien"], aligner(*links))


def program(path: Path, script: str) -> str:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        ("echo Traceback >&2; echo 'out of memory' >&2; exit 3", "failed with 3: out of memory"),
        ("exit 1", "failed with 1: it does not say why"),
        ("printf 'caf\\351\\n' >&2; exit 1", "failed with 1: caf\ufffd"),
        ("exit 0", "wrote no links"),
    ],
)
def test_an_aligner_that_fails_is_quoted_in_one_line(tmp_path: Path, script: str, complaint: str) -> None:
    aligner = program(tmp_path / "aligner", script)
    with pytest.raises(InputError, match=f"^{re.escape(aligner)} {complaint}$"):
        align(["A dog"], ["Un chien"], aligner)


@pytest.mark.skipif(importlib.util.find_spec("eflomal") is None, reason="eflomal is not installed")
def test_eflomal_links_words_that_go_together() -> None:
    """It draws at random; but in a thousand sentences of fifty words, in another order, it can hardly err."""
    rng = random.Random(0)
    sentences = [rng.sample(range(50), 5) for _ in range(1000)]
    sources = [" ".join(f"source{word}" for word in words) for words in sentences]
    targets = [" ".join(f"target{word}" for word in reversed(words)) for words in sentences]
    expected = {(i, 4 - i) for i in range(5)}
    linked = [len(aligned.sure & expected) - len(aligned.sure - expected) for aligned in align(sources, targets, "eflomal-align")]
    assert sum(linked) > 0.8 * 5 * len(linked)
