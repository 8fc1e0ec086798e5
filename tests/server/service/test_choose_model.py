"""The model for requests that name languages and no model, among models of one pair, of many, and of none."""

from collections.abc import Callable
from typing import Any

import pytest

from dragoman.model.generation import Language, Languages
from dragoman.server.errors import InvalidRequest, UnknownPair
from dragoman.server.service.generate import choose_model, pairs_of

NAMES = {"en": ["eng", "english"], "de": ["deu", "german"], "fr": ["fra"], "cs": ["ces"]}


def languages(sources: str, targets: str, token: int | None = None, **defaults: str) -> Languages:
    source, target = (
        [Language(code=code, names=NAMES.get(code, []), source_prefix=[] if token is None else [token]) for code in side.split()]
        for side in (sources, targets)
    )
    return Languages(source=source, target=target, **defaults)


@pytest.fixture
def models(make_model: Callable[..., Any]) -> list[Any]:
    """Two of one pair, one of many that needs both, one that reads anything, and one without languages."""
    return [
        make_model("captions"),
        make_model("en-de", languages=languages("en", "de")),
        make_model("en-fr", languages=languages("en", "fr")),
        make_model("many", languages=languages("en de cs", "en de fr cs", 340)),
        make_model("reader", languages=languages("", "cs", 341)),
    ]


def refusal(kind: type[Exception], *arguments: Any) -> str:
    with pytest.raises(kind) as caught:
        choose_model(*arguments)
    return str(caught.value.message)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        *[("en", "de", "en-de"), ("ENG", "de-AT", "en-de"), ("en", "fr", "en-fr"), ("de", "fr", "many")],
        *[("english", "ces", "many"), ("", "de", "en-de"), ("", "fr", "en-fr"), ("", "cs", "reader")],
    ],
)
def test_the_model_that_translates_a_pair_is_chosen(models: list[Any], source: str, target: str, expected: str) -> None:
    assert choose_model(models, source, target).name == expected


def test_among_several_none_is_guessed(models: list[Any], make_model: Any) -> None:
    twice = [*models, make_model("en-de-rnn", languages=languages("en", "de"))]
    for source, shown in (("en", "from 'en' to 'de'"), ("", "to 'de'")):
        message = f"model: is missing; 2 translate {shown}: en-de, en-de-rnn"
        assert refusal(InvalidRequest, twice, source, "de") == message
    many = [make_model(name, languages=languages("en de", "en de", default_source="en")) for name in ("a", "b")]
    assert "2 translate from 'en' to 'de': a, b" in refusal(InvalidRequest, many, "en", "de")
    assert choose_model([*many, models[1]], "en", "de").name == "en-de", "a model of this pair alone comes first"
    assert "3 translate to 'de': a, b, en-de" in refusal(InvalidRequest, [*many, models[1]], "", "de")


def test_a_pair_without_a_model_is_refused_with_those_there_are(models: list[Any], make_model: Any) -> None:
    there = "en to de (en-de); en to fr (en-fr); cs, de, en to cs, de, en, fr (many); anything to cs (reader)"
    for source, target in (("fr", "en"), ("", "tlh"), ("fr", "cs")):
        shown = f"from {source!r} to {target!r}" if source else f"to {target!r}"
        message = f"target_language: no model translates {shown}; there: {there}"
        assert refusal(UnknownPair, models, source, target) == message
    assert "there: none that tells its languages" in refusal(UnknownPair, models[:1], "en", "de")
    assert "target_language: 200 characters" in refusal(InvalidRequest, models, "en", "x" * 200)
    codes = " ".join(f"x{number}" for number in range(300))
    told = pairs_of([make_model(f"m{number:03}", languages=languages(codes, codes)) for number in range(30)])
    assert len(told) < 1000 and told.endswith("; and those of 28 more") and "x0, x1" in told and "more to x0" in told
