"""A foreign folder: what it says of itself, and its weights. What no family here could have is refused at once."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.settings import Settings
from dragoman.model.importers.weight_files import refuse_other_folder
from dragoman.model.importers.weights import Weights

CONFIG: Final = "config.json"
GENERATION_CONFIG: Final = "generation_config.json"
TOKENIZER_CONFIG: Final = "tokenizer_config.json"
ADAPTER_CONFIG: Final = "adapter_config.json"
# What is refused wherever it says something: the field of config.json, and why.
_BEYOND: Final = {
    "auto_map": "it needs code of its own (trust_remote_code), which is never run",
    "quantization_config": "its weights are quantised; import the model they were made from",
    "num_experts": "a mixture of experts",
    "num_local_experts": "a mixture of experts",
    "encoder_sparse_step": "a mixture of experts",
    "decoder_sparse_step": "a mixture of experts",
    "pruned_heads": "heads were taken out of some of its layers",
    "tie_encoder_decoder": "encoder and decoder share layers",
}


@dataclass(frozen=True, slots=True)
class Limits:
    """What the user wants of lengths; None for what the checkpoint says.

    Attributes:
        max_source_tokens: Longest source, end-of-sequence and what is said around it included.
        max_target_tokens: Longest answer, its start token included.
    """

    max_source_tokens: int | None = None
    max_target_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Foreign:
    """A folder of another library.

    Attributes:
        path: Where it lies.
        config: Its `config.json`.
        generation: Its `generation_config.json`, which may say nothing.
        tokenizer: Its `tokenizer_config.json`, which may say nothing.
        weights: Its tensors.
    """

    path: Path
    config: Settings
    generation: Settings
    tokenizer: Settings
    weights: Weights

    @property
    def is_of_bytes(self) -> bool:
        """Whether its tokens are bytes: ByT5."""
        said = self.tokenizer.find("tokenizer_class", str) or self.config.find("tokenizer_class", str)
        return said == "ByT5Tokenizer"

    @classmethod
    def open(cls, path: Path) -> Self:
        """Read what a folder says, and find its weights; none is read yet.

        Raises:
            ForeignError: Naming the file, and what is missing, damaged or beyond us.
        """
        config = read_config(path)
        generation = Settings.load(path / GENERATION_CONFIG, is_required=False)
        tokenizer = Settings.load(path / TOKENIZER_CONFIG, is_required=False)
        return cls(path, config, generation, tokenizer, Weights.open(path))


def read_config(path: Path) -> Settings:
    """Read a folder's `config.json`.

    Raises:
        ForeignError: If it is missing or damaged, or says what no family here has.
    """
    if not path.is_dir():
        raise ForeignError(f"{path}: {'not a directory' if path.exists() else 'No such file or directory'}")
    if (path / ADAPTER_CONFIG).exists():
        raise ForeignError(f"{path / ADAPTER_CONFIG}: an adapter; merge it into its model (merge_and_unload), and import that")
    if not os.path.lexists(path / CONFIG):
        refuse_other_folder(path)
    config = Settings.load(path / CONFIG)
    if "model_type" not in config.fields:
        refuse_other_folder(path)
    if "format_version" in config.fields and "model_type" not in config.fields:
        raise ForeignError(f"{config.path}: a checkpoint of ours already; export it as it is")
    for name, reason in _BEYOND.items():
        if says_something(config.take(name)):
            raise ForeignError(f"{config.path}: {name}: {reason}")
    if config.find("is_encoder_decoder", bool) is False:
        raise ForeignError(f"{config.path}: is_encoder_decoder is false: a model without an encoder, or without a decoder")
    if config.find("is_decoder", bool):
        raise ForeignError(f"{config.path}: is_decoder is true: a decoder without its encoder")
    return config


def says_something(value: Any) -> bool:
    """Tell whether a field has a value that is not nothing."""
    return value not in (None, False, 0, "") and value != [] and value != {}
