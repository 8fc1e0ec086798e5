"""A run before it begins: settings by rule, a run taken up, a checkpoint gone on from."""

import json
import re
import shutil
import tomllib
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
from tests.model.training.conftest import SETTINGS, are_equal, stop_after

DATA = SETTINGS["data"]
TARGETS = {"target": "train.t", "validation_target": "val.t"}
TINY: dict[str, Any] = {"d_model": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
TINY |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}


@pytest.fixture
def data(data_dir: Path, tmp_path: Path) -> Path:
    """A copy of the text, to be changed."""
    return Path(shutil.copytree(data_dir, tmp_path / "data"))


def file(**tables: Any) -> TrainingFile:
    return TrainingFile({"name": "toy", "data": DATA, "model": TINY} | tables, "toy.toml")


def begin(prepared: Preparation, num_steps: int = 0) -> Trainer:
    trainer = Trainer(prepared, torch.device("cpu"))
    if num_steps:
        return stop_after(trainer, num_steps)
    trainer.close()
    return trainer


def test_a_configuration_of_paths_alone_is_completed(data: Path, tmp_path: Path) -> None:
    prepared = prepare(TrainingFile({"name": "toy", "data": DATA}, "toy.toml"), data, tmp_path / "out")
    training = prepared.config.training
    assert (training.max_steps, training.warmup_steps, training.cooldown_steps, training.max_tokens) == (1000, 100, 333, 128)
    assert (prepared.model_config.d_model, prepared.model_config.norm, prepared.warnings) == (128, "pre", [])
    assert prepared.record.text["num_pairs"] == 120
    assert not (tmp_path / "out").exists(), "nothing is written before the run begins"
    summary, rules = prepared.summary()
    assert "120 pairs" in summary and f"{prepared.record.text['target_tokens']} target tokens" in summary
    assert "training.max_steps 1000" in rules and "tokenizer.vocab_size 4" in rules
    stated = prepare(file(training={"max_steps": 2}), data, tmp_path / "out")  # of which alone warnings are
    assert "training.validate_every" in stated.record.chosen
    assert [line.split(":")[0] for line in stated.warnings] == ["training.max_steps"]


def test_chosen_settings_are_written_and_repeat_the_run(data: Path, tmp_path: Path) -> None:
    prepared = prepare(file(training={"seed": 3}), data, tmp_path / "out")
    begin(prepared)
    folder = tmp_path / "out" / "training"
    chosen = json.loads((folder / "chosen.json").read_text(encoding="utf-8"))
    assert chosen == {"text": prepared.record.text, "chosen": prepared.record.chosen}
    assert chosen["chosen"]["training.warmup_steps"] == 100 and "training.seed" not in chosen["chosen"]
    text = (folder / "config.toml").read_text(encoding="utf-8")
    assert "warmup_steps = 100  # chosen by rule" in text and "seed = 3\n" in text
    again = prepare(TrainingFile(tomllib.loads(text), "again"), data, tmp_path / "again")
    assert again.config == prepared.config and again.record.chosen == {}


def test_a_resumed_run_keeps_its_settings_though_the_text_has_grown(data: Path, tmp_path: Path) -> None:
    told = file(training={"max_steps": 12})
    whole = begin(prepare(told, data, tmp_path / "whole"), num_steps=12)
    first = prepare(told, data, tmp_path / "out")
    begin(first, num_steps=5)
    resumed = begin(prepare(told, data, tmp_path / "out"), num_steps=7)
    assert resumed.progression.step == 12 and are_equal(resumed.checkpoint.model, whole.checkpoint.model)
    for suffix in ("s", "t"):
        path = data / f"train.{suffix}"
        path.write_text(path.read_text(encoding="utf-8") * 40, encoding="utf-8")
    second = prepare(told, data, tmp_path / "out")
    assert second.config == first.config != prepare(told, data, tmp_path / "new").config
    (warning,) = [line for line in second.warnings if line.startswith("data: ")]
    assert "120 num_pairs" in warning and "4,800 num_pairs" in warning


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
    # A model that it cannot grow into is refused before the text is read.
    with pytest.raises(TrainingConfigError, match="initial_checkpoint: its d_model is 16, the configuration's 32"):
        prepare(file(model={"d_model": 32}).going_on_from(initial), tmp_path / "nowhere", tmp_path / "other")


@pytest.mark.parametrize(
    ("setting", "said"),
    [('d_model = "wide"', "d_model must be int"), ("num_heads = 48", "not a multiple of num_heads 48")],
)
def test_a_wrong_setting_of_the_model_is_named_with_its_line(data: Path, tmp_path: Path, setting: str, said: str) -> None:
    path = tmp_path / "toy.toml"
    path.write_text("[data]\n" + "".join(f'{name} = "{value}"\n' for name, value in DATA.items()) + f"[model]\n{setting}\n")
    with pytest.raises(TrainingConfigError) as caught:
        prepare(TrainingFile.load(path), data, tmp_path / "out")
    assert str(caught.value).startswith(f"{path}, line 7: model") and said in str(caught.value)


def test_rules_choose_nothing_that_means_nothing_and_heads_that_rotary_positions_go_with(data: Path, tmp_path: Path) -> None:
    for architecture, absent in (("rnn", "num_heads norm encoder_ffn_dim"), ("decoder", "num_encoder_layers encoder_ffn_dim")):
        tables = {"data": DATA if architecture == "rnn" else TARGETS, "model": {"architecture": architecture}}
        prepared = prepare(file(**tables), data, tmp_path / "out")
        assert not {f"model.{field}" for field in absent.split()} & prepared.record.chosen.keys()
        assert prepared.model_config.architecture == architecture
    for width, num_heads in ((32, 2), (48, 3), (128, 4), (80, 1), (16, 1)):
        model = {"architecture": "decoder", "positions": "rotary", "d_model": width}
        config = prepare(file(data=TARGETS, model=model), data, tmp_path / "out").model_config
        assert (config.num_heads, config.head_dim % 16) == (num_heads, 0)


@pytest.mark.parametrize("content", ["a line", "the same words\n" * 300, "x\n" * 2])
def test_odd_texts_give_a_run(tmp_path: Path, content: str) -> None:
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
def test_unusable_text_is_named(data: Path, tmp_path: Path, name: str, content: bytes, said: str) -> None:
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
        with pytest.raises(InputError, match=f"^{re.escape(f'{output}: ')}.*{re.escape(said)}"):
            prepare(file(), data, output)


@pytest.mark.parametrize("name", ["config.json", "chosen.json", "state.safetensors"])
def test_a_run_whose_files_are_damaged_is_named(data: Path, tmp_path: Path, name: str) -> None:
    begin(prepare(file(training={"max_steps": 5}), data, tmp_path / "out"), num_steps=1)
    path = tmp_path / "out" / "training" / name
    for content in (b"", b"half", b"[1]", b"\xff"):
        path.write_bytes(content)
        with pytest.raises((TrainingConfigError, CheckpointError, InputError)) as caught:
            prepare(file(training={"max_steps": 5}), data, tmp_path / "out")
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
