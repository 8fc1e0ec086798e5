"""Words, links and phrases of parallel sentences, and text that is augmented with them."""

import itertools
import random
import re
from collections import Counter
from itertools import combinations_with_replacement
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dragoman.model.augment import Augmenter, determiners_of, replaced
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
    assert not "".join(text[end:start] for (_, end), (start, _) in itertools.pairwise(words.spans)).strip()


LINKS = st.sets(st.tuples(st.integers(0, 7), st.integers(0, 8)), max_size=14)


@settings(max_examples=60)
@given(LINKS, LINKS)
def test_phrases_are_the_consistent_ones(sure: set[tuple[int, int]], possible: set[tuple[int, int]]) -> None:
    aligned = AlignedPair(Words.of(" ".join("abcdefgh")), Words.of(" ".join("abcdefghi")), sure, sure | possible)
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
    assert set(found) == expected and len(found) == len(expected)


def test_links_are_those_of_the_aligner_which_reads_words_in_lower_case(aligner: Aligner, tmp_path: Path) -> None:
    path = aligner(forward="0-0 1-1\n\n", reverse="0-0 1-0\n0-0\n")
    first, second = align(["A dog", "Cats"], ["Un chien", "Des chats"], path)
    assert (first.sure, first.possible) == ({(0, 0)}, {(0, 0), (1, 1), (1, 0)})
    assert (second.sure, second.possible) == (set(), {(0, 0)})
    assert [side.text for side in (first.source, second.target)] == ["A dog", "Des chats"]
    align(["A dog's T-shirt."], ["L'habit d'un chien."], aligner(forward="0-0\n", reverse="0-0\n"))
    assert (tmp_path / "seen").read_text() == "a dog's t-shirt .\nl' habit d' un chien .\n"


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


ENGLISH = re.compile(r"(A|a) (noun\d+) sleeps in (a) (noun\d+)\.")
FRENCH = re.compile(r"(Une?) (nom\d+) dort dans (une?) (nom\d+)\.")
DETERMINERS = determiners_of("en"), determiners_of("fr")


def article(noun: int) -> str:
    return ("un", "une")[noun % 2]


def linked(source: str, target: str, links: str) -> AlignedPair:
    ends = {(int(i), int(j)) for i, j in (link.split("-") for link in links.split())}
    return AlignedPair(Words.of(source), Words.of(target), ends, ends)


def pair(first: int, second: int) -> AlignedPair:
    """A noun1 sleeps in a noun2. / Une nom1 dort dans un nom2."""
    target = f"{article(first).capitalize()} nom{first} dort dans {article(second)} nom{second}."
    return linked(f"A noun{first} sleeps in a noun{second}.", target, "0-0 1-1 2-2 3-3 4-4 5-5 6-6")


def corpus() -> list[AlignedPair]:
    """A hundred and thirty nouns: of the first 120 each is twelve times in the text, of the last ten each once."""
    rng = random.Random(0)
    nouns = [*range(120)] * 12
    rng.shuffle(nouns)
    return [pair(*nouns[i : i + 2]) for i in range(0, len(nouns), 2)] + [pair(noun, noun - 120) for noun in range(120, 130)]


def test_a_sentence_with_other_phrases_is_still_a_translation() -> None:
    sentences = Augmenter(corpus(), DETERMINERS, seed=1).substituted(2)
    assert len(sentences) == 2 * len(corpus())
    changes = Counter[int]()
    for (source, target), original in zip(sentences, corpus() * 2, strict=True):
        english, french = ENGLISH.fullmatch(source), FRENCH.fullmatch(target)
        assert english and french, (source, target)
        nouns = [int(english[i][4:]) for i in (2, 4)]
        assert [int(french[i][3:]) for i in (2, 4)] == nouns
        assert [french[1].lower(), french[3]] == [article(noun) for noun in nouns]  # gender agrees
        assert (english[1], french[1][0]) == ("A", "U")
        changes[sum(f"noun{noun}" not in original.source.lower for noun in nouns)] += 1
    assert changes[1] > changes[2] > changes[0]
    one, other = (Augmenter(corpus(), DETERMINERS, seed).substituted(1) for seed in (1, 2))
    assert sentences[: len(one)] == one != other


@pytest.mark.parametrize(
    ("source", "target", "links", "found"),
    [
        ("A bell sleeps.", "Une cloche dort.", "0-0 1-1 2-2 3-3", {("a bell", "une cloche")}),
        ("A bell rings.", "Une cloche dort.", "0-0 1-1 3-3", set()),  # what follows is not frequent: the phrase may go on
        ("Bell sleeps.", "Une cloche dort.", "0-1 1-2 2-3", set()),  # no determiner
        ("A bell the bell sleeps.", "Une cloche la cloche dort.", "0-0 1-1 2-2 3-3 4-4 5-5", {("the bell", "la cloche")}),
        ("A bell, a bell sleeps.", "Une cloche la cloche dort.", "0-0 1-1 3-2 4-3 5-4 6-5", {("a bell", "la cloche")}),
        # An article that the aligner left alone is part of the phrase; a phrase with an unlinked word is none.
        ("A bell sleeps.", "Une cloche dort.", "0-1 1-1 2-2 3-3", {("a bell", "une cloche")}),
        ("A bell sleeps.", "Une cloche dort.", "0-0 2-2 3-3", set()),
    ],
)
def test_a_noun_phrase_is_whole(source: str, target: str, links: str, found: set[tuple[str, str]]) -> None:
    text = corpus()[:400]
    fillers = Augmenter([*text, linked(source, target, links)], DETERMINERS, seed=1).fillers.values()
    assert {phrase for each in fillers for phrase in each.texts if re.search("bell|ring|cloche", " ".join(phrase))} == found


def test_a_phrase_is_replaced_and_the_rest_stays() -> None:
    text = Words.of("The dog runs after the ball.")
    assert replaced(text, [(range(0, 2), "an old cat")]) == "An old cat runs after the ball."
    assert replaced(text, [(range(4, 6), "the children")]) == "The dog runs after the children."
    assert replaced(text, [(range(4, 6), "a cat"), (range(0, 2), "two men")]) == "Two men runs after a cat."
    with pytest.raises(InputError, match="no determiners are known of 'fi', only of de, en, fr"):
        determiners_of("fi")
