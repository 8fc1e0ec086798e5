"""A training configuration as its file has it: what is stated, and what is left to the rules."""

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import Any, Self

from dragoman.model.training.config import TrainingConfig, read_toml
from dragoman.model.training.rules import VOCAB_SIZE

# The commented configuration that `dragoman train --example` prints: every setting, its unit, and its default or rule.
EXAMPLE = resources.files(__package__).joinpath("example.toml").read_text("utf-8")

_TABLE = re.compile(r"\s*\[+\s*([\w.-]+)\s*\]")
_SETTING = re.compile(r"\s*([\w.-]+)\s*=")
_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*")
# Stand-ins for what rules choose and what has no default, while nothing but the stated settings is checked.
_ANY = {VOCAB_SIZE: 300, "training.max_steps": 1}


@dataclass(frozen=True, slots=True)
class TrainingFile:
    """Settings stated in a configuration file."""

    fields: dict[str, Any]  # settings and tables, as TOML has them
    origin: str  # named in errors
    lines: Mapping[str, int] = field(default_factory=dict)  # where settings and tables stand, by dotted name, as far as is known

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a TOML file; without a name in it, the model is called as the file is.

        Raises:
            TrainingConfigError: Naming the file, the line and the setting that is unknown, missing or invalid.
        """
        text = read_toml(path)
        fields = tomllib.loads(text)
        if "name" not in fields and _NAME.fullmatch(path.stem):
            fields["name"] = path.stem
        file = cls(fields, str(path), _line_numbers(text))
        file.complete(_ANY)
        return file

    @property
    def stated(self) -> dict[str, Any]:
        """Return the settings of tables, by dotted name."""
        tables = ((table, settings) for table, settings in self.fields.items() if isinstance(settings, dict))
        return {f"{table}.{name}": value for table, settings in tables for name, value in settings.items()}

    def complete(self, chosen: Mapping[str, Any]) -> TrainingConfig:
        """Return the configuration with what is left out: chosen settings, by dotted name, then defaults.

        Raises:
            TrainingConfigError: As `TrainingConfig.parse`.
        """
        fields = {name: dict(value) if isinstance(value, dict) else value for name, value in self.fields.items()}
        for setting, value in chosen.items():
            table, _, name = setting.partition(".")
            if isinstance(settings := fields.setdefault(table, {}), dict):
                settings.setdefault(name, value)
        fields.setdefault("training", {})
        return TrainingConfig.parse(fields, self.origin, self.lines)

    def going_on_from(self, checkpoint: Path) -> Self:
        """Return the same with another initial checkpoint."""
        return replace(self, fields=self.fields | {"initial_checkpoint": str(checkpoint)})


def to_toml(config: Mapping[str, Any], notes: Mapping[str, str]) -> str:
    """Write settings and one level of tables as TOML, with a comment behind each setting that has a note by its dotted name."""
    lines = [f"{name} = {_to_toml(value)}" for name, value in config.items() if not isinstance(value, dict)]
    for table, settings in config.items():
        if isinstance(settings, dict):
            lines += ["", f"[{table}]"]
            for name, value in settings.items():
                note = notes.get(f"{table}.{name}")
                lines.append(f"{name} = {_to_toml(value)}" + (f"  # {note}" if note else ""))
    return "\n".join(lines) + "\n"


def _to_toml(value: Any) -> str:
    """Write a string, a number or a truth value; what JSON escapes, TOML understands."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _line_numbers(text: str) -> dict[str, int]:
    """Return on which line each table and setting stands; what is written in an unusual way is left out."""
    numbers: dict[str, int] = {}
    table = ""
    for number, line in enumerate(text.split("\n"), start=1):
        if header := _TABLE.match(line):
            table = f"{header[1]}."
            numbers.setdefault(header[1], number)
        elif setting := _SETTING.match(line):
            numbers.setdefault(f"{table}{setting[1]}", number)
    return numbers
