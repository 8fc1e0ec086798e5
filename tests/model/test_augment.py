import random
import re
from collections import Counter

import pytest

from dragoman.model.augment import Augmenter, determiners_of, replaced
from dragoman.model.errors import InputError
from dragoman.model.phrases import AlignedPair, Links, Words

ENGLISH = re.compile(r"(A|a) (noun\d+) sleeps in (a) (noun\d+)\.")
FRENCH = re.compile(r"(Une?) (nom\d+) dort dans (une?) (nom\d+)\.")
DETERMINERS = determiners_of("en"), determiners_of("fr")
LINKS = {(i, i) for i in range(7)}


def article(noun: int) -> str:
    return ("un", "une")[noun % 2]


def pair(first: int, second: int, links: Links = LINKS) -> AlignedPair:
    """A noun1 sleeps in a noun2. / Une nom1 dort dans un nom2."""
    source = f"A noun{first} sleeps in a noun{second}."
    target = f"{article(first).capitalize()} nom{first} dort dans {article(second)} nom{second}."
    return AlignedPair(Words.of(source), Words.of(target), links, links)


def corpus() -> list[AlignedPair]:
    """A hundred and thirty nouns: of the first 120 each is twelve times in the text, of the last ten each once."""
    rng = random.Random(0)
    nouns = [*range(120)] * 12
    rng.shuffle(nouns)
    return [pair(*nouns[i : i + 2]) for i in range(0, len(nouns), 2)] + [pair(noun, noun - 120) for noun in range(120, 130)]


def test_a_sentence_with_other_phrases_is_still_a_translation() -> None:
    augmenter = Augmenter(corpus(), DETERMINERS, seed=1)
    sentences = augmenter.substituted(2)
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


def phrase_pair(source: str, target: str, links: str) -> AlignedPair:
    """A pair with the links that are given as aligners write them."""
    ends = {(int(i), int(j)) for i, j in (link.split("-") for link in links.split())}
    return AlignedPair(Words.of(source), Words.of(target), ends, ends)


def fillers_of(*pairs: AlignedPair) -> set[tuple[str, str]]:
    """The noun phrases that are found in a text with these pairs and not without them."""
    before, after = (
        {text for fillers in Augmenter(text_pairs, DETERMINERS, seed=1).fillers.values() for text in fillers.texts}
        for text_pairs in (corpus(), [*corpus(), *pairs])
    )
    return after - before


def test_a_rare_word_comes_as_often_as_one_that_many_phrases_hold() -> None:
    """Sixty phrases hold `well`, one holds `once`; the other words of both are not rare."""
    well = [phrase_pair(f"A well noun{i} sleeps.", f"Un puits nom{i} dort.", "0-0 1-1 2-2 3-3 4-4") for i in range(60)]
    once = phrase_pair("A once sleeps.", "Un seul dort.", "0-0 1-1 2-2 3-3")
    augmenter = Augmenter([*corpus() * 9, *well, once], DETERMINERS, seed=1)
    fillers, rng = augmenter.fillers["un"], random.Random(2)
    drawn = Counter(word for _ in range(10_000) for word in fillers.draw(rng)[0].split())
    assert 0.8 < drawn["well"] / drawn["once"] < 1.25
    assert drawn["once"] > 20 * drawn["noun50"]


def test_a_word_that_is_not_rare_draws_nothing() -> None:
    often = [phrase_pair("A often sleeps.", "Un souvent dort.", "0-0 1-1 2-2 3-3")] * 101
    augmenter = Augmenter([*corpus() * 8, *often], DETERMINERS, seed=1)
    fillers, rng = augmenter.fillers["un"], random.Random(2)
    drawn = Counter(fillers.draw(rng)[0] for _ in range(20_000))
    assert ("a often", "un souvent") in fillers.texts
    assert drawn["a often"] < 20 < drawn["a noun50"]


@pytest.mark.parametrize(
    ("source", "target", "links", "found"),
    [
        ("A bell sleeps.", "Une cloche dort.", "0-0 1-1 2-2 3-3", {("a bell", "une cloche")}),
        ("A bell rings.", "Une cloche dort.", "0-0 1-1 3-3", set()),  # what follows is not frequent: the phrase may go on
        ("A bell sleeps.", "Une cloche sonne.", "0-0 1-1 2-2 3-3", set()),
        ("Bell sleeps.", "Une cloche dort.", "0-1 1-2 2-3", set()),  # no determiner
        ("A bell the bell sleeps.", "Une cloche la cloche dort.", "0-0 1-1 2-2 3-3 4-4 5-5", {("the bell", "la cloche")}),
        ("A bell, a bell sleeps.", "Une cloche la cloche dort.", "0-0 1-1 3-2 4-3 5-4 6-5", {("a bell", "la cloche")}),
    ],
)
def test_a_noun_phrase_is_whole(source: str, target: str, links: str, found: set[tuple[str, str]]) -> None:
    assert fillers_of(phrase_pair(source, target, links)) == found


def test_the_same_seed_gives_the_same_text() -> None:
    one, same, other = (Augmenter(corpus(), DETERMINERS, seed).substituted(1) for seed in (1, 1, 2))
    assert one == same != other


def test_short_phrases_hold_very_rare_words() -> None:
    augmenter = Augmenter([*corpus(), *[pair(1, 3)] * 10], DETERMINERS, seed=1)
    short = augmenter.short(3)
    assert short == sorted(short, key=lambda phrase: len(phrase[0].split()))
    seen = Counter(word for source, _ in short for word in re.findall(r"noun\d+", source))
    assert seen.keys() == {f"noun{noun}" for noun in range(130)} - {"noun1", "noun3"}  # these two come more than twenty times
    assert set(seen.values()) <= {3, 4, 5}
    for source, target in short:
        assert re.findall(r"\d+", source) == re.findall(r"\d+", target)
        assert "." not in source + target
        assert len(source.split()) <= 3
    assert augmenter.short(0) == []


def test_short_phrases_begin_with_a_sure_link() -> None:
    bell = phrase_pair("Old bell sleeps.", "Vieille cloche dort.", "0-0 1-1 2-2 3-3")
    doubtful = AlignedPair(bell.source, bell.target, bell.sure - {(0, 0)}, bell.possible)
    texts = [Augmenter([*corpus(), each], DETERMINERS, seed=1).short(12) for each in (bell, doubtful)]
    assert [("Old bell", "Vieille cloche") in text for text in texts] == [True, False]
    assert all(("bell", "cloche") in text for text in texts)


def test_a_phrase_with_an_unlinked_word_is_left_out() -> None:
    lame = pair(998, 0, LINKS - {(1, 1)})
    augmenter = Augmenter([*corpus(), lame], DETERMINERS, seed=1)
    texts = [*augmenter.short(12), *(text for fillers in augmenter.fillers.values() for text in fillers.texts)]
    assert not any("998" in source + target for source, target in texts)


def test_an_article_that_the_aligner_left_alone_is_part_of_the_phrase() -> None:
    lame = pair(998, 0, LINKS - {(0, 0)} | {(0, 1)})
    augmenter = Augmenter([*corpus(), lame], DETERMINERS, seed=1)
    assert ("a noun998", "un nom998") in augmenter.fillers["un"].texts


def test_a_language_without_determiners_is_named() -> None:
    with pytest.raises(InputError, match="no determiners are known of 'fi', only of de, en, fr"):
        determiners_of("fi")


@pytest.mark.parametrize(
    ("replacements", "text"),
    [
        ([(range(0, 2), "an old cat")], "An old cat runs after the ball."),
        ([(range(4, 6), "the children")], "The dog runs after the children."),
        ([(range(4, 6), "a cat"), (range(0, 2), "two men")], "Two men runs after a cat."),
    ],
)
def test_a_phrase_is_replaced_and_the_rest_stays(replacements: list[tuple[range, str]], text: str) -> None:
    assert replaced(Words.of("The dog runs after the ball."), replacements) == text
