"""Finding a model's language by what callers call it."""

import subprocess
import sys

import pytest

from dragoman.model.generation import Language
from dragoman.model.languages import LanguageTable

TABLE = LanguageTable(
    [
        Language(code="deu_Latn", names=["de", "deu", "german", "de_latn"]),
        Language(code="zho_Hans", names=["zh", "zh_hans", "zh_cn"]),
        Language(code="zho_Hant", names=["zh_hant", "zh_tw"]),
        Language(code="pt_br", names=["brazilian_portuguese"]),
        Language(code="es", names=["es_419"]),
    ]
)


@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ("deu_Latn", "deu_Latn"),
        ("DEU-LATN", "deu_Latn"),
        ("de", "deu_Latn"),
        ("de_AT", "deu_Latn"),
        ("de-Latn-AT", "deu_Latn"),
        (" German ", "deu_Latn"),
        ("zh-TW", "zho_Hant"),
        ("zh_Hant_HK", "zho_Hant"),
        ("zh-SG", "zho_Hans"),
        ("Brazilian Portuguese", "pt_br"),
        ("pt-BR", "pt_br"),
        ("es-419", "es"),
        ("es-005", "es"),
        ("pt", None),
        ("pt-PT", None),
        ("de-Cyrl", None),
        ("zh-Latn", None),
        ("AT", None),
        ("", None),
        ("_", None),
        ("de" * 1000, None),
        ("de-de-de-de", "deu_Latn"),
    ],
)
def test_finds_what_is_meant(asked: str, found: str | None) -> None:
    language = TABLE.find(asked)
    assert (language and language.code) == found


def test_default_is_the_one_that_is_said_or_the_only_one() -> None:
    german, french = Language(code="de"), Language(code="fr")
    assert LanguageTable([german]).default is german
    assert LanguageTable([german, french]).default is None
    assert LanguageTable([german, french], "fr").default is french
    assert LanguageTable([]).default is None
    with pytest.raises(ValueError, match="'en' is none"):
        LanguageTable([german], "en")


def test_server_side_needs_no_torch_and_no_langcodes() -> None:
    heavy = "torch", "langcodes", "transformers"
    code = f"import sys, dragoman.model.languages; sys.exit(any(name in sys.modules for name in {heavy}))"
    subprocess.run([sys.executable, "-c", code], check=True)
