"""Codes that mean one language, as people write them."""

from pathlib import Path

import pytest

from dragoman.model.checkpoint_folder import CheckpointFolder
from dragoman.model.generation import Language, Languages, spelling
from dragoman.model.importers.language_codes import M2M100_LANGUAGES, MBART50_LANGUAGES, NLLB_LANGUAGES
from dragoman.model.importers.language_names import english_name, is_group, other_names
from dragoman.model.languages import LanguageTable

PRETRAINED = Path(__file__).parents[3] / "model" / "pretrained"
NLLB = LanguageTable(
    [Language(code=code, names=names) for code, names in zip(NLLB_LANGUAGES, other_names(NLLB_LANGUAGES), strict=True)]
)


def table(*codes: str) -> LanguageTable:
    return LanguageTable([Language(code=code, names=names) for code, names in zip(codes, other_names(codes), strict=True)])


@pytest.mark.parametrize("asked", ["de", "deu", "ger", "deu_Latn", "de_DE", "de-DE", "de-AT", "German", "GERMAN", "de-Latn-CH"])
def test_german_is_one_language_however_it_is_spelt(asked: str) -> None:
    for model in (NLLB, table(*M2M100_LANGUAGES), table(*MBART50_LANGUAGES), table(">>", "deu", "fra")):
        found = model.find(asked)
        assert found is not None and found.code in ("de", "deu", "deu_Latn", "de_DE")


@pytest.mark.parametrize(
    ("asked", "code"),
    [
        ("zh", "zho_Hans"),
        ("zh-CN", "zho_Hans"),
        ("zh_SG", "zho_Hans"),
        ("Chinese", "zho_Hans"),
        ("cmn", "zho_Hans"),
        ("zh-Hant", "zho_Hant"),
        ("zh-TW", "zho_Hant"),
        ("zh_HK", "zho_Hant"),
        ("Traditional Chinese", "zho_Hant"),
        ("Chinese (Traditional)", "zho_Hant"),
        ("yue", "yue_Hant"),
        ("sr", "srp_Cyrl"),
        ("ace", "ace_Latn"),
        ("ace-Arab", "ace_Arab"),
        ("Acehnese (Arabic)", "ace_Arab"),
        ("ks", "kas_Arab"),
        ("kr", "knc_Latn"),
        ("ar", "arb_Arab"),
        ("ar-EG", "arb_Arab"),
        ("arz", "arz_Arab"),
        ("fa", "pes_Arab"),
        ("prs", "prs_Arab"),
        ("no", "nob_Latn"),
        ("nn", "nno_Latn"),
        ("sq", "als_Latn"),
        ("ps", "pbt_Arab"),
        ("ku", "kmr_Latn"),
        ("iw", "heb_Hebr"),
        ("sw", "swh_Latn"),
        ("Swahili", "swh_Latn"),
        ("tl", "tgl_Latn"),
        ("zh-Latn", None),
        ("de-Cyrl", None),
        ("tmh", None),
        ("xx", None),
    ],
)
def test_nllb_is_asked_in_the_codes_that_people_use(asked: str, code: str | None) -> None:
    found = NLLB.find(asked)
    assert (found and found.code) == code


@pytest.mark.parametrize("codes", [NLLB_LANGUAGES, M2M100_LANGUAGES, MBART50_LANGUAGES])
def test_no_spelling_means_two_languages(codes: tuple[str, ...]) -> None:
    languages = [Language(code=code, names=names) for code, names in zip(codes, other_names(codes), strict=True)]
    Languages(source=languages, target=languages)  # refuses a spelling that means two
    assert all(spelling(code) not in names for code, names in zip(codes, other_names(codes), strict=True))


def test_every_two_letter_language_of_m2m100_is_one_of_nllb() -> None:
    """Where one model's code is known, the other's is found, but for what NLLB does not have."""
    missing = {code for code in M2M100_LANGUAGES if NLLB.find(code) is None}
    assert missing == {"br", "fy", "ns"}


def test_what_the_model_tells_apart_stays_apart() -> None:
    model = table("fr", "fr_BE", "es", "es_MX", "pt", "pt_br", "cmn_Hans", "cmn_Hant", "zho", "srp_Latn")
    asked = {
        "French": "fr",
        "fr-CA": "fr",
        "fr-BE": "fr_BE",
        "French (Belgium)": "fr_BE",
        "es_419": "es",
        "pt-BR": "pt_br",
        "pt-PT": "pt",
        "zh": "zho",
        "zh-Hant": "cmn_Hant",
        "zh-Hans": "cmn_Hans",
        "sr": "srp_Latn",
        "sr-Cyrl": None,
    }
    assert {name: (found := model.find(name)) and found.code for name in asked} == asked


def test_a_group_goes_to_nobody_where_several_are_as_good() -> None:
    assert table("ary", "arz").find("ar") is None
    assert (found := table("ary", "fra").find("ar")) and found.code == "ary"


def test_aliases_are_a_models_own_codes() -> None:
    ((names),) = other_names(["ns"], {"ns": "nso"})
    assert "nso" in names and "northern_sotho" in names and other_names(["ns"]) == [[]]


def test_groups_and_unknown_codes_are_told_from_languages() -> None:
    assert [code for code in ("roa", "mul", "ROMANCE", "xx", "", "de", "ar", "zho_Hant") if is_group(code)] == [
        "roa",
        "mul",
        "ROMANCE",
        "xx",
        "",
    ]
    assert [english_name(code) for code in ("de", "ron", "pt_BR", "xx")] == ["German", "Romanian", "Portuguese", ""]


@pytest.mark.parametrize("name", ["en-de", "en-fr"])
def test_the_shipped_models_say_their_languages(name: str) -> None:
    languages = CheckpointFolder.load(PRETRAINED / name).languages
    assert languages is not None
    for side, code in zip((languages.source, languages.target), name.split("-"), strict=True):
        (language,) = side
        assert (language.code, language.names) == (code, other_names([code])[0])
