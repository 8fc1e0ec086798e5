"""What a folder says of generation, put together, and folders that say nonsense."""

import json
from pathlib import Path
from typing import Any

import pytest

from dragoman.model.config import ModelConfig
from dragoman.model.generation import Defaults, Template
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.generation import ForeignGeneration, read_generation
from dragoman.model.importers.speech import Wishes

MARIAN = {"</s>": 0, "<unk>": 1, ">>fra<<": 2, ">>deu<<": 3, "▁a": 4, "<pad>": 5}
SUMMARY = {"prefix": "summarize: ", "num_beams": 4, "max_length": 200, "min_length": 30, "early_stopping": True}
T5_TASKS = {"summarization": SUMMARY} | {
    f"translation_en_to_{code}": {"prefix": f"translate English to {name}: ", "num_beams": 4, "max_length": 300}
    for code, name in (("de", "German"), ("fr", "French"), ("ro", "Romanian"))
}


def network(**fields: Any) -> ModelConfig:
    sizes = {"source_vocab_size": 60, "target_vocab_size": 60, "d_model": 16, "num_heads": 2, "pad_id": 5, "eos_id": 0}
    return ModelConfig(**{**sizes, "decoder_start_id": 5, "max_target_positions": 64, **fields})


def read(path: Path, config: dict[str, Any], generation: dict[str, Any] | None = None, **wishes: str) -> ForeignGeneration:
    return read_generation(path, network(), config, generation, {}, Wishes(**wishes))


def write(path: Path, name: str, content: object) -> None:
    (path / name).write_text(json.dumps(content))


def test_a_multilingual_marian(tmp_path: Path) -> None:
    write(tmp_path, "vocab.json", MARIAN)
    generation = {"num_beams": 6, "max_length": 33, "bad_words_ids": [[5]], "forced_eos_token_id": 0, "pad_token_id": 5}
    found = read(tmp_path, {"model_type": "marian", "num_beams": 4}, generation, target_language="de-AT", source_language="en")
    assert found.template == Template()
    assert found.languages is not None
    assert [(language.code, language.source_prefix) for language in found.languages.target] == [("fra", [2]), ("deu", [3])]
    assert found.languages.default_target == "deu"
    assert found.defaults == Defaults(num_beams=6, max_new_tokens=32, is_end_forced=True)
    assert found.padding == "masked"
    assert [line.split(":")[0] for line in found.fields] == [*generation, "num_beams"]


def test_another_start_is_the_templates(tmp_path: Path) -> None:
    assert read(tmp_path, {"model_type": "t5"}, {"decoder_start_token_id": 7}).template == Template(decoder_start_id=7)
    assert read(tmp_path, {"model_type": "t5"}, {"decoder_start_token_id": 5}).template == Template()
    for start in (60, -1, [5, 5], "5", True):
        with pytest.raises(ForeignError, match="decoder_start_token_id"):
            read(tmp_path, {"model_type": "t5"}, {"decoder_start_token_id": start})


def test_tasks_of_t5_are_chosen(tmp_path: Path) -> None:
    config = {"model_type": "t5", "task_specific_params": T5_TASKS}
    found = read(tmp_path, config, task="translation", target_language="fr")
    assert found.template == Template(task="translate {source} to {target}: ") and found.languages is not None
    assert [language.code for language in found.languages.target] == ["de", "fr", "ro"]
    assert found.languages.default_target == "fr"
    for source, target in zip(found.languages.source * 3, found.languages.target, strict=True):
        task = T5_TASKS[f"translation_{source.code}_to_{target.code}"]
        assert found.template.task_text(source, target) == task["prefix"]
    assert found.defaults == Defaults(num_beams=4, max_new_tokens=64)
    found = read(tmp_path, config, task="translation_en_to_ro")
    assert found.languages is not None
    ([source], [target]) = found.languages.source, found.languages.target
    assert found.template.task_text(source, target) == "translate English to Romanian: "
    found = read(tmp_path, config, {"num_beams": 2}, task="summarization")
    assert (found.template, found.languages) == (Template(task="summarize: "), None)
    assert found.defaults == Defaults(num_beams=4, max_new_tokens=64, min_new_tokens=29, early_stopping=True)
    found = read(tmp_path, config, {})
    assert (found.template, found.languages) == (Template(), None)
    assert any("summarization, translation_en_to_de" in line for line in found.fields)


def test_wordings_that_differ_are_to_be_chosen_from(tmp_path: Path) -> None:
    tasks = {"translation_en_to_de": {"prefix": "to German: "}, "translation_en_to_fr": {"prefix": "to French: "}}
    with pytest.raises(ForeignError, match="asked for in several ways, 'to French: ', 'to German: '; choose one"):
        read(tmp_path, {"model_type": "t5", "task_specific_params": tasks}, task="translation")
    one = read(tmp_path, {"model_type": "t5", "task_specific_params": tasks}, task="translation_en_to_fr")
    assert one.template.task == "to French: "


@pytest.mark.parametrize(
    ("config", "files", "wishes", "reason"),
    [
        ({"model_type": "t5"}, {}, {"task": "x"}, "no task 'x'; it has none"),
        ({"model_type": "t5", "task_specific_params": {"x": {"prefix": 7}}}, {}, {"task": "x"}, "prefix is no text"),
        ({"model_type": "t5", "task_specific_params": {"x": {"prefix": "{target}"}}}, {}, {"task": "x"}, "prefix is no text"),
        ({"model_type": "t5", "task_specific_params": {"x": {"prefix": "\ud800"}}}, {}, {"task": "x"}, "prefix is no text"),
        ({"model_type": "t5", "task_specific_params": {"x": {"prefix": "y" * 2000}}}, {}, {"task": "x"}, "prefix is no text"),
        (
            {"model_type": "t5", "task_specific_params": {"translation_en_to_de": {}, "translation_en_to_DE": {}}},
            {},
            {"task": "translation"},
            "means two languages",
        ),
        ({"model_type": "t5", "tokenizer_class": "NoneTokenizer"}, {}, {}, "tokenizer_class 'NoneTokenizer' is not known"),
        ({"model_type": "bart"}, {}, {}, "no token '<s>'"),
        ({"model_type": "bart"}, {"vocab.json": {"<s>": 60}}, {}, "'<s>' has the id 60, the model room for 60"),
        ({"model_type": "bart", "forced_bos_token_id": 60}, {"vocab.json": {"<s>": 1}}, {}, "forced_bos_token_id 60 is no token"),
        ({"model_type": "bart", "eos_token_id": 9}, {"vocab.json": {"<s>": 1}}, {}, "config.json: eos_token_id is 9"),
        ({"model_type": "marian"}, {"vocab.json": {">>a<<": 60, ">>b<<": 2}}, {}, "'a' has the id 60"),
        ({"model_type": "marian"}, {"vocab.json": {">>a<<": -1}}, {}, "vocab.json: '>>a<<' and -1 are not a token and its id"),
        ({"model_type": "marian"}, {"vocab.json": {">>a<<": True}}, {}, "are not a token and its id"),
        ({"model_type": "marian"}, {"vocab.json": {f">>l{i}<<": 7 for i in range(1025)}}, {}, "has 1025 languages"),
        ({"model_type": "marian"}, {"vocab.json": []}, {}, "not a JSON object"),
        ({"model_type": "marian"}, {"vocab.json": MARIAN}, {"target_language": "it"}, "the model has no 'it'; it has fra, deu"),
        ({"model_type": "m2m_100"}, {}, {}, "0 languages"),
        ({"model_type": "m2m_100"}, {"sentencepiece.bpe.model": {}}, {}, "sentencepiece.bpe.model"),
        (
            {"model_type": "mbart", "tokenizer_class": "MBart50Tokenizer"},
            {"added_tokens.json": {"de_DE": "x"}},
            {},
            "added_tokens.json",
        ),
        ({"model_type": "t5"}, {"tokenizer.json": {"model": {"vocab": [["a"], 7]}}}, {}, "tokenizer.json"),
        ({"model_type": "t5"}, {"tokenizer.json": {"added_tokens": [{"content": "a"}]}}, {}, "tokenizer.json"),
    ],
)
def test_nonsense_is_refused_by_name(
    config: dict[str, Any], files: dict[str, object], wishes: dict[str, str], reason: str, tmp_path: Path
) -> None:
    for name, content in files.items():
        write(tmp_path, name, content)
    with pytest.raises(ForeignError) as refusal:
        read(tmp_path, config, **wishes)
    assert reason in str(refusal.value)
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 600


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": None},
        {"model_type": "t5", "task_specific_params": [1]},
        {"model_type": "t5", "task_specific_params": {"x": 1}},
        {"model_type": "t5", "tokenizer_class": 7, "forced_bos_token_id": None},
        {"model_type": "marian", "max_length": "long", "num_beams": {}},
    ],
)
def test_what_says_nothing_does_nothing(config: dict[str, Any], tmp_path: Path) -> None:
    found = read(tmp_path, config)
    assert (found.template, found.languages, found.defaults) == (Template(), None, Defaults())
