"""Text of a made-up language whose translation is the sentence backwards, and runs of a very small model on it."""

import csv
import random
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.model.training.config import TrainingConfig
from dragoman.model.training.file import TrainingFile
from dragoman.model.training.preparation import prepare
from dragoman.model.training.trainer import Trainer

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
    trainer.save_state()
    trainer.close()
    return trainer


def rows(output: Path, name: str) -> list[dict[str, str]]:
    with (output / "training" / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def are_equal(first: torch.nn.Module, second: torch.nn.Module) -> bool:
    weights, others = first.state_dict(), second.state_dict()
    return weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
