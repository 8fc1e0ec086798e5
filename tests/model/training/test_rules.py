"""Rules against sizes of text, settings that are known to work, and the documents; and warnings of settings that cannot work."""

from pathlib import Path
from typing import Any

import pytest

from dragoman.model.training.config import ScheduleConfig, TrainingConfig
from dragoman.model.training.rules import RULES, VOCAB_SIZE_TEXT, TextSize, choose, vocab_size_for
from dragoman.model.training.warnings import Facts, warnings

ROOT = Path(__file__).parents[3]


def chosen(num_pairs: int, num_tokens: int, initial: dict[str, Any] | None = None, **stated: Any) -> dict[str, Any]:
    """Choose for so many pairs of so many tokens, the special one included."""
    rows = [range(num_tokens - 1)] * num_pairs
    return choose({name.replace("__", "."): value for name, value in stated.items()}, rows, rows, initial)


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


def test_batches_models_and_vocabularies_grow_with_the_text() -> None:
    size = TextSize.of([[1, 2], [1]], [[1], [1, 2, 3]])
    assert size == TextSize(num_pairs=2, source_tokens=5, target_tokens=6, longer_tokens=7), "special tokens count"
    assert [chosen(num, 20)["training.max_tokens"] for num in (200, 2000, 10_000, 100_000)] == [320, 400, 2000, 4096]
    assert chosen(100_000, 20)["training.max_tokens"] == ScheduleConfig(max_steps=1).max_tokens
    models = [chosen(num, 1000) for num in (200, 201, 2000, 2001, 20_000, 20_001)]
    assert [model["model.d_model"] for model in models] == [128, 128, 128, 256, 256, 512]
    assert [model["model.num_decoder_layers"] for model in models] == [2, 4, 4, 4, 4, 6]
    assert [vocab_size_for(words) for words in (0, 1, 10_000, 1_000_000, 10**9)] == [300, 300, 760, 5260, 32_000]


def test_stated_settings_are_not_chosen_and_the_rest_follows_them() -> None:
    settings = chosen(200, 12, training__max_steps=100, model__d_model=48)
    assert "training.max_steps" not in settings and "model.d_model" not in settings
    assert (settings["training.warmup_steps"], settings["training.cooldown_steps"]) == (10, 33)
    assert settings["model.encoder_ffn_dim"] == 192
    initial = {"d_model": 16, "norm": "post", "dropout": 0.1, "num_heads": 2}  # which stands where nothing is stated
    settings = chosen(9, 9, initial, model__dropout=0.5)
    assert (settings["model.d_model"], settings["model.norm"], settings["model.num_heads"]) == (16, "post", 2)
    assert "model.dropout" not in settings


@pytest.mark.parametrize(("width", "heads"), [(128, 4), (512, 8), (1024, 16), (20, 4), (18, 3), (7, 1), (1, 1)])
def test_heads_divide_the_width(width: int, heads: int) -> None:
    assert chosen(9, 9, model__d_model=width, training__learning_rate=1e-3)["model.num_heads"] == heads


def test_rules_are_in_the_documents_as_they_are() -> None:
    document = (ROOT / "docs/checkpoints.md").read_text(encoding="utf-8")
    for setting, rule in [("tokenizer.vocab_size", VOCAB_SIZE_TEXT), *((rule.setting, rule.text) for rule in RULES)]:
        assert f"| `{setting}` | {rule} |" in document


GOOD: dict[str, Any] = {"max_steps": 1000, "max_tokens": 400, "warmup_steps": 100, "cooldown_steps": 300, "validate_every": 2}
FACTS: dict[str, Any] = {"num_pairs": 200, "num_left_out": 0, "longest_pair": 20, "num_steps_per_epoch": 10, "vocab_size": 500}
FACTS |= {"validation": ([range(9)], [range(9)])}


def warned(facts: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    data = dict.fromkeys(("source", "target", "validation_source", "validation_target"), "text")
    fields = {"name": "toy", "data": data, "tokenizer": {"vocab_size": 500}, "training": GOOD | changes}
    return warnings(TrainingConfig.parse(fields, "test"), Facts(**FACTS | (facts or {})))


@pytest.mark.parametrize(
    ("facts", "changes", "setting", "said"),
    [
        ({}, {"warmup_steps": 2000}, "training.warmup_steps", "2,000 steps, but training ends after 1,000 steps"),
        ({}, {"warmup_steps": 1000}, "training.warmup_steps", "1,000"),
        ({}, {"warmup_steps": 800}, "training.cooldown_steps", "never gets to learning_rate"),
        ({}, {"validate_every": 101}, "training.validate_every", "1,010 steps"),
        ({"num_steps_per_epoch": 2}, {}, "training.max_tokens", "an epoch of 200 pairs is 2 steps"),
        ({"num_steps_per_epoch": 1}, {}, "training.max_tokens", "an epoch of 200 pairs is 1 step:"),
        ({"longest_pair": 401}, {}, "training.max_tokens", "401 tokens"),
        ({"num_left_out": 11}, {}, "training.max_length", "11 of 211 pairs"),
        ({"vocab_size": 400}, {}, "tokenizer.vocab_size", "400 tokens can be learnt of this text, not 500"),
        ({"validation": ([range(3), range(20)], [range(9)])}, {}, "data.validation_source", "1 of 2 lines are longer"),
        ({"validation": ([range(9)], [range(300)]), "longest_pair": 399}, {}, "data.validation_target", "line 1 has 301 tokens"),
    ],
)
def test_a_setting_that_cannot_work_is_warned_of_in_a_line(
    facts: dict[str, Any], changes: dict[str, Any], setting: str, said: str
) -> None:
    (line,) = warned(facts, **changes)
    assert line.startswith(f"{setting}: ") and said in line and "\n" not in line


def test_settings_that_work_are_not_warned_of() -> None:
    assert warned() == warned({"num_left_out": 10}) == []
    assert warned({"validation": ([range(20), *[range(3)] * 19], [range(9)] * 20)}) == []
    assert not any("warmup" in line for line in warned(max_steps=1, warmup_steps=1, cooldown_steps=0))
    lines = warned({"num_steps_per_epoch": 3000})
    assert [line.split(":")[0] for line in lines] == ["training.max_steps", "training.validate_every"]
    assert "1,000 steps are fewer than the 3,000 of an epoch" in lines[0]
