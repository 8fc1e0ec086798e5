"""Rules against sizes of text: what comes out is held against settings that are known to work, and against the documents."""

import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dragoman.model.training.config import ScheduleConfig, TrainingConfig
from dragoman.model.training.file import TrainingFile
from dragoman.model.training.rules import RULES, VOCAB_SIZE_TEXT, TextSize, choose, vocab_size_for

ROOT = Path(__file__).parents[3]
RECIPES = sorted((ROOT / "model" / "recipes").glob("*.toml"))
# What recipes leave out was this when the shipped models were trained.
DEFAULTS = {"max_tokens": 4096, "max_length": 256, "cooldown_steps": 0, "label_smoothing": 0.1, "patience": 0, "average_last": 5}


def text(num_pairs: int, num_tokens: int) -> tuple[list[range], list[range]]:
    """Rows that are as good as ids: so many pairs of so many tokens, the special one included."""
    return [range(num_tokens - 1)] * num_pairs, [range(num_tokens - 1)] * num_pairs


def chosen(num_pairs: int, num_tokens: int, **stated: Any) -> dict[str, Any]:
    return choose({name.replace("__", "."): value for name, value in stated.items()}, *text(num_pairs, num_tokens), None)


def test_a_text_is_counted_with_its_special_tokens() -> None:
    size = TextSize.of([[1, 2], [1]], [[1], [1, 2, 3]])
    assert size == TextSize(num_pairs=2, source_tokens=5, target_tokens=6, longer_tokens=7)


@pytest.mark.parametrize("num_pairs", [1, 2, 20, 200, 2000, 30_000])
def test_every_size_gives_a_schedule_that_can_work(num_pairs: int) -> None:
    settings = chosen(num_pairs, 12)
    steps, warmup, cooldown = (settings[f"training.{name}_steps"] for name in ("max", "warmup", "cooldown"))
    assert warmup >= 1 and warmup + cooldown < steps
    num_batches = -(-num_pairs // (settings["training.max_tokens"] // 12))
    assert num_batches * settings["training.validate_every"] <= steps
    assert steps / (num_batches * settings["training.validate_every"]) <= 32
    assert num_pairs < 100 or num_batches >= 8, "an epoch is more than a few steps"
    assert 0 < settings["training.learning_rate"] <= 3e-3


def test_small_text_gets_small_batches_and_large_text_the_largest() -> None:
    sizes = [chosen(num_pairs, 20)["training.max_tokens"] for num_pairs in (200, 2000, 10_000, 100_000)]
    assert sizes == [320, 400, 2000, 4096]


def test_models_grow_with_the_text() -> None:
    models = [chosen(num_pairs, 1000) for num_pairs in (200, 201, 2000, 2001, 20_000, 20_001)]
    assert [model["model.d_model"] for model in models] == [128, 128, 128, 256, 256, 512]
    assert [model["model.num_decoder_layers"] for model in models] == [2, 4, 4, 4, 4, 6]


def test_what_is_stated_is_not_chosen_and_the_rest_follows_it() -> None:
    settings = chosen(200, 12, training__max_steps=100, model__d_model=48)
    assert "training.max_steps" not in settings and "model.d_model" not in settings
    assert settings["training.warmup_steps"] == 10
    assert settings["training.cooldown_steps"] == 33
    assert settings["model.encoder_ffn_dim"] == 192


@pytest.mark.parametrize(("width", "heads"), [(128, 4), (512, 8), (1024, 16), (20, 4), (18, 3), (7, 1), (1, 1)])
def test_heads_divide_the_width(width: int, heads: int) -> None:
    assert chosen(9, 9, model__d_model=width, training__learning_rate=1e-3)["model.num_heads"] == heads


def test_a_vocabulary_grows_with_the_root_of_the_text() -> None:
    assert [vocab_size_for(words) for words in (0, 1, 10_000, 1_000_000, 10**9)] == [300, 300, 760, 5260, 32_000]


def test_the_initial_model_stands_where_nothing_is_stated() -> None:
    settings = choose({"model.dropout": 0.5}, *text(9, 9), {"d_model": 16, "norm": "post", "dropout": 0.1, "num_heads": 2})
    assert (settings["model.d_model"], settings["model.norm"], settings["model.num_heads"]) == (16, "post", 2)
    assert "model.dropout" not in settings


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipes_mean_what_they_meant_when_the_shipped_models_were_trained(path: Path) -> None:
    """On as many captions as Multi30k has no rule gives another value than the default of that time."""
    file = TrainingFile.load(path)
    rng = np.random.default_rng(0)
    rows = [range(length) for length in rng.integers(8, 28, size=29_000)]
    initial = {"num_heads": 4} if file.fields.get("initial_checkpoint") else None
    config = file.complete(choose(file.stated, rows, rows, initial))
    stated = tomllib.loads(path.read_text(encoding="utf-8"))
    expected = TrainingConfig.parse(stated, "recipe")
    assert config.training == expected.training
    assert config.tokenizer == expected.tokenizer
    assert config.model == expected.model
    for name, value in DEFAULTS.items():
        assert getattr(config.training, name) == stated["training"].get(name, value)


def test_the_largest_batch_is_the_default_of_a_configuration_without_rules() -> None:
    assert chosen(1_000_000, 20)["training.max_tokens"] == ScheduleConfig(max_steps=1).max_tokens


def test_rules_are_in_the_documents_as_they_are() -> None:
    document = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    for setting, rule in [("tokenizer.vocab_size", VOCAB_SIZE_TEXT), *((rule.setting, rule.text) for rule in RULES)]:
        assert f"| `{setting}` | {rule} |" in document
