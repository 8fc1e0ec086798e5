"""Training of a recurrent model and of a language model, by the trainer that trains Transformers."""

import csv
import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.evaluate import target_log_probs
from dragoman.model.likelihood import Likelihood
from dragoman.model.training.config import TrainingConfig, TrainingConfigError
from dragoman.model.training.file import TrainingFile
from dragoman.model.training.log import plot_curves
from dragoman.model.training.measured import Measured
from dragoman.model.training.preparation import prepare
from dragoman.model.training.trainer import Trainer

CPU = torch.device("cpu")
WORDS = ["red", "green", "blue", "cat", "dog", "hat", "sun", "moon"]
MODELS: dict[str, dict[str, Any]] = {
    "additive": {"architecture": "rnn", "attention": "additive"},
    "dot": {"architecture": "rnn", "attention": "dot"},
    "none": {"architecture": "rnn", "attention": "none", "num_encoder_layers": 2, "num_decoder_layers": 2},
    "decoder": {"architecture": "decoder", "positions": "rotary", "num_heads": 1, "norm": "pre", "norm_kind": "rms"},
}
SOURCES = {"source": "train.s", "validation_source": "val.s"}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    for name, size in (("train", 80), ("val", 8)):
        sentences = [rng.choices(WORDS, k=rng.randint(2, 5)) for _ in range(size)]
        for suffix, lines in (("s", sentences), ("t", [sorted(words) for words in sentences])):
            (folder / f"{name}.{suffix}").write_text("".join(" ".join(words) + "\n" for words in lines), encoding="utf-8")
    return folder


def file(model: dict[str, Any], training: dict[str, Any] | None = None, data: dict[str, str] | None = None) -> TrainingFile:
    """Configure a run of 40 steps."""
    has_source = model["architecture"] != "decoder"
    fields = {
        "name": "toy",
        "data": {"target": "train.t", "validation_target": "val.t"} | (SOURCES if has_source else {}) | (data or {}),
        "tokenizer": {"vocab_size": 300},
        "model": {"d_model": 32, "dropout": 0.1} | model,
        "training": {"max_steps": 40, "max_tokens": 200, "warmup_steps": 5, "learning_rate": 0.02, "average_last": 2}
        | (training or {}),
    }
    return TrainingFile(fields, "test")


def train(data_dir: Path, output: Path, name: str, **training: Any) -> None:
    Trainer(prepare(file(MODELS[name], training), data_dir, output), CPU).run()


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


@pytest.mark.parametrize("name", MODELS)
def test_every_architecture_learns(data_dir: Path, tmp_path: Path, name: str) -> None:
    train(data_dir, tmp_path, name)
    losses = [float(row["loss"]) for row in rows(tmp_path / "training" / "steps.csv")]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
    assert Checkpoint.load(tmp_path).model.config.architecture == MODELS[name]["architecture"]


@pytest.mark.parametrize("name", ["additive", "decoder"])
def test_a_run_that_was_stopped_ends_as_one_that_was_not(data_dir: Path, tmp_path: Path, name: str, monkeypatch: Any) -> None:
    train(data_dir, tmp_path / "whole", name, max_steps=12)
    trainer = Trainer(prepare(file(MODELS[name], {"max_steps": 12}), data_dir, tmp_path / "parts"), CPU)
    do_step, done = trainer._step, []

    def step_or_stop(batch: Any) -> Any:
        if len(done) == 7:
            trainer.progression.step -= 1
            trainer.progression.batch -= 1
            raise KeyboardInterrupt
        done.append(batch)
        return do_step(batch)

    monkeypatch.setattr(trainer, "_step", step_or_stop)
    with pytest.raises(KeyboardInterrupt):
        trainer.run()
    trainer.save_state()
    train(data_dir, tmp_path / "parts", name, max_steps=12)
    whole, parts = (Checkpoint.load(tmp_path / folder).model.state_dict() for folder in ("whole", "parts"))
    assert whole.keys() == parts.keys() and all(torch.equal(whole[key], parts[key]) for key in whole)


def test_a_language_model_is_published_where_its_loss_is_least(data_dir: Path, tmp_path: Path) -> None:
    """What is published has the loss that the summary tells, and no other validated weights have less."""
    train(data_dir, tmp_path, "decoder")
    validations = rows(tmp_path / "training" / "validation.csv")
    assert all(row["bleu"] == "" and row["chrf"] == "" for row in validations)
    summary = json.loads((tmp_path / "training" / "summary.json").read_text(encoding="utf-8"))
    assert summary["best_loss"] == min(float(row["loss"]) for row in validations)
    published = summary["averaged_loss"] if summary["published"] == "averaged" else summary["best_loss"]
    assert published == min(summary["averaged_loss"], summary["best_loss"])
    checkpoint = Checkpoint.load(tmp_path)
    texts = (data_dir / "val.t").read_text(encoding="utf-8").splitlines()
    model, total, number = checkpoint.model, 0.0, 0
    for ids in checkpoint.tokenizers.target.encode_batch(texts):
        labels = torch.tensor([*ids, model.config.eos_id])
        inputs = torch.tensor([[model.config.decoder_start_id, *ids]])
        with torch.inference_mode():
            logits = model(torch.zeros(1, 0, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), inputs)[0]
        total += float(F.cross_entropy(logits, labels, reduction="sum"))
        number += len(labels)
    assert total / number == pytest.approx(published, abs=1e-5)
    # Predicted answers are never padding, so what training spent on it is free.
    found = Likelihood.of(target_log_probs(model, checkpoint.tokenizers, [""] * len(texts), texts))
    assert published - 0.05 < found.loss < published
    assert found.perplexity == pytest.approx(math.exp(found.loss))


def test_a_state_from_before_there_were_language_models_is_resumed(data_dir: Path, tmp_path: Path) -> None:
    """It calls the best rank by what it was then."""
    from dragoman.model.training.trainer import _progression

    assert _progression({"step": 3, "best_bleu": 12.5}).best_rank == 12.5


@pytest.mark.parametrize(
    ("model", "data", "reason"),
    [
        ("decoder", SOURCES, "data.source: a language model has no source: leave it out"),
        ("additive", {"source": ""}, "data.source: missing"),
        ("dot", {"validation_source": ""}, "data.validation_source: missing"),
    ],
)
def test_sources_go_with_models_that_have_one(data_dir: Path, tmp_path: Path, model: str, data: Any, reason: str) -> None:
    with pytest.raises(TrainingConfigError, match=reason):
        prepare(file(MODELS[model], data=data), data_dir, tmp_path)


def test_rules_choose_nothing_that_means_nothing(data_dir: Path, tmp_path: Path) -> None:
    for name, absent in (
        ("additive", ("num_heads", "norm", "encoder_ffn_dim")),
        ("decoder", ("num_encoder_layers", "encoder_ffn_dim")),
    ):
        architecture = MODELS[name]["architecture"]
        given = SOURCES if architecture == "rnn" else {}
        fields = {
            "name": "toy",
            "data": {"target": "train.t", "validation_target": "val.t"} | given,
            "model": {"architecture": architecture},
        }
        prepared = prepare(TrainingFile(fields, "test"), data_dir, tmp_path / name)
        assert not {f"model.{field}" for field in absent} & prepared.record.chosen.keys()
        assert prepared.model_config.architecture == architecture


def test_a_setting_of_another_architecture_is_refused_by_name(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingConfigError, match="num_heads means nothing to the architecture rnn"):
        prepare(file({"architecture": "rnn", "num_heads": 4}), data_dir, tmp_path)


@pytest.mark.parametrize(("width", "num_heads"), [(32, 2), (48, 3), (128, 4), (80, 1), (16, 1)])
def test_a_rule_chooses_heads_that_rotary_positions_go_with(data_dir: Path, tmp_path: Path, width: int, num_heads: int) -> None:
    model = {"architecture": "decoder", "positions": "rotary", "d_model": width}
    config = prepare(file(model), data_dir, tmp_path).model_config
    assert (config.num_heads, config.head_dim % 16) == (num_heads, 0)


@pytest.mark.parametrize(("name", "other"), [("decoder", "rnn"), ("dot", "transformer"), ("decoder", "transformer")])
def test_going_on_from_another_architecture_is_refused_as_that(data_dir: Path, tmp_path: Path, name: str, other: str) -> None:
    train(data_dir, tmp_path / "first", name, max_steps=1, warmup_steps=1)
    fields = file({"architecture": other}).fields
    fields["model"] = {"architecture": other}
    with pytest.raises(TrainingConfigError, match=f"initial_checkpoint: its architecture is .*, the configuration's {other}$"):
        prepare(TrainingFile(fields, "test").going_on_from(tmp_path / "first"), data_dir, tmp_path / "second")


def test_what_counts_is_named_and_never_more_than_numbers_hold() -> None:
    assert str(Measured(2.0, 0.0, 0.0)) == "loss 2.000, BLEU 0.00"
    assert str(Measured(0.0)) == "loss 0.000, perplexity 1.00", "of a text that is certain"
    assert str(Measured(math.log(8))) == "loss 2.079, perplexity 8.00"
    assert str(Measured(1e4)) == "loss 10000.000, perplexity inf"
    assert Likelihood.of([[-1e4]]).perplexity == math.inf


def test_curves_of_a_run_that_went_astray_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "steps.csv").write_text("step,epoch,loss,learning_rate,grad_norm,target_tokens,seconds\n1,0,9000,1,1,1,1\n")
    (tmp_path / "validation.csv").write_text("step,epoch,loss,bleu,chrf\n1,0,9000,,\n2,0,3,,\n")
    plot_curves(tmp_path)
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


def test_a_configuration_is_of_one_schema() -> None:
    assert TrainingConfig.parse(file(MODELS["decoder"]).fields, "test").data.source == ""
