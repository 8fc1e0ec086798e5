"""What a family's file says: which models are of it, how their network is laid out, and where their tokenisers are."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from dragoman.model.config import ModelConfig, ModelConfigError
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.foreign import Foreign, Limits
from dragoman.model.importers.layout import Layout
from dragoman.model.importers.report import Report
from dragoman.model.importers.settings import Settings
from dragoman.model.importers.tokenisers import TokenizerFiles

ACTIVATIONS: Mapping[str, str] = {
    "relu": "relu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
    "swish": "silu",
}


class Architecture(Protocol):
    """How networks of one or several families are laid out."""

    def lay_out(self, foreign: Foreign, limits: Limits, report: Report) -> Layout:
        """Return our configuration, and where each of our parameters comes from.

        Raises:
            ForeignError: If the configuration is of a model that we have not.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models.

    Attributes:
        name: As people call it.
        model_type: As `config.json` does.
        defaults: What Transformers takes where `config.json` is silent.
        architecture: Of its network.
        tokenizers: The ways in which its tokeniser is kept, beside `tokenizer.json`, which all may have.
    """

    name: str
    model_type: str
    defaults: Mapping[str, Any]
    architecture: Architecture
    tokenizers: tuple[TokenizerFiles, ...]


def activation(config: Settings, name: str, value: str) -> str:
    """Return ours for an activation's name in Transformers.

    Raises:
        ForeignError: If we have it not.
    """
    if value not in ACTIVATIONS:
        raise ForeignError(f"{config.path}: {name} {value!r} is not known here; known: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[value]


def model_config(config: Settings, **fields: Any) -> ModelConfig:
    """Return our configuration.

    Raises:
        ForeignError: If there can be no such model; names the file.
    """
    try:
        return ModelConfig(**fields)
    except ModelConfigError as error:
        raise ForeignError(f"{config.path}: {error}") from error


def special_ids(foreign: Foreign, start: int | None = None) -> dict[str, int]:
    """Return which tokens pad, end and start a sequence: as generation_config.json, where it names them, or config.json has it.

    Padding is config.json's first: the network counts positions by it, where what `generate` fills rows with has no effect.

    Args:
        foreign: The folder.
        start: What the decoder starts with where neither says.

    Raises:
        ForeignError: If one is said by neither, or there are several ends.
    """
    pad, end = (_special_id(foreign, name) for name in ("pad_token_id", "eos_token_id"))
    begin = _special_id(foreign, "decoder_start_token_id")
    if begin is None:
        begin = _special_id(foreign, "bos_token_id") if start is None else start
    found = {"pad_token_id": pad, "eos_token_id": end, "decoder_start_token_id": begin}
    if missing := [name for name, value in found.items() if value is None]:
        raise ForeignError(f"{foreign.config.path}: {missing[0]} is missing")
    assert pad is not None and end is not None and begin is not None
    return {"pad_id": pad, "eos_id": end, "decoder_start_id": begin}


def _special_id(foreign: Foreign, name: str) -> int | None:
    places = foreign.generation, foreign.config
    for settings in places[::-1] if name == "pad_token_id" else places:
        value = settings.take(name)
        if isinstance(value, list) and name == "eos_token_id":
            if len(value) != 1:
                raise ForeignError(f"{settings.path}: eos_token_id names {len(value)} ends of sequence; there can be one here")
            value = value[0]
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool):
                raise ForeignError(f"{settings.path}: {name} must be a whole number, not {value!r}")
            return value
    return None
