import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from dragoman.model.config import ModelConfig, ModelConfigError

VOCAB = {"source_vocab_size": 100, "target_vocab_size": 100}


def test_fields_survive_json() -> None:
    config = ModelConfig(**VOCAB, norm="pre", position_offset=2, dropout=0.25, has_output_bias=True)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_left_out_fields_take_their_defaults() -> None:
    assert ModelConfig.from_dict(VOCAB) == ModelConfig(**VOCAB)


def test_head_dim_divides_the_width() -> None:
    assert ModelConfig(**VOCAB, d_model=96, num_heads=6).head_dim == 16


def test_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        ModelConfig(**VOCAB).d_model = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 4}, "unknown model setting: width"),
        ({"d_model": "512"}, "d_model must be int, not '512'"),
        ({"d_model": True}, "d_model must be int, not True"),
        ({"dropout": "0.1"}, "dropout must be int or float, not '0.1'"),
        ({"is_projection_tied": 1}, "is_projection_tied must be bool, not 1"),
        ({"norm": 3}, "norm must be str, not 3"),
        ({"norm": "middle"}, "norm must be one of pre, post, not 'middle'"),
        ({"activation": "tanh"}, "activation must be one of relu, gelu, silu, not 'tanh'"),
        ({"positions": "none"}, "positions must be one of sinusoidal, learned"),
        ({"num_decoder_layers": 0}, "num_decoder_layers must be at least 1, not 0"),
        ({"max_source_positions": -1}, "max_source_positions must be at least 1, not -1"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), not 1.0"),
        ({"attention_dropout": float("nan")}, "attention_dropout must be in"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be positive, not 0.0"),
        ({"d_model": 100, "num_heads": 3}, "d_model 100 is not a multiple of num_heads 3"),
        ({"d_model": 9, "num_heads": 3}, "sinusoidal positions need an even d_model, not 9"),
        ({"position_offset": -1}, "position_offset must not be negative, not -1"),
        ({"source_vocab_size": 99}, "is_embedding_shared needs equal vocabularies, not 99 and 100"),
        ({"eos_id": 100}, "eos_id 100 is outside the vocabulary of 100"),
        ({"decoder_start_id": -1}, "decoder_start_id -1 is outside the vocabulary"),
        ({"pad_id": 1}, "pad_id and eos_id are both 1"),
    ],
)
def test_impossible_setting_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_dict(VOCAB | fields)


def test_missing_field_is_named() -> None:
    with pytest.raises(ModelConfigError, match="target_vocab_size"):
        ModelConfig.from_dict({"source_vocab_size": 100})
