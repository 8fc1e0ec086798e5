"""The example against the settings that there are."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from dragoman.model.config import ModelConfig
from dragoman.model.training.config import DataConfig, ScheduleConfig, TokenizerConfig, TrainingConfig
from dragoman.model.training.example import EXAMPLE
from dragoman.model.training.file import TrainingFile
from dragoman.model.training.preparation import DECIDED
from dragoman.model.training.rules import RULES, VOCAB_SIZE, VOCAB_SIZE_TEXT

ALL_STATED = re.sub(r"^#(?=\w+ = )", "", EXAMPLE, flags=re.MULTILINE)
TABLES = {"data": DataConfig, "tokenizer": TokenizerConfig, "model": ModelConfig, "training": ScheduleConfig}
RULE_TEXTS = {VOCAB_SIZE: VOCAB_SIZE_TEXT} | {rule.setting: rule.text for rule in RULES}


def test_only_data_is_stated() -> None:
    stated = tomllib.loads(EXAMPLE)
    assert {name: table for name, table in stated.items() if table} == {"data": stated["data"]}


def test_every_setting_is_in_it_and_nothing_else(tmp_path: Path) -> None:
    stated = tomllib.loads(ALL_STATED)
    assert stated.keys() == {field.name for field in fields(TrainingConfig)}
    for table, schema in TABLES.items():
        assert stated[table].keys() == {field.name for field in fields(schema)} - set(DECIDED), table
    (tmp_path / "all.toml").write_text(ALL_STATED, encoding="utf-8")
    assert TrainingFile.load(tmp_path / "all.toml").complete({}).training.max_steps == 10_500


@pytest.mark.parametrize("table", TABLES)
def test_defaults_are_as_it_says(table: str) -> None:
    stated = tomllib.loads(ALL_STATED)[table]
    for field in fields(TABLES[table]):
        if field.name in stated and table != "data" and f"{table}.{field.name}" not in RULE_TEXTS:
            default = getattr(field.default, "default", field.default)
            assert default in (stated[field.name], None), field.name


def test_rules_are_as_it_says() -> None:
    """The last comment before a setting is its rule, if it has one."""
    table, comment = "", ""
    seen = set()
    for line in EXAMPLE.splitlines():
        if header := re.match(r"\[(\w+)\]", line):
            table = header[1]
        elif setting := re.match(r"#?(\w+) = ", line):
            name = f"{table}.{setting[1]}"
            seen.add(name)
            if name in RULE_TEXTS:
                assert comment == f"# rule: {RULE_TEXTS[name]}", name
            else:
                assert not comment.startswith("# rule:"), name
        else:
            comment = line
    assert RULE_TEXTS.keys() <= seen
