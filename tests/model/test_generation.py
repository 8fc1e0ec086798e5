"""Statements of checkpoints and bundles on generation, and languages found by the names that callers use."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.model.generation import Defaults, Language, Languages, Template, spelling
from dragoman.model.languages import LanguageTable

GERMAN = Language(code="deu_Latn", names=["de", "german"], label="German", source_prefix=[7], target_prefix=[7])
FRENCH = Language(code="fra_Latn", names=["fr"])


def test_json_reads_back_and_left_out_fields_are_not_written() -> None:
    for value in (
        Template(task="translate {source} to {target}: ", source_prefix=[0], source_suffix=[2], decoder_start_id=3),
        Languages(source=[GERMAN, FRENCH], target=[GERMAN], default_source="fra_Latn", default_target="deu_Latn"),
        Defaults(num_beams=4, length_penalty=0.6, suppressed_tokens=[1, 2], is_end_forced=True, early_stopping=False),
    ):
        assert msgspec.json.decode(msgspec.json.encode(value), type=type(value)) == value
    assert msgspec.json.encode(Defaults(num_beams=4)) == b'{"num_beams":4}'
    assert msgspec.json.encode(Languages(target=[FRENCH])) == b'{"target":[{"code":"fra_Latn","names":["fr"]}]}'


@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (Template, {"prefix": [1]}, "unknown field"),
        (Languages, {"source": [{"code": "--"}]}, "without letters"),
        (Languages, {"source": [{"code": "de", "names": ["DE-de"]}]}, "must be written 'de_de'"),
        (Languages, {"target": [{"code": "zh-CN"}, {"code": "zh_cn"}]}, "means two languages"),
        (Languages, {"target": [{"code": "de", "names": ["x"]}, {"code": "fr", "names": ["x"]}]}, "'x' means two languages"),
        (Languages, {"target": [{"code": "de"}], "default_target": "fr"}, "no target language"),
        (Languages, {"target": [{"code": "de"}], "default_source": "de"}, "no source language"),
        (Defaults, {"do_sample": True, "num_beams": 2}, "do_sample"),
        (Defaults, {"num_return_sequences": 2}, "num_return_sequences"),
        (Defaults, {"num_return_sequences": 3, "num_beams": 2}, "num_return_sequences"),
        (Defaults, {"min_new_tokens": 5, "max_new_tokens": 5}, "min_new_tokens"),
    ],
)
def test_contradictions_are_refused(kind: type[msgspec.Struct], fields: dict[str, object], reason: str) -> None:
    """Bounds of each field are those of a bundle's manifest, and tested there."""
    with pytest.raises(msgspec.ValidationError, match=reason):
        msgspec.json.decode(msgspec.json.encode(fields), type=kind)


def test_task_is_filled_with_labels() -> None:
    template, tricky = Template(task="translate {source} to {target} {or} {}: "), Language(code="x", label="{target}")
    assert template.task_text(FRENCH, GERMAN) == "translate fra_Latn to German {or} {}: "
    assert Template(task="summarize: ").task_text(None, None) == "summarize: "
    assert Template(task="{source}>{target}").task_text(tricky, GERMAN) == "{target}>German"
    with pytest.raises(ValueError, match="needs a source language"):
        template.task_text(None, GERMAN)


@given(st.text())
def test_a_spelling_is_its_own_spelling(name: str) -> None:
    assert spelling(spelling(name)) == spelling(name)


TABLE = LanguageTable(
    [
        Language(code="deu_Latn", names=["de", "deu", "german", "de_latn"]),
        Language(code="zho_Hans", names=["zh", "zh_hans", "zh_cn"]),
        Language(code="zho_Hant", names=["zh_hant", "zh_tw"]),
        Language(code="pt_br", names=["brazilian_portuguese"]),
        Language(code="es", names=["es_419"]),
    ]
)


FOUND = """
    deu_Latn: deu_Latn, DEU-LATN, de, de_AT, de-Latn-AT,  German , de-de-de-de
    zho_Hant: zh-TW, zh_Hant_HK
    zho_Hans: zh-SG
    pt_br: Brazilian Portuguese, pt-BR
    es: es-419, es-005
    None: pt, pt-PT, de-Cyrl, zh-Latn, AT, , _
"""


@pytest.mark.parametrize("line", FOUND.strip().splitlines())
def test_languages_are_found_by_the_names_that_callers_use(line: str) -> None:
    code, names = line.strip().split(": ")
    for asked in names.split(", "):
        language = TABLE.find(asked)
        assert str(language and language.code) == code, asked
    assert TABLE.find("de" * 1000) is None


def test_default_is_the_one_that_is_said_or_the_only_one() -> None:
    german, french = Language(code="de"), Language(code="fr")
    assert LanguageTable([german]).default is german
    assert LanguageTable([german, french]).default is None
    assert LanguageTable([german, french], "fr").default is french
    assert LanguageTable([]).default is None
    with pytest.raises(ValueError, match="'en' is none"):
        LanguageTable([german], "en")
