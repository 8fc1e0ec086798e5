import tomllib
from pathlib import Path
from typing import Any

import pytest

from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.training.config import ScheduleConfig, TrainingConfig, TrainingConfigError, model_config

RECIPES = sorted((Path(__file__).parents[3] / "model" / "recipes").glob("*.toml"))
GOOD = """
name = "toy"
[data]
source = "a"
target = "b"
validation_source = "c"
validation_target = "d"
[tokenizer]
vocab_size = 500
[training]
max_steps = 10
"""


def parse(changes: dict[str, Any], without: str = "") -> TrainingConfig:
    """Parse the good settings with some changed and one taken away, both by dotted path."""
    fields = tomllib.loads(GOOD)
    for path, value in changes.items():
        *tables, name = path.split(".")
        table = fields
        for key in tables:
            table = table.setdefault(key, {})
        table[name] = value
    if without:
        *tables, name = without.split(".")
        del (fields[tables[0]] if tables else fields)[name]
    return TrainingConfig.parse(fields, "here.toml")


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipe_parses(path: Path, tokenizer: ByteLevelTokenizer) -> None:
    config = TrainingConfig.load(path)
    assert path.stem.startswith(config.name)
    model = model_config(config, tokenizer)
    assert model.d_model == config.model["d_model"]
    source, target = config.name.split("-")[:2]
    of_language = {"source": source, "target": target} if model.has_source else {"source": "", "target": source}
    assert {side: getattr(config.data, side) for side in of_language} == {
        side: language and f"train.{language}.gz" for side, language in of_language.items()
    }


def test_there_are_recipes() -> None:
    assert {"en-de", "en-fr"} <= {path.stem for path in RECIPES}


def test_defaults_fill_what_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "good.toml"
    path.write_text(GOOD, encoding="utf-8")
    config = TrainingConfig.load(path)
    assert (config.name, config.training.max_steps, config.training.adam_beta2) == ("toy", 10, 0.98)
    assert (config.tokenizer.bpe_dropout, config.model) == (0.0, {})


@pytest.mark.parametrize(
    "path", ["extra", "data.extra", "tokenizer.extra", "training.max_step", "training.model.d_model"], ids=lambda path: path
)
def test_unknown_setting_is_named(path: str) -> None:
    shown = "training.model" if path == "training.model.d_model" else path
    with pytest.raises(TrainingConfigError, match=rf"^here\.toml: {shown}: unknown setting$"):
        parse({path: 1})


@pytest.mark.parametrize(
    "path", ["name", "data", "tokenizer", "training", "data.target", "tokenizer.vocab_size", "training.max_steps"]
)
def test_missing_setting_is_named(path: str) -> None:
    with pytest.raises(TrainingConfigError, match=rf"^here\.toml: {path}: missing$"):
        parse({}, without=path)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("name", "No Spaces"),
        ("name", ""),
        ("name", "../up"),
        ("data.source", 3),
        ("tokenizer.vocab_size", 299),
        ("tokenizer.bpe_dropout", 1.0),
        ("training.max_steps", 0),
        ("training.max_steps", "many"),
        ("training.max_steps", 1.5),
        ("training.max_tokens", -4),
        ("training.learning_rate", 0),
        ("training.learning_rate", float("nan")),
        ("training.warmup_steps", 0),
        ("training.cooldown_steps", -1),
        ("training.label_smoothing", 1),
        ("training.weight_decay", -0.1),
        ("training.adam_beta1", 1.0),
        ("training.max_grad_norm", 0),
        ("training.average_last", 0),
        ("training.patience", -1),
        ("training.seed", -1),
        ("training.is_bf16", "perhaps"),
        ("model", 3),
    ],
)
def test_invalid_setting_is_named(path: str, value: Any) -> None:
    with pytest.raises(TrainingConfigError, match=rf"^here\.toml: {path}: "):
        parse({path: value})


def test_all_faults_are_listed_at_once() -> None:
    with pytest.raises(TrainingConfigError) as caught:
        parse({"training.seed": -1, "data.extra": 1}, without="name")
    assert {fault.split(":")[0] for fault in str(caught.value).removeprefix("here.toml: ").split("; ")} == {
        "name",
        "training.seed",
        "data.extra",
    }


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TrainingConfigError, match=r"none\.toml: No such file or directory"):
        TrainingConfig.load(tmp_path / "none.toml")


@pytest.mark.parametrize("content", [b"name = ", b"\xff\xff"])
def test_file_that_is_no_toml_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.toml").write_bytes(content)
    with pytest.raises(TrainingConfigError, match=r"bad\.toml: not TOML: "):
        TrainingConfig.load(tmp_path / "bad.toml")


def test_model_takes_its_vocabulary_from_the_tokenizer(tokenizer: ByteLevelTokenizer) -> None:
    config = model_config(parse({"model.d_model": 64, "model.num_heads": 2, "model.norm": "pre"}), tokenizer)
    assert (config.d_model, config.num_heads, config.norm) == (64, 2, "pre")
    assert config.source_vocab_size == config.target_vocab_size == tokenizer.vocab_size
    assert (config.pad_id, config.eos_id, config.decoder_start_id) == (tokenizer.pad_id, tokenizer.eos_id, tokenizer.start_id)


@pytest.mark.parametrize("name", ["source_vocab_size", "target_vocab_size", "pad_id", "eos_id", "decoder_start_id"])
def test_what_the_tokenizer_decides_cannot_be_set(tokenizer: ByteLevelTokenizer, name: str) -> None:
    with pytest.raises(TrainingConfigError, match=rf"^model\.{name}: set by the tokeniser$"):
        model_config(parse({f"model.{name}": 7}), tokenizer)


@pytest.mark.parametrize(("name", "value"), [("width", 3), ("d_model", 0), ("d_model", "wide"), ("norm", "none")])
def test_invalid_model_setting_is_named(tokenizer: ByteLevelTokenizer, name: str, value: Any) -> None:
    with pytest.raises(TrainingConfigError, match=rf"^model: .*{name}"):
        model_config(parse({f"model.{name}": value}), tokenizer)


def test_learning_rate_warms_up_and_falls() -> None:
    schedule = ScheduleConfig(max_steps=1000, learning_rate=0.01, warmup_steps=100)
    expected = {1: 0.0001, 50: 0.005, 100: 0.01, 400: 0.005, 900: 0.01 / 3, 1000: 0.01 / 10**0.5}
    for step, rate in expected.items():
        assert schedule.learning_rate_at(step) == pytest.approx(rate, rel=1e-12)


def test_learning_rate_cools_down_to_nothing() -> None:
    schedule = ScheduleConfig(max_steps=400, learning_rate=0.01, warmup_steps=100, cooldown_steps=99)
    plain = ScheduleConfig(max_steps=400, learning_rate=0.01, warmup_steps=100)
    expected = {300: 1.0, 301: 1.0, 302: 0.99, 351: 0.5, 400: 0.01, 401: 0.0, 500: 0.0}
    for step, factor in expected.items():
        assert schedule.learning_rate_at(step) == pytest.approx(factor * plain.learning_rate_at(step), rel=1e-12)
