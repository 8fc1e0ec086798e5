"""Statements of checkpoints and bundles on generation, languages by the names that callers use, and settings of models."""

import json
from dataclasses import FrozenInstanceError
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dragoman.model.config import ModelConfig, ModelConfigError
from dragoman.model.generation import Defaults, Language, Languages, LanguageTable, Template, spelling

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
        (Languages, {"target": [{"code": "zh-CN"}, {"code": "zh_CN"}]}, "means two languages"),
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
        *(Language(code=code) for code in ("sr", "sr_RS", "sr_rs")),
    ]
)


FOUND = """
    deu_Latn: deu_Latn, DEU-LATN, de, de_AT, de-Latn-AT,  German , de-de-de-de
    zho_Hant: zh-TW, zh_Hant_HK
    zho_Hans: zh-SG
    pt_br: Brazilian Portuguese, pt-BR
    es: es-419, es-005
    sr_RS: sr-RS, sr_RS
    sr_rs: sr-rs
    None: SR_RS, sr-Rs, pt, pt-PT, de-Cyrl, zh-Latn, AT, , _
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


VOCAB = {"source_vocab_size": 100, "target_vocab_size": 100}


def test_fields_survive_json_and_left_out_ones_take_their_defaults() -> None:
    config = ModelConfig(**VOCAB, norm="pre", position_offset=2, dropout=0.25, has_output_bias=True, attention_dim=64)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert ModelConfig.from_dict(VOCAB) == ModelConfig.from_dict(VOCAB | {"attention_dim": None}) == ModelConfig(**VOCAB)
    assert ModelConfig(**VOCAB, d_model=96, num_heads=6).head_dim == 16
    wide = ModelConfig.from_dict(VOCAB | {"d_model": 100, "num_heads": 6, "attention_dim": 96, "positions": "learned"})
    assert wide.head_dim == 16
    assert ModelConfig(**VOCAB, pad_id=1, padding="predicted").eos_id == 1
    sizes = {"source_vocab_size": 50, "target_vocab_size": 100}  # the decoder may start with a token that only targets have
    assert ModelConfig(**sizes, is_embedding_shared=False, decoder_start_id=99).decoder_start_id == 99
    with pytest.raises(ModelConfigError, match="target_vocab_size"):
        ModelConfig.from_dict({"source_vocab_size": 100})
    with pytest.raises(FrozenInstanceError):
        config.d_model = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 4}, "unknown model setting: width"),
        ({"d_model": "512"}, "d_model must be int, not '512'"),
        ({"d_model": True}, "d_model must be int, not True"),
        ({"dropout": "0.1"}, "dropout must be int or float, not '0.1'"),
        ({"is_projection_tied": 1}, "is_projection_tied must be bool, not 1"),
        ({"norm": "middle"}, "norm must be one of pre, post, not 'middle'"),
        ({"activation": "tanh"}, "activation must be one of relu, gelu, gelu_tanh, silu, not 'tanh'"),
        ({"num_decoder_layers": 0}, "num_decoder_layers must be at least 1, not 0"),
        ({"max_source_positions": -1}, "max_source_positions must be at least 1, not -1"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), not 1.0"),
        ({"attention_dropout": float("nan")}, "attention_dropout must be in"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be positive, not 0.0"),
        ({"d_model": 100, "num_heads": 3}, "d_model 100 is not a multiple of num_heads 3"),
        ({"d_model": 9, "num_heads": 3}, "sinusoidal positions need an even d_model, not 9"),
        ({"position_offset": -1}, "position_offset must not be negative, not -1"),
        ({"norm_epsilon": float("inf")}, "norm_epsilon must be positive, not inf"),
        ({"attention_dim": "64"}, "attention_dim must be int or null, not '64'"),
        ({"attention_dim": 0}, "attention_dim 0 is not a multiple of num_heads 8"),
        ({"attention_dim": 100}, "attention_dim 100 is not a multiple of num_heads 8"),
        ({"has_relative_bias_per_layer": True}, "has_relative_bias_per_layer needs relative positions, not sinusoidal"),
        ({"positions": "relative", "position_offset": 2}, "position_offset 2 means nothing to relative positions"),
        ({"positions": "relative", "relative_buckets": 2}, "relative_buckets must be even and at least 4, not 2"),
        ({"positions": "relative", "relative_buckets": 7}, "relative_buckets must be even and at least 4, not 7"),
        ({"positions": "relative", "relative_max_distance": 16}, "relative_max_distance must be above 16"),
        ({"relative_buckets": 0}, "relative_buckets must be at least 1, not 0"),
        ({"source_vocab_size": 90, "is_embedding_shared": False, "pad_id": 95}, "pad_id 95 is outside the vocabulary of 90"),
        ({"source_vocab_size": 99}, "is_embedding_shared needs equal vocabularies, not 99 and 100"),
        ({"eos_id": 100}, "eos_id 100 is outside the vocabulary of 100"),
        ({"decoder_start_id": -1}, "decoder_start_id -1 is outside the vocabulary"),
        ({"pad_id": 1}, "pad_id and eos_id are both 1"),
    ],
)
def test_impossible_setting_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_dict(VOCAB | fields)
