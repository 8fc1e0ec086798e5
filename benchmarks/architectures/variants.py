"""What is compared: the same text, tokeniser, batches and number of steps; models with about as many parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VOCABULARY = 5000
DATA = {
    "source": "train.en.gz",
    "target": "train.de.gz",
    "validation_source": "val.en.gz",
    "validation_target": "val.de.gz",
}
TRANSFORMER = {
    "d_model": 128,
    "num_encoder_layers": 4,
    "num_decoder_layers": 4,
    "encoder_ffn_dim": 256,
    "decoder_ffn_dim": 256,
    "norm": "pre",
}
RNN = {"architecture": "rnn", "num_encoder_layers": 1, "num_decoder_layers": 1}


@dataclass(frozen=True, slots=True)
class Variant:
    """One side.

    Attributes:
        name: Heads its row.
        model: Fields of the configuration.
        learning_rate: Its peak.
    """

    name: str
    model: Mapping[str, Any]
    learning_rate: float


VARIANTS = (
    Variant("Transformer, 8 heads", TRANSFORMER | {"num_heads": 8}, 3e-3),
    Variant("Transformer, 1 head", TRANSFORMER | {"num_heads": 1}, 3e-3),
    Variant("RNN, additive attention", RNN | {"attention": "additive", "d_model": 224}, 2e-3),
    Variant("RNN, dot product", RNN | {"attention": "dot", "d_model": 224}, 2e-3),
    Variant("RNN, scaled dot product", RNN | {"attention": "scaled_dot", "d_model": 224}, 2e-3),
    Variant("RNN, no attention", RNN | {"attention": "none", "d_model": 232}, 2e-3),
)
LANGUAGE_MODEL = Variant(
    "decoder alone",
    {
        "architecture": "decoder",
        "d_model": 128,
        "num_heads": 8,
        "num_decoder_layers": 8,
        "decoder_ffn_dim": 340,
        "norm": "pre",
    },
    3e-3,
)


def recipe(variant: Variant, seed: int, num_steps: int, validate_every: int) -> dict[str, Any]:
    """Return the training configuration of a variant, as TOML has it."""
    return {
        "name": "compared",
        "data": DATA,
        "tokenizer": {"vocab_size": VOCABULARY},
        "model": dict(variant.model) | {"dropout": 0.2},
        "training": {
            "max_steps": num_steps,
            "warmup_steps": max(1, num_steps // 10),
            "cooldown_steps": num_steps // 2,
            "learning_rate": variant.learning_rate,
            "validate_every": validate_every,
            "average_last": 1,
            "is_bf16": False,
            "seed": seed,
        },
    }
