"""What a checkpoint's folder says without its weights: name, dimensions, vocabulary. No torch, so commands can check it at once."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from safetensors import SafetensorError, safe_open

from dragoman.model.config import ModelConfig, ModelConfigError
from dragoman.model.errors import InputError
from dragoman.model.text.tokenizer import TokenizerError
from dragoman.model.text.tokenizers import Tokenizers

FORMAT_VERSION = 1
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


class CheckpointError(InputError):
    """A checkpoint that cannot be read; the message names the file."""


@dataclass(frozen=True, slots=True)
class CheckpointFolder:
    """A checkpoint but for its weights.

    Attributes:
        path: Where it lies.
        name: Of the model.
        config: Its dimensions.
        tokenizers: Its vocabularies.
    """

    path: Path
    name: str
    config: ModelConfig
    tokenizers: Tokenizers

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
        return cls(directory, description["name"], config, tokenizers)

    def refuse_other_model(self, other: "CheckpointFolder") -> None:
        """Refuse another checkpoint whose parameters would not mean the same as this one's.

        Raises:
            CheckpointError: If its model differs, dropouts aside, or its vocabulary.
        """
        if fields := self.config.differences(other.config):
            raise CheckpointError(f"{other.path}: its {', '.join(fields)} differ from those of {self.path}")
        if not self.tokenizers.is_same(other.tokenizers):
            raise CheckpointError(f"{other.path}: its vocabulary differs from that of {self.path}")


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
    except ValueError as error:
        raise CheckpointError(f"{path}: not JSON: {error}") from error
    if not isinstance(description, dict) or description.get("format_version") != FORMAT_VERSION:
        raise CheckpointError(f"{path}: not a checkpoint of format version {FORMAT_VERSION}")
    for key, expected in (("name", str), ("model", dict)):
        if not isinstance(description.get(key), expected):
            raise CheckpointError(f"{path}: {key} is missing or is not a {expected.__name__}")
    return description
