"""Runs: settings by rule, training of every architecture, resumption to the same end, and refusals."""

import csv
import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.model.checkpoint import Checkpoint, CheckpointError, average_weights
from dragoman.model.config import ModelConfig
from dragoman.model.corpus import DataError
from dragoman.model.errors import InputError
from dragoman.model.evaluate import target_log_probs, translate
from dragoman.model.likelihood import Likelihood
from dragoman.model.networks.transformer import Transformer
from dragoman.model.quality import score
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.model.training.config import ScheduleConfig, TrainingConfig, TrainingConfigError
from dragoman.model.training.file import TrainingFile
from dragoman.model.training.log import Measured
from dragoman.model.training.preparation import Preparation, prepare
from dragoman.model.training.trainer import Trainer, _progression
from dragoman.model.training.validation import Validation

WORDS = ["red", "green", "blue", "cat", "dog", "hat", "sun", "moon"]
SOURCES = {"source": "train.s", "validation_source": "val.s"}
SETTINGS: dict[str, dict[str, Any]] = {
    "data": SOURCES | {"target": "train.t", "validation_target": "val.t"},
    "tokenizer": {"vocab_size": 300, "bpe_dropout": 0.2},
    "model": {"d_model": 16, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "max_target_positions": 40}
    | {"encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.2, "attention_dropout": 0.1},
    "training": {"max_steps": 28, "max_tokens": 200, "warmup_steps": 10, "max_length": 40, "average_last": 2},
}
Begin = Callable[..., Trainer]


@pytest.fixture(scope="session")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    for name, size in (("train", 100), ("val", 8)):
        sentences = [rng.choices(WORDS, k=rng.randint(2, 6)) for _ in range(size)]
        for suffix, lines in (("s", sentences), ("t", [words[::-1] for words in sentences])):
            (folder / f"{name}.{suffix}").write_text("".join(" ".join(words) + "\n" for words in lines), encoding="utf-8")
    return folder


def file(initial_checkpoint: Path | None = None, **changes: dict[str, Any]) -> TrainingFile:
    """Change some of `SETTINGS`, table by table; nothing is left to the rules but the model's settings of another architecture."""
    tables = {table: SETTINGS[table] | changes.get(table, {}) for table in SETTINGS}
    if "architecture" in changes.get("model", {}):
        tables["model"] = changes["model"]
    initial = {"initial_checkpoint": str(initial_checkpoint)} if initial_checkpoint else {}
    return TrainingFile(asdict(TrainingConfig.parse({"name": "toy"} | initial | tables, "test")), "test")


@pytest.fixture
def begin(data_dir: Path) -> Begin:
    return lambda output, **changes: Trainer(prepare(file(**changes), data_dir, output), torch.device("cpu"))


def stop_after(trainer: Trainer, num_steps: int) -> Trainer:
    for _, batch in zip(range(num_steps), trainer._remaining_batches(), strict=False):
        trainer._step(batch)
    if num_steps:
        trainer.save_state()
    trainer.close()
    return trainer


def rows(output: Path, name: str) -> list[dict[str, str]]:
    with (output / "training" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def are_equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    weights, others = first.state_dict(), second.state_dict()
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)


NO_SOURCES = dict.fromkeys(SOURCES, "")
MODELS: dict[str, dict[str, Any]] = {
    "additive": {"architecture": "rnn", "attention": "additive"},
    "decoder": {"architecture": "decoder", "positions": "rotary", "num_heads": 1, "norm": "pre", "norm_kind": "rms"},
}


def of_model(name: str, **training: Any) -> dict[str, Any]:
    data = NO_SOURCES if name == "decoder" else {}
    model = MODELS[name] | {"d_model": 32, "dropout": 0.1}
    return {"model": model, "data": data, "training": {"learning_rate": 0.02, "warmup_steps": 5} | training}


def summary_of(output: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((output / "training" / "summary.json").read_text(encoding="utf-8"))
    return summary


def outcome(output: Path) -> dict[str, Any]:
    """Everything a run leaves behind that must not depend on time."""
    steps = [{name: value for name, value in row.items() if name != "seconds"} for row in rows(output, "steps")]
    summary = {name: value for name, value in summary_of(output).items() if name != "seconds"}
    files = {path.name: path.read_bytes() for path in [*output.glob("*.*"), *output.glob("training/step-*")]}
    return {"steps": steps, "validations": rows(output, "validation"), "summary": summary, "files": files}


@pytest.fixture(scope="module")
def whole(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("whole") / "toy"
    Trainer(prepare(file(), data_dir, output), torch.device("cpu")).run()
    return output


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_learns(begin: Begin, tmp_path: Path, name: str) -> None:
    begin(tmp_path, **of_model(name, max_steps=40)).run()
    losses = [float(row["loss"]) for row in rows(tmp_path, "steps")]
    assert len(losses) == 40 and sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert Checkpoint.load(tmp_path).model.config.architecture == MODELS[name]["architecture"]


def test_run_writes_a_checkpoint_logs_summary_and_picture(whole: Path, data_dir: Path) -> None:
    checkpoint, folder, summary = Checkpoint.load(whole), whole / "training", summary_of(whole)
    assert checkpoint.name == "toy" and (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    steps, validations = rows(whole, "steps"), rows(whole, "validation")
    schedule, losses = ScheduleConfig(**SETTINGS["training"]), [float(row["loss"]) for row in steps]
    assert [int(row["step"]) for row in steps] == list(range(1, 29)) and sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert [float(row["learning_rate"]) for row in steps] == [schedule.learning_rate_at(step) for step in range(1, 29)]
    assert [int(row["step"]) for row in validations] == [8, 16, 24, 28]
    assert (summary["step"], summary["num_pairs"], summary["num_pairs_left_out"]) == (28, 100, 0)
    assert summary["num_parameters"] == sum(parameter.numel() for parameter in checkpoint.model.parameters())
    assert summary["best_bleu"] == max(float(row["bleu"]) for row in validations) and not list(whole.rglob("*.tmp"))
    # Of validated weights the newest are kept, whose mean may be published: whichever scores higher.
    kept = sorted(whole.glob("training/step-*"))
    assert [path.name for path in kept] == ["step-0000024.safetensors", "step-0000028.safetensors"]
    mean = average_weights(kept)
    is_average = all(torch.equal(parameter, mean[name]) for name, parameter in checkpoint.model.named_parameters())
    assert is_average == (summary["published"] == "averaged") and summary["averaged_checkpoints"] == 2
    texts = [(data_dir / name).read_text(encoding="utf-8").splitlines() for name in ("val.s", "val.t")]
    bleu = score(translate(checkpoint.model, checkpoint.tokenizers, texts[0]), texts[1]).bleu
    assert bleu == max(summary["averaged_bleu"], summary["best_bleu"])


def test_another_seed_is_another_run(whole: Path, begin: Begin, tmp_path: Path) -> None:
    begin(tmp_path, training={"seed": 2, "max_steps": 3}).run()
    assert [row["loss"] for row in rows(tmp_path, "steps")] != [row["loss"] for row in rows(whole, "steps")[:3]]


KILLED = """
import json, os, signal, sys
from pathlib import Path
import torch
import dragoman.model.training.trainer
from dragoman.model.training.preparation import prepare
from dragoman.model.training.trainer import Trainer
from dragoman.model.training.file import TrainingFile

fields, data_dir, output, save_seconds, where, at = json.loads(sys.argv[1])
torch.set_num_threads(1)
prepared = prepare(TrainingFile(fields, "test"), Path(data_dir), Path(output))
trainer = Trainer(prepared, torch.device("cpu"), save_seconds)

def die():
    os.kill(os.getpid(), signal.SIGKILL)

if where == "logging":
    write = trainer.steps_log.write
    def torn(step, *values):
        if step == at:
            trainer.steps_log._file.write(f"{step},0,5.")
            trainer.steps_log._file.flush()
            die()
        write(step, *values)
    trainer.steps_log.write = torn
elif where == "saving":
    save = dragoman.model.training.trainer.save_tensors
    def half(path, tensors, metadata=None):
        if path.name == "state.safetensors" and trainer.progression.step == at:
            path.with_name(path.name + ".tmp").write_bytes(b"half")
            die()
        save(path, tensors, metadata)
    dragoman.model.training.trainer.save_tensors = half
trainer.run()
"""


@pytest.mark.parametrize("killed_in", [(1e9, "logging", 13), (0.0, "saving", 12)], ids=["unsaved steps", "half a state"])
def test_killed_training_resumes_to_the_same_end(
    whole: Path, begin: Begin, data_dir: Path, tmp_path: Path, killed_in: tuple[float, str, int]
) -> None:
    output = tmp_path / "toy"
    arguments = json.dumps([file().fields, str(data_dir), str(output), *killed_in])
    killed = subprocess.run([sys.executable, "-c", KILLED, arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert killed.returncode == -signal.SIGKILL and not (output / "training" / "summary.json").exists()
    trainer = begin(output)
    assert (trainer.progression.step > 0) == (output / "training" / "state.safetensors").exists()
    trainer.run()
    assert outcome(output) == outcome(whole)


def test_finished_run_started_again_changes_nothing(whole: Path, begin: Begin, tmp_path: Path) -> None:
    output = tmp_path / "toy"
    shutil.copytree(whole, output)
    begin(output).run()
    assert outcome(output) == outcome(whole)
    with pytest.raises(DataError, match="none"):  # a failed start does not claim the folder
        begin(tmp_path / "other", data={"source": "none"})
    begin(tmp_path / "other").close()


@pytest.mark.parametrize("better", ["averaged", "best"])
def test_better_model_is_published(begin: Begin, tmp_path: Path, monkeypatch, better: str) -> None:
    scored: list[tuple[torch.nn.Module, dict[str, torch.Tensor]]] = []
    of_average = 50.0 if better == "averaged" else 5.0

    def made_up(self: Validation, model: torch.nn.Module, device: torch.device) -> Measured:
        scored.append((model, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}))
        return Measured(1.0, 10.0 + 20.0 * (len(scored) == 2) if model is scored[0][0] else of_average, 1.0)

    monkeypatch.setattr(Validation, "measure", made_up)
    begin(tmp_path).run()
    summary = summary_of(tmp_path)
    assert (summary["published"], summary["best_bleu"], summary["averaged_bleu"]) == (better, 30.0, of_average)
    _, expected = scored[-1 if better == "averaged" else 1]
    published = dict(Checkpoint.load(tmp_path).model.named_parameters())
    assert all(torch.equal(published[name], tensor) for name, tensor in expected.items())


def test_validation_waits_for_its_epochs_and_patience_stops_early(whole: Path, begin: Begin, tmp_path: Path, monkeypatch) -> None:
    begin(tmp_path / "two", training={"validate_every": 2}).run()
    assert [int(row["step"]) for row in rows(tmp_path / "two", "validation")] == [16, 28]
    assert outcome(tmp_path / "two")["steps"] == outcome(whole)["steps"]
    bleus = iter([1.0, 3.0, 2.0, 3.0, 0.5])
    monkeypatch.setattr(Validation, "measure", lambda self, model, device: Measured(1.0, next(bleus), 1.0))
    begin(tmp_path / "patient", training={"max_steps": 1000, "patience": 2}).run()
    validations = rows(tmp_path / "patient", "validation")
    assert [float(row["bleu"]) for row in validations] == [1.0, 3.0, 2.0, 3.0]
    assert len(rows(tmp_path / "patient", "steps")) == int(validations[-1]["step"])


def test_two_passes_differ_by_their_dropout_alone(begin: Begin, tmp_path: Path) -> None:
    still: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
    losses: list[list[float]] = []
    for i, (r_drop, is_still) in enumerate(((0.0, True), (5.0, True), (5.0, False), (0.001, False))):
        begin(tmp_path / str(i), training={"max_steps": 4, "r_drop": r_drop}, model=still if is_still else {}).run()
        losses.append([float(row["loss"]) for row in rows(tmp_path / str(i), "steps")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert losses[2][0] > losses[3][0], "the same masks, another weight of their difference"


def test_a_run_goes_on_from_a_checkpoint(whole: Path, begin: Begin, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"initial_checkpoint": whole, "model": {"dropout": 0.1}, "training": {"max_steps": 5}}
    trainer, before = begin(tmp_path, **changes), Checkpoint.load(whole)
    assert are_equal(trainer.checkpoint.model, before.model) and trainer.progression.step == 0
    trainer.run()
    assert float(rows(tmp_path, "steps")[0]["loss"]) < float(rows(whole, "steps")[0]["loss"])
    resumed = begin(tmp_path, **changes)
    resumed.close()
    assert resumed.progression.step == 5 and not are_equal(resumed.checkpoint.model, before.model)
    with pytest.raises(TrainingConfigError, match=r"initial_checkpoint: its architecture is transformer, .* rnn$"):
        begin(tmp_path / "other", initial_checkpoint=whole, model={"architecture": "rnn"})


def test_a_language_model_is_published_where_its_loss_is_least(begin: Begin, data_dir: Path, tmp_path: Path) -> None:
    begin(tmp_path, **of_model("decoder")).run()
    validations, summary = rows(tmp_path, "validation"), summary_of(tmp_path)
    assert all(row["bleu"] == "" and row["chrf"] == "" for row in validations)
    assert summary["best_loss"] == min(float(row["loss"]) for row in validations)
    published = summary["averaged_loss"] if summary["published"] == "averaged" else summary["best_loss"]
    assert published == min(summary["averaged_loss"], summary["best_loss"])
    checkpoint = Checkpoint.load(tmp_path)
    texts = (data_dir / "val.t").read_text(encoding="utf-8").splitlines()
    # Predicted answers are never padding, so what training spent on it is free.
    found = Likelihood.of(target_log_probs(checkpoint.model, checkpoint.tokenizers, [""] * len(texts), texts))
    assert published - 0.05 < found.loss < published and found.perplexity == pytest.approx(math.exp(found.loss))
    assert _progression({"step": 3, "best_bleu": 12.5}).best_rank == 12.5, "of a state from before there were language models"


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"training": {"max_length": 1}}, TrainingConfigError, r"training\.max_length: no training pair is short enough"),
        ({"model": {"max_source_positions": 3}}, DataError, r"val\.s, line \d+: \d+ tokens where the model has 3 positions"),
        ({"model": {"max_target_positions": 3}}, DataError, r"val\.t, line \d+: \d+ tokens where the model has 3 positions"),
        ({"initial_checkpoint": Path("/none")}, CheckpointError, "/none"),
        (of_model("decoder") | {"data": {}}, TrainingConfigError, "data.source: a language model has no source: leave it out"),
        (of_model("additive") | {"data": {"source": ""}}, TrainingConfigError, "data.source: missing"),
        (of_model("additive") | {"data": {"validation_source": ""}}, TrainingConfigError, "data.validation_source: missing"),
        ({"model": {"architecture": "rnn", "num_heads": 4}}, TrainingConfigError, "num_heads means nothing to the .* rnn"),
    ],
)
def test_a_run_that_cannot_work_is_refused(begin: Begin, tmp_path: Path, changes: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        begin(tmp_path, **changes)


def test_gradient_that_is_not_finite_stops_the_run(begin: Begin, tmp_path: Path) -> None:
    trainer = begin(tmp_path)
    trainer.checkpoint.model.decoder.layers[0].feed_forward.inner.weight.data[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="toy: the gradient is not finite at step 1; lower learning_rate"):
        trainer.run()


DATA = SETTINGS["data"]
TARGETS = {"target": "train.t", "validation_target": "val.t"}
TINY: dict[str, Any] = {"d_model": 16, "num_encoder_layers": 1, "num_decoder_layers": 1}
TINY |= {"encoder_ffn_dim": 16, "decoder_ffn_dim": 16}


@pytest.fixture
def data(data_dir: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(data_dir, tmp_path / "data"))


def stated(**tables: Any) -> TrainingFile:
    return TrainingFile({"name": "toy", "data": DATA, "model": TINY} | tables, "toy.toml")


def opened(prepared: Preparation, num_steps: int = 0) -> Trainer:
    return stop_after(Trainer(prepared, torch.device("cpu")), num_steps)


def test_a_configuration_of_paths_alone_is_completed(data: Path, tmp_path: Path) -> None:
    prepared = prepare(TrainingFile({"name": "toy", "data": DATA}, "toy.toml"), data, tmp_path / "out")
    training = prepared.config.training
    assert (training.max_steps, training.warmup_steps, training.cooldown_steps, training.max_tokens) == (1000, 100, 333, 128)
    assert (prepared.model_config.d_model, prepared.model_config.norm, prepared.warnings) == (128, "pre", [])
    assert prepared.record.text["num_pairs"] == 100
    assert not (tmp_path / "out").exists(), "nothing is written before the run begins"
    summary, rules = prepared.summary()
    assert "100 pairs" in summary and f"{prepared.record.text['target_tokens']} target tokens" in summary
    assert "training.max_steps 1000" in rules and "tokenizer.vocab_size 399" in rules
    prepared = prepare(stated(training={"max_steps": 2}), data, tmp_path / "out")  # of which alone warnings are
    assert "training.validate_every" in prepared.record.chosen
    assert [line.split(":")[0] for line in prepared.warnings] == ["training.max_steps"]


def test_chosen_settings_are_written_and_repeat_the_run(data: Path, tmp_path: Path) -> None:
    prepared = prepare(stated(training={"seed": 3}), data, tmp_path / "out")
    opened(prepared)
    folder = tmp_path / "out" / "training"
    chosen = json.loads((folder / "chosen.json").read_text(encoding="utf-8"))
    assert chosen == {"text": prepared.record.text, "chosen": prepared.record.chosen}
    assert chosen["chosen"]["training.warmup_steps"] == 100 and "training.seed" not in chosen["chosen"]
    text = (folder / "config.toml").read_text(encoding="utf-8")
    assert "warmup_steps = 100  # chosen by rule" in text and "seed = 3\n" in text
    again = prepare(TrainingFile(tomllib.loads(text), "again"), data, tmp_path / "again")
    assert again.config == prepared.config and again.record.chosen == {}


def test_a_resumed_run_keeps_its_settings_though_the_text_has_grown(data: Path, tmp_path: Path) -> None:
    told = stated(training={"max_steps": 12})
    first = prepare(told, data, tmp_path / "out")
    opened(first, num_steps=5)
    for suffix in ("s", "t"):
        path = data / f"train.{suffix}"
        path.write_text(path.read_text(encoding="utf-8") * 40, encoding="utf-8")
    second = prepare(told, data, tmp_path / "out")
    assert second.config == first.config != prepare(told, data, tmp_path / "new").config
    (warning,) = [line for line in second.warnings if line.startswith("data: ")]
    assert "100 num_pairs" in warning and "4,000 num_pairs" in warning


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
    opened(prepare(stated(training=first), data, tmp_path / "out"))
    with pytest.raises(TrainingConfigError) as caught:
        prepare(stated(training=second), data, tmp_path / "out")
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
    opened(prepared, num_steps=1)
    assert not any("d_model" in line for line in prepared.summary())
    opened(prepare(told, data, tmp_path / "out"))
    # A model that it cannot grow into is refused before the text is read.
    with pytest.raises(TrainingConfigError, match="initial_checkpoint: its d_model is 16, the configuration's 32"):
        prepare(stated(model={"d_model": 32}).going_on_from(initial), tmp_path / "nowhere", tmp_path / "other")


@pytest.mark.parametrize(
    ("setting", "said"), [('d_model = "wide"', "d_model must be int"), ("num_heads = 48", "not a multiple of num_heads 48")]
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
        prepared = prepare(stated(**tables), data, tmp_path / "out")
        assert not {f"model.{field}" for field in absent.split()} & prepared.record.chosen.keys()
        assert prepared.model_config.architecture == architecture
    for width, num_heads in ((32, 2), (48, 3), (128, 4), (80, 1), (16, 1)):
        model = {"architecture": "decoder", "positions": "rotary", "d_model": width}
        config = prepare(stated(data=TARGETS, model=model), data, tmp_path / "out").model_config
        assert (config.num_heads, config.head_dim % 16) == (num_heads, 0)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("train.s", b"", "train.s: the file is empty"),
        ("val.s", b"one\ntwo\n", "val.s has 2 lines but "),
        ("val.s", b"one\ntwo\n" + b"word " * 600 + b"\n" + b"x\n" * 5, "val.s, line 3: "),
    ],
)
def test_unusable_text_is_named(data: Path, tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (data / name).write_bytes(content)
    with pytest.raises(DataError) as caught:
        prepare(stated(), data, tmp_path / "out")
    assert said in str(caught.value) and "\n" not in str(caught.value)


def test_an_output_that_holds_something_else_is_refused(data: Path, tmp_path: Path, initial: Path) -> None:
    for output, said in (
        (initial, "there is a model.safetensors, but no training to resume"),
        (data / "train.s", "not a directory"),
        (data / "train.s" / "below", f"{data / 'train.s'} is not a directory"),
    ):
        with pytest.raises(InputError, match=f"^{re.escape(f'{output}: ')}.*{re.escape(said)}"):
            prepare(stated(), data, output)


@pytest.mark.parametrize("name", ["config.json", "chosen.json", "state.safetensors"])
def test_a_run_whose_files_are_damaged_is_named(data: Path, tmp_path: Path, name: str) -> None:
    opened(prepare(stated(training={"max_steps": 5}), data, tmp_path / "out"), num_steps=1)
    path = tmp_path / "out" / "training" / name
    for content in (b"", b"half", b"[1]", b"\xff"):
        path.write_bytes(content)
        with pytest.raises((TrainingConfigError, CheckpointError, InputError)) as caught:
            prepare(stated(training={"max_steps": 5}), data, tmp_path / "out")
        assert str(caught.value).startswith(f"{path}: ") and "\n" not in str(caught.value)
