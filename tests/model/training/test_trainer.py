"""Whole trainings of a very small model on a made-up language whose translation is the sentence backwards."""

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
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from dragoman.model.checkpoint import Checkpoint, CheckpointError
from dragoman.model.corpus import DataError
from dragoman.model.evaluate import evaluate
from dragoman.model.training.config import TrainingConfig, TrainingConfigError
from dragoman.model.training.file import TrainingFile
from dragoman.model.training.measured import Measured
from dragoman.model.training.preparation import prepare
from dragoman.model.training.trainer import Trainer
from dragoman.model.training.validation import Validation

WORDS = ["red", "green", "blue", "cat", "dog", "hat", "sun", "moon"]
CPU = torch.device("cpu")
SETTINGS: dict[str, dict[str, Any]] = {
    "data": {"source": "train.s", "target": "train.t", "validation_source": "val.s", "validation_target": "val.t"},
    "tokenizer": {"vocab_size": 300, "bpe_dropout": 0.2},
    "model": {
        "d_model": 16,
        "num_heads": 2,
        "num_encoder_layers": 1,
        "num_decoder_layers": 1,
        "encoder_ffn_dim": 32,
        "decoder_ffn_dim": 32,
        "dropout": 0.2,
        "attention_dropout": 0.1,
        "max_target_positions": 40,
    },
    "training": {"max_steps": 28, "max_tokens": 200, "warmup_steps": 10, "max_length": 40, "average_last": 2},
}


@pytest.fixture(scope="module")
def data_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    rng = random.Random(0)
    for name, size in (("train", 100), ("val", 8)):
        sentences = [rng.choices(WORDS, k=rng.randint(2, 6)) for _ in range(size)]
        for suffix, lines in (("s", sentences), ("t", [words[::-1] for words in sentences])):
            (folder / f"{name}.{suffix}").write_text("".join(" ".join(words) + "\n" for words in lines), encoding="utf-8")
    return folder


def configure(**changes: dict[str, Any]) -> TrainingConfig:
    """Change some of `SETTINGS`, table by table."""
    return TrainingConfig.parse({"name": "toy"} | {table: SETTINGS[table] | changes.get(table, {}) for table in SETTINGS}, "test")


def begin(config: TrainingConfig, data_dir: Path, output: Path) -> Trainer:
    """Begin or resume a run whose configuration leaves nothing to the rules."""
    return Trainer(prepare(TrainingFile(asdict(config), "test"), data_dir, output), CPU)


def train(config: TrainingConfig, data_dir: Path, output: Path) -> Trainer:
    trainer = begin(config, data_dir, output)
    trainer.run()
    return trainer


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def outcome(output: Path) -> dict[str, Any]:
    """Everything a run leaves behind that must not depend on time."""
    folder = output / "training"
    steps = [{name: value for name, value in row.items() if name != "seconds"} for row in rows(folder / "steps.csv")]
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    del summary["seconds"]
    files = [*output.glob("*.*"), *folder.glob("step-*")]
    return {
        "steps": steps,
        "validations": (folder / "validation.csv").read_text(encoding="utf-8"),
        "summary": summary,
        "files": {path.name: path.read_bytes() for path in files},
    }


@pytest.fixture(scope="module")
def whole(data_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the output of a training that nothing interrupted."""
    output = tmp_path_factory.mktemp("whole") / "toy"
    train(configure(), data_dir, output)
    return output


def test_loss_falls(data_dir: Path, tmp_path: Path) -> None:
    train(configure(model={"dropout": 0.0}, training={"max_steps": 60, "learning_rate": 0.01}), data_dir, tmp_path)
    losses = [float(row["loss"]) for row in rows(tmp_path / "training" / "steps.csv")]
    assert len(losses) == 60
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    validated = [float(row["loss"]) for row in rows(tmp_path / "training" / "validation.csv")]
    assert validated[-1] < 0.8 * validated[0]


def test_run_writes_a_checkpoint_logs_summary_and_picture(whole: Path) -> None:
    assert Checkpoint.load(whole).name == "toy"
    folder = whole / "training"
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    steps, validations = rows(folder / "steps.csv"), rows(folder / "validation.csv")
    assert [int(row["step"]) for row in steps] == list(range(1, 29))
    rates = [configure().training.learning_rate_at(step) for step in range(1, 29)]
    assert [float(row["learning_rate"]) for row in steps] == rates
    assert int(validations[-1]["step"]) == 28
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    assert (summary["step"], summary["num_pairs"], summary["num_pairs_left_out"]) == (28, 100, 0)
    assert summary["num_parameters"] == sum(parameter.numel() for parameter in Checkpoint.load(whole).model.parameters())
    assert summary["best_bleu"] == max(float(row["bleu"]) for row in validations)
    assert not list(whole.rglob("*.tmp"))


def test_only_the_newest_validated_weights_are_kept(whole: Path) -> None:
    steps = [int(row["step"]) for row in rows(whole / "training" / "validation.csv")]
    assert len(steps) > 2
    assert sorted(path.name for path in whole.glob("training/step-*")) == [f"step-{step:07d}.safetensors" for step in steps[-2:]]


def test_same_seed_gives_the_same_run(whole: Path, data_dir: Path, tmp_path: Path) -> None:
    train(configure(), data_dir, tmp_path)
    assert outcome(tmp_path) == outcome(whole)


def test_other_seed_gives_another_run(whole: Path, data_dir: Path, tmp_path: Path) -> None:
    train(configure(training={"seed": 2}), data_dir, tmp_path)
    assert outcome(tmp_path)["steps"] != outcome(whole)["steps"]


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
elif where == "validating":
    validate = trainer._validate
    def validate_and_die():
        validate()
        if trainer.progression.step == at:
            die()
    trainer._validate = validate_and_die
elif where == "saving":
    save = dragoman.model.training.trainer.save_tensors
    def half(path, tensors, metadata=None):
        if path.name == "state.safetensors" and trainer.progression.step == at:
            path.with_name(path.name + ".tmp").write_bytes(b"half")
            die()
        save(path, tensors, metadata)
    dragoman.model.training.trainer.save_tensors = half
elif where == "ending":
    trainer._finish = die
trainer.run()
"""


@pytest.mark.parametrize(
    ("save_seconds", "where", "at"),
    [
        pytest.param(0.0, "logging", 13, id="in the middle of an epoch"),
        pytest.param(1e9, "logging", 13, id="some steps after the last saved state"),
        pytest.param(1e9, "logging", 3, id="before any state was saved"),
        pytest.param(0.0, "validating", 8, id="between validation and saved state"),
        pytest.param(0.0, "validating", 28, id="between the last validation and saved state"),
        pytest.param(0.0, "saving", 12, id="while the state is written"),
        pytest.param(0.0, "ending", 0, id="after the last step"),
    ],
)
def test_killed_training_resumes_to_the_same_end(whole: Path, data_dir: Path, tmp_path: Path, save_seconds, where, at) -> None:
    output = tmp_path / "toy"
    arguments = json.dumps([asdict(configure()), str(data_dir), str(output), save_seconds, where, at])
    killed = subprocess.run([sys.executable, "-c", KILLED, arguments], env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not (output / "training" / "summary.json").exists()
    trainer = begin(configure(), data_dir, output)
    resumed_at = trainer.progression.step
    assert (resumed_at > 0) == ((output / "training" / "state.safetensors").exists())
    trainer.run()
    assert outcome(output) == outcome(whole)


def test_epochs_end_where_the_kills_expect_them(whole: Path) -> None:
    assert [int(row["step"]) for row in rows(whole / "training" / "validation.csv")] == [8, 16, 24, 28]


def test_finished_run_started_again_changes_nothing(whole: Path, data_dir: Path, tmp_path: Path) -> None:
    output = tmp_path / "toy"
    shutil.copytree(whole, output)
    train(configure(), data_dir, output)
    assert outcome(output) == outcome(whole)


@pytest.mark.parametrize(
    "changes", [{"training": {"max_steps": 29}}, {"model": {"dropout": 0.0}}, {"tokenizer": {"vocab_size": 301}}]
)
def test_another_configuration_is_refused(whole: Path, data_dir: Path, changes) -> None:
    before = outcome(whole)
    with pytest.raises(TrainingConfigError, match=re.escape(f"{whole} holds a run of another configuration")):
        begin(configure(**changes), data_dir, whole)
    assert outcome(whole) == before


def test_failed_start_does_not_claim_the_folder(data_dir: Path, tmp_path: Path) -> None:
    """A typing mistake corrected is not another configuration."""
    with pytest.raises(DataError, match="none"):
        begin(configure(data={"source": "none"}), data_dir, tmp_path)
    begin(configure(), data_dir, tmp_path).close()


def test_average_is_the_mean_of_the_kept_weights(whole: Path) -> None:
    kept = [load_file(path) for path in sorted(whole.glob("training/step-*"))]
    mean = {name: torch.stack([weights[name].double() for weights in kept]).mean(0).float() for name in kept[0]}
    summary = json.loads((whole / "training" / "summary.json").read_text(encoding="utf-8"))
    published = Checkpoint.load(whole).model
    is_average = all(torch.equal(parameter, mean[name]) for name, parameter in published.named_parameters())
    assert is_average == (summary["published"] == "averaged")
    assert summary["averaged_checkpoints"] == 2


@pytest.mark.parametrize("better", ["averaged", "best"])
def test_better_model_is_published(data_dir: Path, tmp_path: Path, monkeypatch, better: str) -> None:
    """Scores are made up, so that each case is sure to happen; the weights published must be the ones that scored higher."""
    scored: list[dict[str, torch.Tensor]] = []

    trained: list[torch.nn.Module] = []

    def made_up(self: Validation, model: torch.nn.Module, device: torch.device) -> Measured:
        scored.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        trained.append(model)
        is_average = model is not trained[0]
        bleu = (50.0 if better == "averaged" else 5.0) if is_average else 10.0 + 20.0 * (len(scored) == 2)
        return Measured(1.0, bleu, 1.0)

    monkeypatch.setattr(Validation, "measure", made_up)
    train(configure(), data_dir, tmp_path)
    summary = json.loads((tmp_path / "training" / "summary.json").read_text(encoding="utf-8"))
    assert summary["published"] == better
    assert (summary["best_bleu"], summary["averaged_bleu"]) == (30.0, 50.0 if better == "averaged" else 5.0)
    expected = scored[-1] if better == "averaged" else scored[1]
    published = dict(Checkpoint.load(tmp_path).model.named_parameters())
    assert all(torch.equal(published[name], tensor) for name, tensor in expected.items())


def test_published_model_scores_what_the_summary_says(whole: Path, data_dir: Path) -> None:
    summary = json.loads((whole / "training" / "summary.json").read_text(encoding="utf-8"))
    checkpoint = Checkpoint.load(whole)
    texts = [(data_dir / name).read_text(encoding="utf-8").splitlines() for name in ("val.s", "val.t")]
    bleu = evaluate(checkpoint.model, checkpoint.tokenizers, *texts).bleu
    assert bleu == max(summary["averaged_bleu"], summary["best_bleu"])


def test_patience_stops_early(data_dir: Path, tmp_path: Path, monkeypatch) -> None:
    bleus = iter([1.0, 3.0, 2.0, 3.0, 0.5])
    monkeypatch.setattr(Validation, "measure", lambda self, model, device: Measured(1.0, next(bleus), 1.0))
    train(configure(training={"max_steps": 1000, "patience": 2}), data_dir, tmp_path)
    validations = rows(tmp_path / "training" / "validation.csv")
    assert [float(row["bleu"]) for row in validations] == [1.0, 3.0, 2.0, 3.0]
    assert len(rows(tmp_path / "training" / "steps.csv")) == int(validations[-1]["step"])


def test_two_passes_differ_by_their_dropout_alone(data_dir: Path, tmp_path: Path) -> None:
    """Without dropout the passes are the same, and the run is that of a single pass."""
    still: dict[str, Any] = {"dropout": 0.0, "attention_dropout": 0.0}
    losses: dict[tuple[float, float], list[float]] = {}
    for r_drop, dropouts in ((0.0, still), (5.0, still), (5.0, {}), (0.001, {})):
        folder = tmp_path / f"{r_drop}-{len(dropouts)}"
        train(configure(training={"max_steps": 6, "r_drop": r_drop}, model=dropouts), data_dir, folder)
        losses[r_drop, len(dropouts)] = [float(row["loss"]) for row in rows(folder / "training" / "steps.csv")]
    assert losses[5.0, 2] == pytest.approx(losses[0.0, 2], rel=1e-4)
    assert losses[5.0, 0][0] > losses[0.001, 0][0], "the same masks, another weight of what they make different"


def test_a_run_goes_on_from_a_checkpoint(whole: Path, data_dir: Path, tmp_path: Path) -> None:
    config = replace(configure(model={"dropout": 0.1}), initial_checkpoint=str(whole))
    trainer = begin(config, data_dir, tmp_path)
    before = Checkpoint.load(whole)
    assert trainer.checkpoint.tokenizers.source.encode("red cat") == before.tokenizers.source.encode("red cat")
    assert all(
        torch.equal(ours, theirs)
        for ours, theirs in zip(trainer.checkpoint.model.parameters(), before.model.parameters(), strict=True)
    )
    assert trainer.progression.step == 0
    trainer.run()
    first, fresh = (float(rows(folder / "training" / "steps.csv")[0]["loss"]) for folder in (tmp_path, whole))
    assert first < fresh
    resumed = begin(config, data_dir, tmp_path)
    resumed.close()
    assert resumed.progression.step == 28, "what it has learnt since is not given up for the initial weights"
    assert not torch.equal(next(resumed.checkpoint.model.parameters()), next(before.model.parameters()))


def test_a_checkpoint_of_another_model_is_not_gone_on_from(whole: Path, data_dir: Path, tmp_path: Path) -> None:
    config = replace(configure(model={"num_heads": 4}), initial_checkpoint=str(whole))
    with pytest.raises(TrainingConfigError, match="initial_checkpoint: its num_heads is 2, the configuration's 4"):
        begin(config, data_dir, tmp_path)


def test_a_run_goes_on_with_a_larger_model(data_dir: Path, tmp_path: Path) -> None:
    """It begins with what the smaller one says, and a stop in between changes nothing."""
    train(configure(model={"norm": "pre"}), data_dir, tmp_path / "small")
    small = Checkpoint.load(tmp_path / "small")
    larger = {"norm": "pre", "num_encoder_layers": 3, "num_decoder_layers": 2, "encoder_ffn_dim": 64, "decoder_ffn_dim": 35}
    config = replace(configure(model=larger), initial_checkpoint=str(tmp_path / "small"))
    trainer = begin(config, data_dir, tmp_path / "whole")
    pair = torch.tensor([small.tokenizers.source.encode("red cat hat")]), torch.tensor([3]), torch.tensor([[2, 9, 8, 7]])
    with torch.no_grad():
        torch.testing.assert_close(trainer.checkpoint.model.eval()(*pair), small.model(*pair), rtol=1e-5, atol=1e-5)
    trainer.run()
    begun = begin(config, data_dir, tmp_path / "stopped")
    for _, batch in zip(range(13), begun._remaining_batches(), strict=False):
        begun._step(batch)
    begun.save_state()
    begun.close()
    resumed = begin(config, data_dir, tmp_path / "stopped")
    assert resumed.progression.step == 13
    resumed.run()
    whole, stopped = (Checkpoint.load(tmp_path / name).model for name in ("whole", "stopped"))
    assert whole.config.num_encoder_layers == 3
    for (name, ours), theirs in zip(whole.named_parameters(), stopped.parameters(), strict=True):
        assert torch.equal(ours, theirs), name


def test_an_initial_checkpoint_that_is_not_there_is_named(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape(str(tmp_path / "none"))):
        begin(replace(configure(), initial_checkpoint=str(tmp_path / "none")), data_dir, tmp_path)


def test_validation_waits_for_its_epochs(whole: Path, data_dir: Path, tmp_path: Path) -> None:
    train(configure(training={"validate_every": 2}), data_dir, tmp_path)
    epochs = [int(row["epoch"]) for row in rows(tmp_path / "training" / "validation.csv")]
    assert [epoch for epoch in epochs[:-1] if epoch % 2] == []
    assert outcome(tmp_path)["steps"] == outcome(whole)["steps"]


def test_long_pairs_are_left_out_and_counted(data_dir: Path, tmp_path: Path) -> None:
    trainer = begin(configure(training={"max_length": 6}), data_dir, tmp_path)
    trainer.close()
    lengths = [
        len(trainer.checkpoint.tokenizers.source.encode(line)) + 1 for line in (data_dir / "train.s").read_text().splitlines()
    ]
    assert 0 < trainer.sampler.num_left_out == sum(length > 6 for length in lengths)


def test_length_that_leaves_nothing_is_named(data_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingConfigError, match=r"training\.max_length: no training pair is short enough"):
        begin(configure(training={"max_length": 1}), data_dir, tmp_path)


@pytest.mark.parametrize(("side", "file"), [("source", "val.s"), ("target", "val.t")])
def test_validation_line_too_long_for_the_model_is_numbered(data_dir: Path, tmp_path: Path, side: str, file: str) -> None:
    with pytest.raises(
        DataError, match=re.escape(f"{data_dir / file}, line ") + r"\d+: \d+ tokens where the model has 3 positions"
    ):
        begin(configure(model={f"max_{side}_positions": 3}), data_dir, tmp_path)


def test_gradient_that_is_not_finite_stops_the_run(data_dir: Path, tmp_path: Path) -> None:
    trainer = begin(configure(), data_dir, tmp_path)
    trainer.checkpoint.model.decoder.layers[0].feed_forward.inner.weight.data[0, 0] = math.nan
    with pytest.raises(FloatingPointError, match="toy: the gradient is not finite at step 1; lower learning_rate"):
        trainer.run()
