"""The languages that a user says a checkpoint has."""

import sys

import pytest

from dragoman.model.errors import InputError
from dragoman.model.generation import Language, Languages
from dragoman.model.importers.asked_languages import with_asked_languages

MANY = Languages(
    source=[Language(code="en"), Language(code="de", names=["german"])],
    target=[Language(code="fr"), Language(code="it"), Language(code="ro")],
)


def test_a_checkpoint_without_languages_gets_the_ones_that_are_said() -> None:
    found = with_asked_languages(None, "en", "deu")
    assert found is not None
    assert [found.source[0].code, found.target[0].code] == ["en", "deu"]
    assert "german" in found.target[0].names
    assert with_asked_languages(None, "", "de") == Languages(target=[with_asked_languages(None, "", "de").target[0]])  # type: ignore[union-attr]


@pytest.mark.parametrize("languages", [None, MANY])
def test_nothing_said_changes_nothing(languages: Languages | None) -> None:
    assert with_asked_languages(languages, "", "") is languages


def test_of_several_languages_it_becomes_the_default() -> None:
    found = with_asked_languages(MANY, "German", "it-IT")
    assert found is not None
    assert (found.default_source, found.default_target) == ("de", "it")
    assert (found.source, found.target) == (MANY.source, MANY.target)


def test_the_only_language_needs_no_default() -> None:
    pair = Languages(source=[Language(code="en")], target=[Language(code="de")])
    assert with_asked_languages(pair, "en-GB", "de") == pair


@pytest.mark.parametrize(
    ("languages", "target", "reason"),
    [
        (MANY, "de", "--target-language: the model has no 'de'; it has fr, it, ro"),
        (Languages(target=[Language(code="de")]), "fr", "--target-language: the model has no 'fr'; it has de"),
        (None, "\n", "no code of a language"),
        (None, "x" * 65, "no code of a language"),
    ],
)
def test_other_languages_are_refused(languages: Languages | None, target: str, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        with_asked_languages(languages, "", target)


def test_the_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "dragoman.model.importers.language_names", raising=False)
    monkeypatch.setitem(sys.modules, "langcodes", None)
    with pytest.raises(InputError, match=r"needs langcodes: pip install 'dragoman\[import\]'"):
        with_asked_languages(None, "en", "")
