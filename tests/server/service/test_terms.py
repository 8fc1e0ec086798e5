"""Terms: matches on the words of a text, tokens of targets, what an answer lacks, limits; real answers alone and beside others."""

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import Bundle
from dragoman.server.engine.loading import load_engine
from dragoman.server.engine.messages import Answer, Request, SearchOptions
from dragoman.server.engine.settings import Limits
from dragoman.server.errors import InvalidRequest
from dragoman.server.service.context import Call
from dragoman.server.service.requests import MAX_CHARACTERS, GenerateRequest, Term
from dragoman.server.service.terms import (
    MAX_REQUIRED,
    MAX_TARGETS,
    MAX_TERMS,
    NUM_BEAMS,
    Match,
    find_terms,
    index_of,
    unmet_terms,
    with_terms,
)
from dragoman.server.service.validation import Validator


def found(text: str, *terms: Term | str) -> list[tuple[str, Sequence[str]]]:
    """Return sources and targets of the matches; a term that is a string keeps its source."""
    index = index_of(tuple(Term(term) if isinstance(term, str) else term for term in terms))
    return [(match.source, match.targets) for match in find_terms(text, [index])]


DOG, HOT_DOG = Term("dog", ("Hund",)), Term("hot dog", ("Hotdog",))
MATCHES: list[tuple[str, list[Term | str], list[tuple[str, Sequence[str]]]]] = [
    ("A dog, a DOG.", [DOG], [("dog", ("Hund",))] * 2),
    ("Dogs, dogma, a_dog, hotdog", [DOG], []),
    ("A hot \n dog eats a dog", [DOG, HOT_DOG], [("hot dog", ("Hotdog",)), ("dog", ("Hund",))]),
    ("a hot, dog", [HOT_DOG], []),
    ("the Acme-2 and the acme-2", ["Acme-2"], [("Acme-2", ("Acme-2",)), ("Acme-2", ("acme-2",))]),
    ("Polish and polish", [Term("Polish", ("polnisch",), case_sensitive=True)], [("Polish", ("polnisch",))]),
    ("GROSSE Straße", [Term("große STRASSE", ("street",))], [("große STRASSE", ("street",))]),
    ("cafe\u0301", [Term("café", ("Kaffee",))], [("café", ("Kaffee",))]),
    ("कि", ["क"], []),
    ("黑猫和iPhone手机", [Term("猫", ("cat",)), "iphone"], [("猫", ("cat",)), ("iphone", ("iPhone",))]),
    ("ฉันรักแมวมาก", [Term("แมว", ("cat",))], [("แมว", ("cat",))]),
    ("ຂ້ອຍຮັກແມວ", [Term("ແມວ", ("cat",))], [("ແມວ", ("cat",))]),
    ("ខ្ញុំស្រឡាញ់ឆ្មា។", [Term("ឆ្មា", ("cat",))], [("ឆ្មា", ("cat",))]),
    ("ကြောင်ချစ်", [Term("ကြောင်", ("cat",))], [("ကြောင်", ("cat",))]),
    ("私はねこが好き", [Term("ねこ", ("cat",))], [("ねこ", ("cat",))]),
    ("ཞི་མི་ལ", [Term("མི", ("man",))], [("མི", ("man",))]),
    ("가나다 ეფა", ["나", "ფ"], []),
    ("one two three", ["one two", "two three"], [("one two", ("one two",))]),
    ("dog", [DOG, Term("Dog", ("Köter",))], [("dog", ("Hund",))]),
]


@pytest.mark.parametrize(("text", "terms", "expected"), MATCHES)
def test_terms_match_whole_words_the_longest_first(text: str, terms: list[Any], expected: list[Any]) -> None:
    assert found(text, *terms) == expected


@pytest.mark.parametrize(
    ("answer", "num_matches", "is_met"),
    [
        ("Ein Hund.", 1, True),
        ("Ein Hund.", 2, False),
        ("Hunde sehen einen hund.", 2, True),
        ("Ein Seehund.", 1, False),
        ("犬Hund犬", 1, True),
        ("", 1, False),
    ],
)
def test_a_term_is_met_by_words_that_begin_with_a_target(answer: str, num_matches: int, is_met: bool) -> None:
    assert unmet_terms([Match("dog", ("Hund", "Köter"))] * num_matches, answer) == ([] if is_met else ["dog"])


@pytest.fixture(scope="module")
def bundle(shipped_bundle: Callable[..., Path]) -> Bundle:
    return Bundle.open(shipped_bundle("en-de"))


def options(bundle: Bundle, text: str, *terms: Term, max_slots: int = 8, **search: Any) -> tuple[SearchOptions, Sequence[Match]]:
    return with_terms(SearchOptions(**search), text, [index_of(terms)], bundle.tokenizers().target, max_slots)


def test_targets_are_tokens_within_a_sentence_and_beams_fit_the_slots(bundle: Bundle) -> None:
    tokenizer = bundle.tokenizers().target
    search, _ = options(bundle, "a dog", Term("dog", ("hund", "Hündin")))
    assert {tokenizer.decode(ids) for ids in search.terms[0]} == {"hund", "Hund", "Hündin"}
    assert all(ids == tokenizer.encode(f"ein {tokenizer.decode(ids)}")[1:] for ids in search.terms[0])
    assert (search.num_beams, search.num_slots) == (NUM_BEAMS, NUM_BEAMS)
    assert options(bundle, "a dog", DOG, num_beams=6)[0].num_beams == 6
    assert options(bundle, "a dog", DOG, max_slots=2)[0].num_beams == 2
    assert options(bundle, "a cat", DOG)[0] == SearchOptions(), "a text without terms is answered as always"
    search, matches = options(bundle, "dog " * 50, DOG)
    assert len(matches) == 50 and len(search.terms) == MAX_REQUIRED


TEXTS = ["A man and a dog run through the snow.", "Two women sit on a bench.", "A dog barks.", "The man drives a red car."]
TERMS = [Term("man", ("Herr",)), Term("women", ("Damen",)), Term("dog", ("Köter",)), Term("barks", ("Klavier",)), Term("a")]


def test_answers_with_terms_are_the_same_bits_alone_and_beside_others(bundle: Bundle) -> None:
    tokenizers, eos_id = bundle.tokenizers(), bundle.manifest.eos_id
    engine = load_engine(bundle, Limits(max_slots=12), 1, is_warmed_up=False)

    def answers(chosen: Sequence[int]) -> dict[int, list[Answer]]:
        for number in chosen:
            text, kind = TEXTS[number % len(TEXTS)], number // len(TEXTS)
            plain: list[dict[str, Any]] = [{}, {"num_beams": 3}]
            search = SearchOptions(**plain[kind]) if kind < len(plain) else options(bundle, text, *TERMS, num_beams=kind)[0]
            engine.submit(Request(number, [*tokenizers.source.encode(text), eos_id], 24, 0.0, search=search))
        ended: dict[int, list[Answer]] = {}
        while engine.has_work:
            engine.step()
            ended |= {each.id: each.answers for each in engine.take_report().finished}
        return ended

    everything = range(4 * len(TEXTS))
    together = answers(everything)
    for number in everything[len(TEXTS) :]:
        assert answers([number]) == {number: together[number]}
    for number in everything[2 * len(TEXTS) :]:
        _, matches = options(bundle, TEXTS[number % len(TEXTS)], *TERMS)
        assert unmet_terms(matches, tokenizers.target.decode(together[number][0].token_ids)) == []


def refusal(model: Any, **fields: Any) -> str:
    async def validate() -> None:
        await Validator().validate(GenerateRequest(text="A dog.", **fields), Call.begin("toy/a"), model)

    with pytest.raises(InvalidRequest) as caught:
        asyncio.run(validate())
    return caught.value.message


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ([Term("a")] * (MAX_TERMS + 1), f"terms: {MAX_TERMS + 1} terms; at most {MAX_TERMS} are allowed"),
        ([DOG, Term("a", ("b",) * (MAX_TARGETS + 1))], f"terms[1].targets: {MAX_TARGETS + 1} targets; at most {MAX_TARGETS} are"),
        ([Term("a" * (MAX_CHARACTERS + 1))], f"terms[0].source: {MAX_CHARACTERS + 1} characters; at most {MAX_CHARACTERS} are"),
        ([Term("a", ("b", "c" * 200))], "terms[0].targets: 200 characters"),
        ([Term(" ")], "terms[0].source: is blank"),
        ([Term("a", ("",))], "terms[0].targets: is blank"),
    ],
)
def test_terms_are_bounded(make_model: Any, terms: list[Term], message: str) -> None:
    assert refusal(make_model(), terms=tuple(terms)).startswith(message)


def test_searches_without_beams_have_no_terms(make_model: Any) -> None:
    assert refusal(make_model(), terms=(DOG,), do_sample=True) == "terms: does not go with do_sample"
    assert refusal(make_model(), terms=(DOG,), return_alternatives=True) == "terms: does not go with return_alternatives"


def test_characters_are_counted_as_they_are_compared() -> None:
    with pytest.raises(InvalidRequest, match=r"terms\[0\].targets: 144 characters; at most 128 are allowed"):
        index_of((Term("a", ("\ufdfa" * 8,)),))


def test_targets_are_counted_from_the_start_of_words_without_overlap() -> None:
    match = Match("a", ("ab", "abab"))
    assert unmet_terms([match] * 2, "ababx ab") == [] and unmet_terms([match] * 3, "ababx ab") == ["a"]
    assert unmet_terms([Match("a", ("b",))], "ab _b") == ["a"] and unmet_terms([Match("a", ("+",))], "a+b") == []
