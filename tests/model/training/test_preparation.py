"""What is known of a run before it begins: settings by rule, a run taken up, a checkpoint gone on from."""

import json
import random
import tomllib
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.checkpoint_folder import CheckpointError
from dragoman.model.config import ModelConfig
from dragoman.model.corpus import DataError
from dragoman.model.errors import InputError
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.model.training.config import TrainingConfigError
from dragoman.model.training.file import TrainingFile
from dragoman.model.training.preparation import Preparation, prepare
from dragoman.model.training.trainer import Trainer

DATA = {"source": "train.s", "target": "train.t", "validation_source": "val.s", "validation_target": "val.t"}
TINY: dict[str, Any] = {"d_model": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
TINY |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}
WORDS = ["red", "green", "blue", "cat", "dog", "hat", "sun", "moon"]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    folder.mkdir()
    for name, size in (("train", 120), ("val", 3)):
        sentences = [[WORDS[(i * k + k * k) % 8] for k in range(2, 4 + i % 4)] for i in range(size)]
        for suffix, lines in (("s", sentences), ("t", [words[::-1] for words in sentences])):
            (folder / f"{name}.{suffix}").write_text("".join(" ".join(words) + "\n" for words in lines), encoding="utf-8")
    return folder


def file(**tables: Any) -> TrainingFile:
    return TrainingFile({"name": "toy", "data": DATA, "model": TINY} | tables, "toy.toml")


def begin(prepared: Preparation, num_steps: int = 0) -> Trainer:
    trainer = Trainer(prepared, torch.device("cpu"))
    for _, batch in zip(range(num_steps), trainer._remaining_batches(), strict=False):
        trainer._step(batch)
    if num_steps:
        trainer.save_state()
    trainer.close()
    return trainer


def test_a_configuration_of_paths_alone_is_completed(data: Path, tmp_path: Path) -> None:
    prepared = prepare(TrainingFile({"name": "toy", "data": DATA}, "toy.toml"), data, tmp_path / "out")
    training = prepared.config.training
    assert (training.max_steps, training.warmup_steps, training.cooldown_steps, training.max_tokens) == (1000, 100, 333, 128)
    assert prepared.model_config.d_model == 128 and prepared.model_config.norm == "pre"
    assert prepared.record.text["num_pairs"] == 120
    assert prepared.warnings == []
    assert not (tmp_path / "out").exists(), "nothing is written before the run begins"
    summary, rules = prepared.summary()
    assert "120 pairs" in summary and f"{prepared.record.text['target_tokens']} target tokens" in summary
    assert "training.max_steps 1000" in rules and "tokenizer.vocab_size 4" in rules


def test_only_what_is_stated_is_warned_of(data: Path, tmp_path: Path) -> None:
    prepared = prepare(file(training={"max_steps": 2}), data, tmp_path / "out")
    assert "training.validate_every" in prepared.record.chosen
    assert [line.split(":")[0] for line in prepared.warnings] == ["training.max_steps"]


def test_what_was_chosen_is_written_and_repeats_the_run(data: Path, tmp_path: Path) -> None:
    prepared = prepare(file(training={"seed": 3}), data, tmp_path / "out")
    begin(prepared)
    folder = tmp_path / "out" / "training"
    chosen = json.loads((folder / "chosen.json").read_text(encoding="utf-8"))
    assert chosen == {"text": prepared.record.text, "chosen": prepared.record.chosen}
    assert chosen["chosen"]["training.warmup_steps"] == 100 and "training.seed" not in chosen["chosen"]
    text = (folder / "config.toml").read_text(encoding="utf-8")
    assert "warmup_steps = 100  # chosen by rule" in text and "seed = 3\n" in text
    again = prepare(TrainingFile(tomllib.loads(text), "again"), data, tmp_path / "again")
    assert again.config == prepared.config
    assert again.record.chosen == {}


def test_a_resumed_run_takes_what_was_chosen_though_the_text_has_grown(data: Path, tmp_path: Path) -> None:
    first = prepare(file(training={"max_steps": 50}), data, tmp_path / "out")
    begin(first, num_steps=3)
    for suffix in ("s", "t"):
        path = data / f"train.{suffix}"
        path.write_text(path.read_text(encoding="utf-8") * 40, encoding="utf-8")
    second = prepare(file(training={"max_steps": 50}), data, tmp_path / "out")
    assert second.config == first.config
    assert second.config != prepare(file(training={"max_steps": 50}), data, tmp_path / "new").config
    assert begin(second).progression.step == 3
    (warning,) = [line for line in second.warnings if line.startswith("data: ")]
    assert "120 num_pairs" in warning and "4,800 num_pairs" in warning


def test_a_run_by_rule_resumes_to_the_same_weights(data: Path, tmp_path: Path) -> None:
    told = file(training={"max_steps": 12})
    whole = begin(prepare(told, data, tmp_path / "whole"), num_steps=12)
    begin(prepare(told, data, tmp_path / "stopped"), num_steps=5)
    resumed = begin(prepare(told, data, tmp_path / "stopped"), num_steps=7)
    assert resumed.progression.step == 12
    for ours, theirs in zip(resumed.checkpoint.model.parameters(), whole.checkpoint.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_a_run_of_a_version_without_rules_goes_on_with_the_defaults_of_that_time(data: Path, tmp_path: Path) -> None:
    told = file(training={"max_steps": 50}, tokenizer={"vocab_size": 300})
    config = told.complete({})
    assert (config.training.warmup_steps, config.training.max_tokens) == (2000, 4096)
    folder = tmp_path / "out" / "training"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(asdict(config), indent=2) + "\n", encoding="utf-8")
    resumed = prepare(told, data, tmp_path / "out")
    assert resumed.config == config
    assert [line.split(":")[0] for line in resumed.warnings] == [
        "training.warmup_steps",
        "training.max_tokens",
        "tokenizer.vocab_size",
    ]
    begin(resumed)
    assert prepare(told, data, tmp_path / "out").config == config, "also after it was taken up"


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ({"max_steps": 50}, {"max_steps": 60}, "training.max_steps is 50 there and 60 here"),
        ({"max_steps": 50}, {"max_steps": 50, "warmup_steps": 9}, "training.warmup_steps is 5 there and 9 here"),
        ({"max_steps": 50}, {}, "training.max_steps is 50 there and left out here"),
        ({"max_steps": 50, "max_tokens": 99}, {"max_steps": 50}, "training.max_tokens is 99 there and 4096 here"),
    ],
)
def test_settings_that_a_run_did_not_begin_with_are_named(data: Path, tmp_path: Path, first, second, said: str) -> None:
    begin(prepare(file(training=first), data, tmp_path / "out"))
    with pytest.raises(TrainingConfigError) as caught:
        prepare(file(training=second), data, tmp_path / "out")
    assert "holds a run of another configuration" in str(caught.value) and said in str(caught.value)


@pytest.fixture
def initial(data: Path, tmp_path: Path) -> Path:
    """A checkpoint whose model no rule would choose."""
    texts = [line for name in ("train.s", "train.t") for line in (data / name).read_text(encoding="utf-8").splitlines()]
    tokenizer = ByteLevelTokenizer.train(texts, 280)
    size = tokenizer.vocab_size
    config = ModelConfig(source_vocab_size=size, target_vocab_size=size, norm="post", num_heads=2, dropout=0.4, **TINY)
    Checkpoint("first", Transformer(config).eval(), Tokenizers.shared(tokenizer)).save(tmp_path / "first")
    return tmp_path / "first"


def test_going_on_takes_model_and_vocabulary_of_the_checkpoint(data: Path, tmp_path: Path, initial: Path) -> None:
    told = TrainingFile({"name": "toy", "data": DATA, "model": {"dropout": 0.2}}, "toy.toml").going_on_from(initial)
    prepared = prepare(told, data, tmp_path / "out")
    model = prepared.model_config
    assert (model.d_model, model.num_heads, model.norm, model.dropout) == (16, 2, "post", 0.2)
    assert prepared.tokenizer.vocab_size == model.source_vocab_size
    begin(prepared, num_steps=1)
    assert not any("d_model" in line for line in prepared.summary())
    begin(prepare(told, data, tmp_path / "out"))


def test_a_model_that_a_checkpoint_cannot_grow_into_is_refused_before_the_text_is_read(
    tmp_path: Path, initial: Path, data: Path
) -> None:
    told = file(model={"d_model": 32}).going_on_from(initial)
    with pytest.raises(TrainingConfigError, match="initial_checkpoint: its d_model is 16, the configuration's 32"):
        prepare(told, tmp_path / "nowhere", tmp_path / "out")


def test_what_is_wrong_with_the_model_is_named_with_its_line(data: Path, tmp_path: Path) -> None:
    path = tmp_path / "toy.toml"
    tables = "[data]\n" + "".join(f'{name} = "{value}"\n' for name, value in DATA.items()) + "[model]\n"
    for settings, said in (
        ("d_model = 0", "d_model must be at least 1"),
        ('d_model = "wide"', "d_model must be int"),
        ("width = 3", "unknown model setting: width"),
        ("pad_id = 3", "set by the tokeniser"),
        ("num_heads = 48", "not a multiple of num_heads 48"),
    ):
        path.write_text(f"{tables}{settings}\n", encoding="utf-8")
        with pytest.raises(TrainingConfigError) as caught:
            prepare(TrainingFile.load(path), data, tmp_path / "out")
        assert str(caught.value).startswith(f"{path}, line 7: model") and said in str(caught.value)


@pytest.mark.parametrize("content", ["a line", "the same words\n" * 300, "x\n" * 2])
def test_odd_texts_give_a_run(tmp_path: Path, content: str) -> None:
    """One line, one vocabulary entry's worth, all lines the same."""
    for name in DATA.values():
        (tmp_path / name).write_text(content, encoding="utf-8")
    trainer = begin(prepare(file(training={"max_steps": 2}), tmp_path, tmp_path / "out"), num_steps=2)
    assert trainer.progression.step == 2


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train.s", b"", "train.s: the file is empty"),
        ("val.t", b"", "val.t: the file is empty"),
        ("train.t", b"one\n", "train.s has 120 lines but "),
        ("val.s", b"one\ntwo\n", "val.s has 2 lines but "),
        ("train.t", b"one\n" * 7 + b"\xe4\n" + b"one\n" * 112, "train.t, line 8: not UTF-8"),
        ("val.s", b"one\n\nthree\n", "val.s, line 2: the line is blank"),
        ("val.s", b"one\ntwo\n" + b"word " * 600 + b"\n", "val.s, line 3: "),
    ],
)
def test_text_that_cannot_be_used_is_named(data: Path, tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (data / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare(file(), data, tmp_path / "out")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_output_that_holds_something_else_is_refused(data: Path, tmp_path: Path, initial: Path) -> None:
    for output, said in (
        (initial, "there is a model.safetensors, but no training to resume"),
        (data / "train.s", "not a directory"),
        (data / "train.s" / "below", f"{data / 'train.s'} is not a directory"),
    ):
        with pytest.raises(InputError) as caught:
            prepare(file(), data, output)
        assert str(caught.value).startswith(f"{output}: ") and said in str(caught.value)


@pytest.mark.parametrize("name", ["config.json", "chosen.json", "state.safetensors"])
@pytest.mark.parametrize("content", [b"", b"half", b"[1]", b"\xff"])
def test_a_run_whose_files_are_damaged_is_named(data: Path, tmp_path: Path, name: str, content: bytes) -> None:
    begin(prepare(file(training={"max_steps": 5}), data, tmp_path / "out"), num_steps=1)
    path = tmp_path / "out" / "training" / name
    path.write_bytes(content)
    with pytest.raises((TrainingConfigError, CheckpointError, InputError)) as caught:
        prepare(file(training={"max_steps": 5}), data, tmp_path / "out")
    assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)


def test_two_hundred_lines_are_learnt_by_rule(tmp_path: Path) -> None:
    """Numbers in words, of which English says the tens first and German the ones; nothing but paths and fewer steps are stated."""
    ones = {"one": "ein", "two": "zwei", "three": "drei", "four": "vier", "five": "fünf", "six": "sechs", "seven": "sieben"}
    tens = {"twenty": "zwanzig", "thirty": "dreißig", "forty": "vierzig", "fifty": "fünfzig", "sixty": "sechzig"}
    pairs = [
        (f"{hundred} hundred {ten} {one}", f"{ones[hundred]} hundert {ones[one]} und {tens[ten]}")
        for hundred in ones
        for ten in tens
        for one in ones
    ]
    random.Random(0).shuffle(pairs)
    for part, some in (("train", pairs[:200]), ("val", pairs[200:])):
        for suffix, lines in zip(("s", "t"), zip(*some, strict=True), strict=True):
            (tmp_path / f"{part}.{suffix}").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    told = TrainingFile({"name": "numbers", "data": DATA, "training": {"max_steps": 120}}, "numbers.toml")
    prepared = prepare(told, tmp_path, tmp_path / "out")
    assert prepared.warnings == []
    Trainer(prepared, torch.device("cpu")).run()
    summary = json.loads((tmp_path / "out/training/summary.json").read_text(encoding="utf-8"))
    assert summary["best_bleu"] > 90
