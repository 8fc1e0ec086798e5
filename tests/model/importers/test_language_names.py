"""Codes that mean one language, as people write them, and languages that a user gives a checkpoint."""

import sys

import pytest

from dragoman.model.errors import InputError
from dragoman.model.generation import Language, Languages, spelling
from dragoman.model.importers.asked_languages import with_asked_languages
from dragoman.model.importers.language_codes import M2M100_LANGUAGES, MBART50_LANGUAGES, NLLB_LANGUAGES
from dragoman.model.importers.language_names import english_name, is_group, other_names
from dragoman.model.languages import LanguageTable


def table(*codes: str) -> LanguageTable:
    return LanguageTable([Language(code=code, names=names) for code, names in zip(codes, other_names(codes), strict=True)])


def find(model: LanguageTable, asked: str) -> str:
    found = model.find(asked)
    return found.code if found else "none"


NLLB = table(*NLLB_LANGUAGES)
SPELLINGS = """
    zho_Hans: zh, zh-CN, zh_SG, Chinese, cmn
    zho_Hant: zh-Hant, zh-TW, zh_HK, Traditional Chinese, Chinese (Traditional)
    yue_Hant: yue
    srp_Cyrl: sr
    ace_Latn: ace
    ace_Arab: ace-Arab, Acehnese (Arabic)
    kas_Arab: ks
    knc_Latn: kr
    arb_Arab: ar, ar-EG
    arz_Arab: arz
    pes_Arab: fa
    prs_Arab: prs
    nob_Latn: no
    nno_Latn: nn
    als_Latn: sq
    pbt_Arab: ps
    kmr_Latn: ku
    heb_Hebr: iw
    swh_Latn: sw, Swahili
    tgl_Latn: tl
    none: zh-Latn, de-Cyrl, tmh, xx
"""


@pytest.mark.parametrize("line", SPELLINGS.strip().splitlines())
def test_nllb_is_asked_in_the_codes_that_people_use(line: str) -> None:
    code, names = line.strip().split(": ")
    assert {name: find(NLLB, name) for name in names.split(", ")} == dict.fromkeys(names.split(", "), code)


@pytest.mark.parametrize("asked", ["de", "deu", "ger", "deu_Latn", "de_DE", "de-DE", "de-AT", "German", "GERMAN", "de-Latn-CH"])
def test_german_is_one_language_however_it_is_spelt(asked: str) -> None:
    for model in (NLLB, table(*M2M100_LANGUAGES), table(*MBART50_LANGUAGES), table(">>", "deu", "fra")):
        assert find(model, asked) in ("de", "deu", "deu_Latn", "de_DE")


@pytest.mark.parametrize("codes", [NLLB_LANGUAGES, M2M100_LANGUAGES, MBART50_LANGUAGES])
def test_no_spelling_means_two_languages(codes: tuple[str, ...]) -> None:
    names = other_names(codes)
    languages = [Language(code=code, names=own) for code, own in zip(codes, names, strict=True)]
    Languages(source=languages, target=languages)  # refuses a spelling that means two
    assert all(spelling(code) not in own for code, own in zip(codes, names, strict=True))


def test_every_two_letter_language_of_m2m100_is_one_of_nllb() -> None:
    """Where one model's code is known, the other's is found, but for the three that NLLB lacks."""
    assert {code for code in M2M100_LANGUAGES if NLLB.find(code) is None} == {"br", "fy", "ns"}


def test_variants_that_the_model_has_apart_stay_apart() -> None:
    model = table("fr", "fr_BE", "es", "es_MX", "pt", "pt_br", "cmn_Hans", "cmn_Hant", "zho", "srp_Latn")
    asked = {"French": "fr", "fr-CA": "fr", "fr-BE": "fr_BE", "French (Belgium)": "fr_BE", "es_419": "es", "pt-BR": "pt_br"}
    asked |= {"pt-PT": "pt", "zh": "zho", "zh-Hant": "cmn_Hant", "zh-Hans": "cmn_Hans", "sr": "srp_Latn", "sr-Cyrl": "none"}
    assert {name: find(model, name) for name in asked} == asked
    # A group's name is its only member's, and nobody's where several are as good.
    assert (find(table("ary", "arz"), "ar"), find(table("ary", "fra"), "ar")) == ("none", "ary")


def test_aliases_groups_and_unknown_codes() -> None:
    ((names),) = other_names(["ns"], {"ns": "nso"})
    assert "nso" in names and "northern_sotho" in names and other_names(["ns"]) == [[]]
    groups = ["roa", "mul", "ROMANCE", "xx", ""]
    assert [code for code in (*groups, "de", "ar", "zho_Hant") if is_group(code)] == groups
    assert [english_name(code) for code in ("de", "ron", "pt_BR", "xx")] == ["German", "Romanian", "Portuguese", ""]


PAIR = Languages(source=[Language(code="en")], target=[Language(code="de")])
MANY = Languages(
    source=[Language(code="en"), Language(code="de", names=["german"])],
    target=[Language(code="fr"), Language(code="it"), Language(code="ro")],
)


def test_a_user_gives_a_checkpoint_its_languages() -> None:
    """A checkpoint without languages gets them; of several, one becomes the default; the only one needs no default."""
    found = with_asked_languages(None, "en", "deu")
    assert found is not None and [found.source[0].code, found.target[0].code] == ["en", "deu"]
    assert "german" in found.target[0].names
    target = with_asked_languages(None, "", "de")
    assert target is not None and (target.source, len(target.target)) == ([], 1)
    assert with_asked_languages(None, "", "") is None and with_asked_languages(MANY, "", "") is MANY
    found = with_asked_languages(MANY, "German", "it-IT")
    assert found is not None and (found.default_source, found.default_target) == ("de", "it")
    assert (found.source, found.target) == (MANY.source, MANY.target)
    assert with_asked_languages(PAIR, "en-GB", "de") == PAIR


@pytest.mark.parametrize(
    ("languages", "target", "reason"),
    [
        (MANY, "de", "--target-language: the model has no 'de'; it has fr, it, ro"),
        (PAIR, "fr", "--target-language: the model has no 'fr'; it has de"),
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
