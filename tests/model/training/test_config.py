"""Configurations: faults named with their line, schedules, the example, rules by the size of the text, and warnings."""

import re
import subprocess
import tomllib
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

from dragoman.model.config import ModelConfig
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.training.config import (
    DataConfig,
    ScheduleConfig,
    TokenizerConfig,
    TrainingConfig,
    TrainingConfigError,
    model_config,
)
from dragoman.model.training.file import EXAMPLE, TrainingFile, to_toml
from dragoman.model.training.preparation import DECIDED
from dragoman.model.training.rules import RULES, VOCAB_SIZE, VOCAB_SIZE_TEXT, TextSize, choose, vocab_size_for
from dragoman.model.training.warnings import Facts, warnings

RECIPES = sorted((Path(__file__).parents[3] / "model" / "recipes").glob("*.toml"))
DATA = """
[data]
source = "a"
target = "b"
validation_source = "c"
validation_target = "d"
"""
GOOD = f'name = "toy"{DATA}[tokenizer]\nvocab_size = 500\n[training]\nmax_steps = 10\n'


def parse(path: str = "", value: Any = None, **model: Any) -> TrainingConfig:
    """Parse the good settings with one changed, or taken away if it is None, by its dotted path; and some of the model's."""
    settings = tomllib.loads(GOOD) | ({"model": model} if model else {})
    *tables, name = path.split(".")
    table = settings
    for key in tables:
        table = table.setdefault(key, {})
    table.pop(name, None) if value is None else table.update({name: value})
    return TrainingConfig.parse(settings, "here.toml")


def load(folder: Path, text: str | bytes, name: str = "toy.toml") -> TrainingFile:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return TrainingFile.load(folder / name)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_shipped_recipe_parses(path: Path, tokenizer: ByteLevelTokenizer) -> None:
    assert {"en-de", "en-fr"} <= {path.stem for path in RECIPES}
    config = TrainingConfig.load(path)
    assert path.stem.startswith(config.name)
    model = model_config(config, tokenizer)
    assert model.d_model == config.model["d_model"]
    source, target = config.name.split("-")[:2] if model.has_source else ("", config.name.split("-")[0])
    expected = (source and f"train.{source}.gz", f"train.{target}.gz")
    assert (config.data.source, config.data.target) == expected
    for script in ("train.sh", "diversify.sh"):
        found = subprocess.run(["bash", path.parent / script], capture_output=True, text=True, check=False)
        assert found.returncode == 2 and found.stderr.startswith("usage:")


UNKNOWN = ["extra", "data.extra", "tokenizer.extra", "training.max_step", "training.model"]
MISSING = ["name", "data", "tokenizer", "data.target", "training.max_steps"]
WRONG: dict[str, tuple[Any, ...]] = {"name": ("No Spaces", "", "../up"), "data.source": (3,), "model": (3,)}
WRONG |= {"tokenizer.vocab_size": (299,), "tokenizer.bpe_dropout": (1.0,), "training.max_steps": (0, "many", 1.5)}
WRONG |= {f"training.{name}": (0,) for name in ("warmup_steps", "max_grad_norm", "average_last", "max_tokens")}
WRONG |= {f"training.{name}": (-1,) for name in ("cooldown_steps", "patience", "seed", "weight_decay")}
WRONG |= {"training.learning_rate": (0, float("nan")), "training.label_smoothing": (1,), "training.adam_beta1": (1.0,)}
WRONG |= {"training.is_bf16": ("perhaps",)}


@pytest.mark.parametrize(
    ("path", "value", "fault"),
    [
        *((path, 1, "unknown setting$") for path in UNKNOWN),
        *((path, None, "missing$") for path in MISSING),
        *((path, value, "") for path, values in WRONG.items() for value in values),
    ],
)
def test_a_wrong_setting_is_named(path: str, value: Any, fault: str) -> None:
    with pytest.raises(TrainingConfigError, match=rf"^here\.toml: {path}: {fault}"):
        parse(path, value)


def test_model_takes_its_vocabulary_from_the_tokenizer(tokenizer: ByteLevelTokenizer) -> None:
    config = model_config(parse(d_model=64, num_heads=2, norm="pre"), tokenizer)
    assert (config.d_model, config.num_heads, config.norm) == (64, 2, "pre")
    assert config.source_vocab_size == config.target_vocab_size == tokenizer.vocab_size
    assert (config.pad_id, config.eos_id, config.decoder_start_id) == (tokenizer.pad_id, tokenizer.eos_id, tokenizer.start_id)
    for name in ("source_vocab_size", "target_vocab_size", "pad_id", "eos_id", "decoder_start_id"):
        with pytest.raises(TrainingConfigError, match=rf"^model\.{name}: set by the tokeniser$"):
            model_config(parse(**{name: 7}), tokenizer)
    for name, value in (("width", 3), ("d_model", 0), ("d_model", "wide"), ("norm", "none")):
        with pytest.raises(TrainingConfigError, match=rf"^model: .*{name}"):
            model_config(parse(**{name: value}), tokenizer)


def test_learning_rate_warms_up_falls_and_cools_down_to_nothing() -> None:
    plain = ScheduleConfig(max_steps=1000, learning_rate=0.01, warmup_steps=100)
    for step, rate in {1: 0.0001, 50: 0.005, 100: 0.01, 400: 0.005, 900: 0.01 / 3, 1000: 0.01 / 10**0.5}.items():
        assert plain.learning_rate_at(step) == pytest.approx(rate, rel=1e-12)
    cooled = ScheduleConfig(max_steps=400, learning_rate=0.01, warmup_steps=100, cooldown_steps=99)
    for step, factor in {300: 1.0, 301: 1.0, 302: 0.99, 351: 0.5, 400: 0.01, 401: 0.0, 500: 0.0}.items():
        assert cooled.learning_rate_at(step) == pytest.approx(factor * plain.learning_rate_at(step), rel=1e-12)


def test_stated_settings_win_over_chosen_ones_and_these_over_defaults(tmp_path: Path) -> None:
    chosen = {"tokenizer.vocab_size": 400, "training.max_steps": 7, "model.d_model": 64, "model.norm": "pre"}
    config = load(tmp_path, b"\xef\xbb\xbf" + DATA.encode()).complete(chosen)  # a byte order mark is no mistake
    assert (config.name, config.tokenizer.vocab_size, config.training.max_steps) == ("toy", 400, 7)
    assert (config.model, config.training.adam_beta2, config.tokenizer.bpe_dropout) == ({"d_model": 64, "norm": "pre"}, 0.98, 0.0)
    file = load(tmp_path, f'name = "other"\n{DATA}[training]\nmax_steps = 3\n[model]\nd_model = 8')
    config = file.complete(chosen)
    assert (config.name, config.training.max_steps, config.model) == ("other", 3, {"d_model": 8, "norm": "pre"})
    assert {"training.max_steps", "model.d_model", "data.source"} <= file.stated.keys()
    with pytest.raises(TrainingConfigError, match=r"My Model\.toml: name: missing$"):
        load(tmp_path, DATA, "My Model.toml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (f"{DATA}extra = 1", ", line 7: data.extra: unknown setting"),
        (f"training = 3\n{DATA}", ", line 1: training: "),
        ("[data]\nsource = 'a'\ntarget = 'b'\nvalidation_source = 'c'", ", line 1: data.validation_target: missing"),
        ("", ": data: missing"),
        (f"{DATA}[training]\nseed = -1\n[tokenizer]\nx = 3", ", line 10: tokenizer.x: unknown setting; line 8: training.seed: "),
        (f'{DATA}"a\\nb" = 1', ", line 2: data.a\\nb: unknown setting"),
        (f'"a\\nb" = 1{DATA}', ": a\\nb: unknown setting"),
        ("data = 3", ", line 1: data: must be a table"),
        ("name = ", ": not TOML: Invalid value (at end of document)"),
        ("a = " + "[" * 5000, ": not TOML: "),
        (b"# fine\n\nname = '\xff'\n", ": not TOML: not UTF-8 (at line 3)"),
    ],
)
def test_faults_of_a_file_are_named_in_a_line_with_their_line(tmp_path: Path, text: str | bytes, said: str) -> None:
    with pytest.raises(TrainingConfigError) as caught:
        load(tmp_path, text)
    assert str(caught.value).startswith(f"{tmp_path / 'toy.toml'}{said}") and "\n" not in str(caught.value)
    for read in (TrainingConfig.load, TrainingFile.load):
        for path, reason in ((tmp_path / "none.toml", r"none\.toml: No such file or directory"), (tmp_path, ": Is a directory$")):
            with pytest.raises(TrainingConfigError, match=reason):
                read(path)


def test_a_complete_configuration_written_as_toml_says_the_same(tmp_path: Path) -> None:
    odd = f'initial_checkpoint = "a\\"b\\\\c\\tä\\u007f"\n{DATA}[model]\nnorm = "pre"\nis_embedding_shared = false\ndropout = 0.0'
    config = load(tmp_path, odd).complete({"tokenizer.vocab_size": 400, "training.max_steps": 7, "training.learning_rate": 1e-9})
    text = to_toml(asdict(config), {"training.max_steps": "chosen by rule"})
    assert tomllib.loads(text) == asdict(config) and "max_steps = 7  # chosen by rule\n" in text
    assert load(tmp_path, text, "again.toml").complete({}) == config


ROOT = Path(__file__).parents[3]
ALL_STATED = re.sub(r"^#(?=\w+ = )", "", EXAMPLE, flags=re.MULTILINE)
TABLES: dict[str, Any] = {"data": DataConfig, "tokenizer": TokenizerConfig, "model": ModelConfig, "training": ScheduleConfig}
RULE_TEXTS = {VOCAB_SIZE: VOCAB_SIZE_TEXT} | {rule.setting: rule.text for rule in RULES}


def test_the_example_has_every_setting_with_its_default(tmp_path: Path) -> None:
    stated = tomllib.loads(EXAMPLE)
    assert {name: table for name, table in stated.items() if table} == {"data": stated["data"]}
    every = tomllib.loads(ALL_STATED)
    assert every.keys() == {field.name for field in fields(TrainingConfig)}
    for table, schema in TABLES.items():
        assert every[table].keys() == {field.name for field in fields(schema)} - set(DECIDED), table
        for field in fields(schema):
            if field.name in every[table] and table != "data" and f"{table}.{field.name}" not in RULE_TEXTS:
                default = getattr(field.default, "default", field.default)
                assert default in (every[table][field.name], None), field.name
    assert load(tmp_path, ALL_STATED).complete({}).training.max_steps == 10_500
    document = (ROOT / "docs/bring-a-model.md").read_text(encoding="utf-8")
    assert [setting for setting, rule in RULE_TEXTS.items() if f"| `{setting}` | {rule} |" not in document] == []


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
    assert 1 <= steps / (num_batches * settings["training.validate_every"]) <= 32
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
    for width, heads in ((128, 4), (512, 8), (1024, 16), (20, 4), (18, 3), (7, 1), (1, 1)):
        assert chosen(9, 9, model__d_model=width, training__learning_rate=1e-3)["model.num_heads"] == heads


SCHEDULE: dict[str, Any] = {"max_steps": 1000, "max_tokens": 400, "warmup_steps": 100, "cooldown_steps": 300, "validate_every": 2}
FACTS: dict[str, Any] = {"num_pairs": 200, "num_left_out": 0, "longest_pair": 20, "num_steps_per_epoch": 10, "vocab_size": 500}
FACTS |= {"validation": ([range(9)], [range(9)])}


def warned(facts: dict[str, Any] | None = None, **changes: Any) -> list[str]:
    data = dict.fromkeys(("source", "target", "validation_source", "validation_target"), "text")
    fields = {"name": "toy", "data": data, "tokenizer": {"vocab_size": 500}, "training": SCHEDULE | changes}
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
def test_a_setting_that_cannot_work_is_warned_of_in_a_line(facts: Any, changes: Any, setting: str, said: str) -> None:
    (line,) = warned(facts, **changes)
    assert line.startswith(f"{setting}: ") and said in line and "\n" not in line


def test_settings_that_work_are_not_warned_of() -> None:
    assert warned() == warned({"num_left_out": 10}) == []
    assert warned({"validation": ([range(20), *[range(3)] * 19], [range(9)] * 20)}) == []
    assert not any("warmup" in line for line in warned(max_steps=1, warmup_steps=1, cooldown_steps=0))
    lines = warned({"num_steps_per_epoch": 3000})
    assert [line.split(":")[0] for line in lines] == ["training.max_steps", "training.validate_every"]
    assert "1,000 steps are fewer than the 3,000 of an epoch" in lines[0]
