"""Settings of generation: fields of a folder put together, Transformers' settings as defaults, and refusals by name."""

import copy
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import GenerationConfig

from dragoman.model.config import ModelConfig
from dragoman.model.generation import Defaults, Template
from dragoman.model.importers.defaults import Converted, Target, convert
from dragoman.model.importers.files import ForeignError
from dragoman.model.importers.generation import ForeignGeneration, generation_fields, read_generation
from dragoman.model.importers.languages import PromptOptions

MARIAN = {"</s>": 0, "<unk>": 1, ">>fra<<": 2, ">>deu<<": 3, "▁a": 4, "<pad>": 5}
T5_SUMMARY = {"prefix": "summarize: ", "num_beams": 4, "max_length": 200, "min_length": 30, "early_stopping": True}
T5_TASKS = {"summarization": T5_SUMMARY} | {
    f"translation_en_to_{code}": {"prefix": f"translate English to {name}: ", "num_beams": 4, "max_length": 300}
    for code, name in (("de", "German"), ("fr", "French"), ("ro", "Romanian"))
}


def network(**fields: Any) -> ModelConfig:
    sizes = {"source_vocab_size": 60, "target_vocab_size": 60, "d_model": 16, "num_heads": 2, "pad_id": 5, "eos_id": 0}
    return ModelConfig(**{**sizes, "decoder_start_id": 5, "max_target_positions": 64, **fields})


def read(path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None, **wishes: str) -> ForeignGeneration:
    return read_generation(path, network(), config, generation, {}, PromptOptions(**wishes))


def write(path: Path, name: str, content: object) -> None:
    (path / name).write_text(json.dumps(content))


def test_tasks_of_t5_are_chosen(tmp_path: Path) -> None:
    config = {"model_type": "t5", "task_specific_params": T5_TASKS}
    found = read(tmp_path, config, task="translation", target_language="fr")
    assert found.template == Template(task="translate {source} to {target}: ") and found.languages is not None
    assert [language.code for language in found.languages.target] == ["de", "fr", "ro"]
    assert (found.languages.default_target, found.defaults) == ("fr", Defaults(num_beams=4, max_new_tokens=64))
    for source, target in zip(found.languages.source * 3, found.languages.target, strict=True):
        task = T5_TASKS[f"translation_{source.code}_to_{target.code}"]
        assert found.template.task_text(source, target) == task["prefix"]
    found = read(tmp_path, config, {"num_beams": 2}, task="summarization")
    assert (found.template, found.languages) == (Template(task="summarize: "), None)
    assert found.defaults == Defaults(num_beams=4, max_new_tokens=64, min_new_tokens=29, early_stopping=True)
    found = read(tmp_path, config, {})
    assert (found.template, found.languages) == (Template(), None)
    assert any("summarization, translation_en_to_de" in line for line in found.fields)
    tasks = {"translation_en_to_de": {"prefix": "to German: "}, "translation_en_to_fr": {"prefix": "to French: "}}
    differing = {"model_type": "t5", "task_specific_params": tasks}
    with pytest.raises(ForeignError, match="asked for in several ways, 'to French: ', 'to German: '; choose one"):
        read(tmp_path, differing, task="translation")
    assert read(tmp_path, differing, task="translation_en_to_fr").template.task == "to French: "


def of_task(prefix: object) -> dict[str, Any]:
    return {"model_type": "t5", "task_specific_params": {"x": {"prefix": prefix}}}


ONE_TOKEN: dict[str, object] = {"vocab.json": {"<s>": 1}}
TWICE = {"model_type": "t5", "task_specific_params": {"translation_en_to_zh_CN": {}, "translation_en_to_zh__CN": {}}}
MBART_50 = {"model_type": "mbart", "tokenizer_class": "MBart50Tokenizer"}


@pytest.mark.parametrize(
    ("config", "files", "wishes", "reason"),
    [
        ({"model_type": "t5"}, {}, {"task": "x"}, "no task 'x'; it has none"),
        *((of_task(prefix), {}, {"task": "x"}, "prefix is no text") for prefix in (7, "{target}", "\ud800", "y" * 2000)),
        (TWICE, {}, {"task": "translation"}, "means two languages"),
        ({"model_type": "t5", "tokenizer_class": "NoneTokenizer"}, {}, {}, "tokenizer_class 'NoneTokenizer' is not known"),
        ({"model_type": "bart"}, {}, {}, "no token '<s>'"),
        ({"model_type": "bart"}, {"vocab.json": {"<s>": 60}}, {}, "'<s>' has the id 60, the model room for 60"),
        ({"model_type": "bart", "forced_bos_token_id": 60}, ONE_TOKEN, {}, "forced_bos_token_id 60 is no token"),
        ({"model_type": "bart", "eos_token_id": 9}, ONE_TOKEN, {}, "config.json: eos_token_id is 9"),
        ({"model_type": "marian"}, {"vocab.json": {">>a<<": 60, ">>b<<": 2}}, {}, "'a' has the id 60"),
        ({"model_type": "marian"}, {"vocab.json": {">>a<<": -1}}, {}, "vocab.json: '>>a<<' and -1 are not a token and its id"),
        ({"model_type": "marian"}, {"vocab.json": {f">>l{i}<<": 7 for i in range(1025)}}, {}, "has 1025 languages"),
        ({"model_type": "marian"}, {"vocab.json": []}, {}, "not a JSON object"),
        ({"model_type": "marian"}, {"vocab.json": MARIAN}, {"target_language": "it"}, "the model has no 'it'; it has fra, deu"),
        ({"model_type": "m2m_100"}, {}, {}, "0 languages"),
        (MBART_50, {"added_tokens.json": {"de_DE": "x"}}, {}, "added_tokens.json"),
        ({"model_type": "t5"}, {"tokenizer.json": {"model": {"vocab": [["a"], 7]}}}, {}, "tokenizer.json"),
    ],
)
def test_nonsense_is_refused_by_name(config: Any, files: Any, wishes: dict[str, str], reason: str, tmp_path: Path) -> None:
    for name, content in files.items():
        write(tmp_path, name, content)
    with pytest.raises(ForeignError) as refusal:
        read(tmp_path, config, **wishes)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 600


def test_fields_that_mean_nothing_do_nothing_and_another_start_is_the_templates(tmp_path: Path) -> None:
    for config in (
        {"model_type": None},
        {"model_type": "t5", "task_specific_params": [1]},
        {"model_type": "t5", "task_specific_params": {"x": 1}},
        {"model_type": "t5", "tokenizer_class": 7, "forced_bos_token_id": None},
        {"model_type": "marian", "max_length": "long", "num_beams": {}},
    ):
        found = read(tmp_path, config)
        assert (found.template, found.languages, found.defaults) == (Template(), None, Defaults())
    for start, template in ((7, Template(decoder_start_id=7)), (5, Template())):
        assert read(tmp_path, {"model_type": "t5"}, {"decoder_start_token_id": start}).template == template
    for start in (60, -1, [5, 5], "5", True):
        with pytest.raises(ForeignError, match="decoder_start_token_id"):
            read(tmp_path, {"model_type": "t5"}, {"decoder_start_token_id": start})


TARGET = Target(pad_id=0, eos_id=1, decoder_start_id=0, vocab_size=60, max_target_tokens=100)
FORCED = Target(pad_id=0, eos_id=1, decoder_start_id=1, vocab_size=60, max_target_tokens=100, num_forced=1)
BEAMS = {"num_beams": 4, "max_length": 50}
OPUS_MT: dict[str, Any] = {"bad_words_ids": [[0]], "bos_token_id": 1, "decoder_start_token_id": 0, "eos_token_id": 1}
OPUS_MT |= {"forced_eos_token_id": 1, "max_length": 51, "num_beams": 4, "pad_token_id": 0, "renormalize_logits": True}
BART_SUMMARY: dict[str, Any] = {"early_stopping": True, "length_penalty": 2.0, "no_repeat_ngram_size": 3, "num_beams": 4}
BART_LIMITS = {"max_length": 42, "min_length": 16, "forced_bos_token_id": 5, "forced_eos_token_id": 1}


def note(converted: Converted, name: str) -> str:
    (found,) = [line for line in converted.notes if name in line.split(": ")[0].split(", ")]
    return found


def lengths(most: int | None, least: int | None = None) -> dict[str, Any]:
    return {"max_new_tokens": most, "min_new_tokens": least}


SAMPLED, BANNED, RENORMALIZED = {"do_sample": True}, {"bad_words_ids": [[0]]}, {"renormalize_logits": True}
# Fields, the model, and the defaults and the padding that they become.
CONVERTED: list[tuple[dict[str, Any], Target, dict[str, Any]]] = [
    (OPUS_MT, TARGET, lengths(50) | {"num_beams": 4, "is_end_forced": True, "suppressed_tokens": [], "padding": "excluded"}),
    (BART_SUMMARY | BART_LIMITS, FORCED, lengths(40, 14) | {"is_end_forced": True} | BART_SUMMARY),
    ({"max_length": 20}, TARGET, lengths(19)),
    ({"max_length": 20}, FORCED, lengths(18)),
    ({"max_new_tokens": 20}, TARGET, lengths(20)),
    ({"max_new_tokens": 20, "max_length": 5}, FORCED, lengths(19)),
    ({"max_length": 512}, TARGET, lengths(100)),
    ({"max_length": 512}, FORCED, lengths(99)),
    ({"max_length": 20, "min_length": 5}, TARGET, lengths(19, 4)),
    ({"max_length": 20, "min_length": 5}, FORCED, lengths(18, 3)),
    ({"max_length": 20, "min_length": 1}, FORCED, lengths(18)),
    ({"max_length": 20, "min_new_tokens": 5, "min_length": 12}, TARGET, lengths(19, 5)),
    ({"max_length": 20, "min_new_tokens": 5}, FORCED, lengths(18, 4)),
    ({"max_length": 20, "min_length": 40}, TARGET, lengths(19, 18)),
    ({"max_length": 20, "begin_suppress_tokens": [1]}, TARGET, lengths(19, 1)),
    ({"max_length": 20, "begin_suppress_tokens": [1], "min_length": 9}, TARGET, lengths(19, 8)),
    ({"min_length": 400}, FORCED, lengths(None, 98)),
    *(({"max_length": most}, target, lengths(None)) for most, target in ((1, TARGET), (2, FORCED), (True, TARGET), (-5, TARGET))),
    (BEAMS, TARGET, {"padding": "predicted", "suppressed_tokens": []}),
    (BEAMS | BANNED, TARGET, {"padding": "masked", "suppressed_tokens": []}),
    (BEAMS | BANNED | RENORMALIZED, TARGET, {"padding": "excluded", "suppressed_tokens": []}),
    (BEAMS | RENORMALIZED, TARGET, {"padding": "predicted", "suppressed_tokens": []}),
    ({"bad_words_ids": [[0], [7], [1], [8, 9]]}, TARGET, {"padding": "masked", "suppressed_tokens": [7]}),
    ({"bad_words_ids": [[7]], "suppress_tokens": [9, 8, 7]}, TARGET, {"padding": "predicted", "suppressed_tokens": [7, 8, 9]}),
    ({"suppress_tokens": [0, 60, -1]}, TARGET, {"padding": "masked", "suppressed_tokens": []}),
    *(({name: value}, TARGET, {"suppressed_tokens": []}) for name, value in (("suppress_tokens", "all"), ("bad_words_ids", [7]))),
    *(({"repetition_penalty": 1.0} | more, TARGET, {"repetition_penalty": None}) for more in ({}, SAMPLED, {"num_beams": 1})),
    *(({"no_repeat_ngram_size": size}, TARGET, {"no_repeat_ngram_size": found}) for size, found in ((100, 100), (101, None))),
    (SAMPLED, TARGET, {"do_sample": True, "top_k": 50}),
    (SAMPLED | {"top_k": 0}, TARGET, {"do_sample": True, "top_k": None}),
    (SAMPLED | {"top_k": 1000}, TARGET, {"top_k": 60}),
    ({"temperature": 0.7, "top_p": 0.9}, TARGET, {"temperature": 0.7, "top_p": 0.9, "do_sample": None}),
    (SAMPLED | {"num_beams": 4, "top_k": 5}, TARGET, {"do_sample": None}),
    ({"num_return_sequences": 3}, TARGET, {"num_return_sequences": None}),
    *(({"num_return_sequences": 3} | more, TARGET, {"num_return_sequences": 3}) for more in ({"num_beams": 4}, SAMPLED)),
]


@pytest.mark.parametrize(("fields", "target", "expected"), CONVERTED, ids=str)
def test_settings_become_the_defaults_of_the_same_meaning(fields: Any, target: Target, expected: dict[str, Any]) -> None:
    converted = convert(fields, target)
    assert fields is not OPUS_MT or not [line for line in converted.notes if "left out;" in line or "differ" in line]
    found = {name: getattr(converted if name == "padding" else converted.defaults, name) for name in expected}
    assert found == expected


REASONS: dict[str, tuple[Any, str]] = {
    "bad_words_ids": ([[8, 9]], "several tokens cannot be ruled out"),
    "begin_suppress_tokens": ([1, 7], "not offered"),
    "early_stopping": ("never", "not offered"),
    "forced_eos_token_id": (7, "not the model's end-of-sequence"),
    "renormalize_logits": (True, "min_length"),
    "suppress_tokens": ([61], "no tokens of the model"),
    "diversity_penalty": (0.5, "not offered"),
    "max_time": (3.0, "not offered"),
    "min_p": (0.1, "no effect without do_sample"),
    "typical_p": (1.0, "no effect"),
    "use_cache": (True, "no effect"),
    "frobnicate": ({"x": 1}, "not known"),
    "eos_token_id": ([1, 7], "end with 1 only"),
}


def test_a_setting_that_is_not_offered_is_named_with_the_reason() -> None:
    fields = BEAMS | {"min_length": 5} | {name: value for name, (value, _) in REASONS.items()}
    converted = convert(fields, TARGET)
    assert [name for name, (_, reason) in REASONS.items() if reason not in note(converted, name)] == []
    assert converted.defaults == Defaults(num_beams=4, max_new_tokens=49, min_new_tokens=4)
    large = Target(pad_id=0, eos_id=1, decoder_start_id=0, vocab_size=600, max_target_tokens=100)
    converted = convert({"max_length": 50, "suppress_tokens": list(range(2, 300))}, large)
    assert converted.defaults == Defaults(max_new_tokens=49) and any("at most 256" in line for line in converted.notes)
    with pytest.raises(ForeignError, match=r"generation_config\.json: eos_token_id is 7"):
        convert({"eos_token_id": 7}, TARGET)
    for more in ({}, SAMPLED, {"num_beams": 1}):
        with pytest.raises(ForeignError, match=r"generation_config\.json: repetition_penalty 1\.2 without beams"):
            convert({"repetition_penalty": 1.2} | more, TARGET)


PENALTY, NGRAMS = {"repetition_penalty": 1.2}, {"no_repeat_ngram_size": 3}


@pytest.mark.parametrize(
    ("fields", "target", "said"),
    [
        (PENALTY, TARGET, "padding is penalised"),
        (PENALTY, FORCED, "end-of-sequence is penalised"),
        (PENALTY | BANNED, TARGET, ""),
        (NGRAMS, TARGET, "begin with the decoder's start token"),
        (NGRAMS, FORCED, ""),
        (NGRAMS | BANNED, TARGET, ""),
        ({"no_repeat_ngram_size": 1}, FORCED, "never be generated"),
    ],
)
def test_differences_of_repetition_and_ngrams_are_named(fields: dict[str, Any], target: Target, said: str) -> None:
    converted, (name, value) = convert(BEAMS | fields, target), next(iter(fields.items()))
    assert getattr(converted.defaults, name) == value
    assert said in note(converted, name) if said else note(converted, name) == f"{name}: {value}"


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e300, "2", [1], {}, -1.0, 10**400])
@pytest.mark.parametrize("name", ["temperature", "top_p", "length_penalty", "num_beams", "top_k", "no_repeat_ngram_size"])
def test_values_that_mean_nothing_are_left_out(name: str, value: Any) -> None:
    converted = convert({"max_length": 50, name: value}, TARGET)
    if (name, value) not in (("length_penalty", -1.0), ("top_k", 10**400), ("no_repeat_ngram_size", 10**400)):
        assert converted.defaults == Defaults(max_new_tokens=49) and "left out" in note(converted, name)


def test_fields_of_config_json_count_where_there_is_no_other_file() -> None:
    config: dict[str, Any] = {"model_type": "bart", "num_beams": 4, "max_length": 30, "bos_token_id": 3}
    config |= {"force_bos_token_to_be_generated": True}
    config["task_specific_params"] = {"summarization": {"num_beams": 6, "min_length": 9}}
    plain = generation_fields("x", config, None)
    assert plain.fields == {"num_beams": 4, "max_length": 30, "forced_bos_token_id": 3, "bos_token_id": 3}
    assert any("not chosen" in line for line in plain.notes)
    task = generation_fields("x", config, None, "summarization")
    assert (task.fields["num_beams"], task.fields["min_length"], task.fields["max_length"]) == (6, 9, 30)
    beside = generation_fields("x", config, {"num_beams": 2, "max_length": None})
    assert beside.fields == {"num_beams": 2}
    for start in ("num_beams: config.json says 4", "max_length: config.json says 30"):
        assert [line for line in beside.notes if line.startswith(start)]
    with pytest.raises(ForeignError, match="no task 'poetry'; it has summarization"):
        generation_fields("x", config, None, "poetry")
    tasks = {f"translation_en_to_{code}": {"num_beams": num, "max_length": 9} for code, num in (("de", 4), ("fr", 5))}
    taken = generation_fields("x", {"task_specific_params": tasks}, {}, "translation")
    assert taken.fields == {"max_length": 9} and any(line.startswith("num_beams: differs") for line in taken.notes)


# Every field that Transformers knows, but for what is set at run time.
FIELDS = sorted(name for name in vars(GenerationConfig()) if not name.startswith("_"))
IDS = st.lists(st.integers(-1, 70), max_size=4)
VALUES = st.booleans() | st.integers(-5, 70) | st.floats() | st.text(max_size=5) | IDS | st.lists(IDS, max_size=4)
VALUES |= st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.dictionaries(st.sampled_from([*FIELDS, "unheard_of"]), VALUES, max_size=12), st.sampled_from([TARGET, FORCED]))
@example(dict.fromkeys(FIELDS, 2), TARGET)
def test_no_field_is_dropped_without_a_word_and_those_of_transformers_are_known(fields: dict[str, Any], target: Target) -> None:
    fields = {name: value for name, value in fields.items() if name not in ("eos_token_id", "repetition_penalty")}
    before = copy.deepcopy(fields)
    converted = convert(fields, target)
    assert repr(fields) == repr(before)
    for name in fields:
        lines = [line for line in converted.notes if name in line.split(": ")[0].split(", ")]
        assert lines and any("not known here" in line for line in lines) == (name == "unheard_of")
    assert all("\n" not in line and len(line) < 600 for line in converted.notes)


def test_half_a_character_is_no_setting() -> None:
    for name in ("length_penalty", "early_stopping", "num_beams", "temperature"):
        converted = convert({"max_length": 50, name: "\ud800"}, TARGET)
        assert "cannot be said here" in note(converted, name)
        note(converted, name).encode()
