"""Record of a run: its complete configuration, and the settings that rules chose, written before the first step."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from dragoman.model.checkpoint_folder import WEIGHTS_FILE, read_metadata
from dragoman.model.errors import InputError
from dragoman.model.files import refuse_unwritable, write_text
from dragoman.model.training.config import TrainingConfigError
from dragoman.model.training.file import TrainingFile, to_toml

FOLDER = "training"
CONFIG_FILE = "config.json"
CHOSEN_FILE = "chosen.json"
TOML_FILE = "config.toml"
STATE_FILE = "state.safetensors"


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The choices of a run, written once."""

    config: dict[str, Any]  # every setting
    chosen: dict[str, Any]  # those of them that a rule chose, by dotted name
    text: dict[str, int]  # Counts of the text; see `TextSize`. Empty for a run of a version without rules.

    @classmethod
    def load(cls, output: Path) -> Self | None:
        """Read what a run wrote into `output`; None where no run has begun.

        Raises:
            TrainingConfigError: If it cannot be read.
        """
        folder = output / FOLDER
        if not (folder / CONFIG_FILE).exists():
            return None
        config = _read_object(folder / CONFIG_FILE)
        rules = _read_object(folder / CHOSEN_FILE) if (folder / CHOSEN_FILE).exists() else {}
        return cls(config, rules.get("chosen", {}), rules.get("text", {}))

    def write(self, output: Path) -> None:
        """Write the record, the complete configuration last: with it the folder belongs to this run."""
        folder = output / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        if self.text:
            write_text(folder / CHOSEN_FILE, json.dumps({"text": self.text, "chosen": self.chosen}, indent=2) + "\n")
            write_text(folder / TOML_FILE, to_toml(self.config, dict.fromkeys(self.chosen, "chosen by rule")))
        write_text(folder / CONFIG_FILE, json.dumps(self.config, indent=2) + "\n")

    def refuse_other(self, config: Mapping[str, Any], output: Path) -> None:
        """Refuse a configuration that is not the one the run began with.

        Raises:
            TrainingConfigError: Naming the settings that differ.
        """
        ours, theirs = _flat(self.config), _flat(config)
        differing = [
            f"{name} is {_shown(ours, name)} there and {_shown(theirs, name)} here"
            for name in dict.fromkeys((*ours, *theirs))
            if _shown(ours, name) != _shown(theirs, name)
        ]
        if differing:
            raise other_configuration(output, "; ".join(differing))

    def refuse_missing(self, file: TrainingFile, settings: tuple[str, ...], output: Path) -> None:
        """Refuse a file that leaves out what the run did not choose by rule and what has no default.

        Raises:
            TrainingConfigError: Naming the setting.
        """
        for name in settings:
            if name not in self.chosen and name not in file.stated:
                raise other_configuration(output, f"{name} is {_shown(_flat(self.config), name)} there and left out here")

    def changes(self, text: Mapping[str, int]) -> list[str]:
        """Return a warning where the text is not the one that the run began with."""
        if not self.text or self.text == text:
            return []
        return [f"data: the text has changed since this run began: {_counts(self.text)} then, {_counts(text)} now"]


def other_configuration(output: Path, differences: str) -> TrainingConfigError:
    """Return the error of a run that is to be resumed with other settings."""
    return TrainingConfigError(f"{output} holds a run of another configuration: {differences}; choose another output or remove it")


def refuse_output(output: Path) -> None:
    """Refuse a folder that cannot be written to, or that holds something else than a run to resume.

    Raises:
        InputError: Naming the folder or the file in it.
    """
    refuse_unwritable(output, is_folder=True)
    has_run = (output / FOLDER / CONFIG_FILE).exists()
    for name in (WEIGHTS_FILE, "bundle.json"):
        if (output / name).exists() and not has_run:
            raise InputError(f"{output}: there is a {name}, but no training to resume; choose another --output")
    if has_run and (state := output / FOLDER / STATE_FILE).exists() and "json" not in read_metadata(state):
        raise InputError(f"{state}: not the state of a training")


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TrainingConfigError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        raise TrainingConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TrainingConfigError(f"{path}: not a JSON object")
    return content


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by dotted name."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= {f"{name}.{key}": inner for key, inner in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def _shown(settings: Mapping[str, Any], name: str) -> str:
    return json.dumps(settings[name], ensure_ascii=False) if name in settings else "not set"


def _counts(text: Mapping[str, int]) -> str:
    return ", ".join(f"{value:,} {name}" for name, value in text.items())
