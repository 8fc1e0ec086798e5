"""A checkpoint's folder without its weights: name, dimensions, vocabulary. No torch, so commands can check it at once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import msgspec
from safetensors import SafetensorError, safe_open

from dragoman.model.config import ModelConfig, ModelConfigError
from dragoman.model.errors import InputError
from dragoman.model.generation import Defaults, Languages, Template
from dragoman.model.text.tokenizer import TokenizerError
from dragoman.model.text.tokenizers import Tokenizers

FORMAT_VERSION = 2
_READ_VERSIONS = (1, FORMAT_VERSION)  # 1 says nothing of generation
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


class CheckpointError(InputError):
    """A checkpoint that cannot be read; the message names the file."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A checkpoint but for its weights."""

    path: Path  # where it lies
    name: str  # of the model
    config: ModelConfig  # its dimensions
    tokenizers: Tokenizers  # its vocabularies
    template: Template = field(default_factory=Template)  # tokens around every text
    languages: Languages | None = None  # those it reads and writes; None where it is not told them
    defaults: Defaults = field(default_factory=Defaults)  # values for fields that a request leaves out

    @classmethod
    def load(cls, directory: Path) -> Self:
        """Read `config.json` and the tokenisers, and of the weights that they are there.

        Raises:
            CheckpointError: Naming the file that is missing, damaged, of another format, or does not fit the others.
        """
        description = _read_description(directory / CONFIG_FILE)
        try:
            tokenizers = Tokenizers.load(directory)
        except TokenizerError as error:
            raise CheckpointError(str(error)) from error
        try:
            config = ModelConfig.from_dict(description["model"])
        except ModelConfigError as error:
            raise CheckpointError(f"{directory / CONFIG_FILE}: {error}") from error
        try:
            tokenizers.refuse_other_sizes(config.source_vocab_size, config.target_vocab_size)
        except TokenizerError as error:
            raise CheckpointError(f"{directory}: {error}") from error
        for tokenizer in (tokenizers.source, tokenizers.target):
            if tokenizer.eos_id != config.eos_id:  # padding may differ: it is masked, whatever its id
                raise CheckpointError(
                    f"{directory}: eos_id is {tokenizer.eos_id} in the tokeniser and {config.eos_id} in the model"
                )
        read_metadata(directory / WEIGHTS_FILE)
        try:
            said = msgspec.convert({name: description[name] for name in _SAID if name in description}, _Said)
        except msgspec.ValidationError as error:
            raise CheckpointError(f"{directory / CONFIG_FILE}: {error}") from error
        return cls(directory, description["name"], config, tokenizers, said.template, said.languages, said.defaults)

    def refuse_other_model(self, other: "CheckpointFolder") -> None:
        """Refuse another checkpoint whose parameters would not mean the same as this one's.

        Raises:
            CheckpointError: If its model differs, dropouts aside, or its vocabulary.
        """
        if fields := self.config.differences(other.config):
            raise CheckpointError(f"{other.path}: its {', '.join(fields)} differ from those of {self.path}")
        if not self.tokenizers.is_same(other.tokenizers):
            raise CheckpointError(f"{other.path}: its vocabulary differs from that of {self.path}")


class _Said(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Generation settings in `config.json`, if any."""

    template: Template = Template()
    languages: Languages | None = None
    defaults: Defaults = Defaults()


_SAID = _Said.__struct_fields__


def describe(name: str, config: ModelConfig, template: Template, languages: Languages | None, defaults: Defaults) -> dict[str, Any]:
    """Return what `config.json` says of a model, ready for JSON; of generation what is not as it always is."""
    said: dict[str, Any] = msgspec.to_builtins(_Said(template, languages, defaults))
    return {"format_version": FORMAT_VERSION, "name": name, "model": config.to_dict(), **said}


def read_metadata(path: Path) -> Mapping[str, str]:
    """Return what a safetensors file says of itself; its tensors are not read.

    Raises:
        CheckpointError: If it is missing, cut short or no such file.
    """
    try:
        with safe_open(path, "np") as tensors:
            metadata: Mapping[str, str] = tensors.metadata() or {}
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: no such file") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return metadata


def _read_description(path: Path) -> dict[str, Any]:
    """Read and check `config.json`."""
    try:
        description = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if isinstance(description, dict) and "model_type" in description and "format_version" not in description:
        raise CheckpointError(
            f"{path}: a checkpoint of Transformers; `dragoman import {path.parent} CHECKPOINT` makes one of ours of it"
        )
    if not isinstance(description, dict) or description.get("format_version") not in _READ_VERSIONS:
        raise CheckpointError(f"{path}: not a checkpoint of format version {' or '.join(map(str, _READ_VERSIONS))}")
    for key, expected in (("name", str), ("model", dict)):
        if not isinstance(description.get(key), expected):
            raise CheckpointError(f"{path}: {key} is missing or is not a {expected.__name__}")
    return description
