import json
from dataclasses import FrozenInstanceError
from typing import Any

import pytest

from dragoman.model.config import ModelConfig, ModelConfigError

VOCAB = {"source_vocab_size": 100, "target_vocab_size": 100}


def test_fields_survive_json_and_left_out_ones_take_their_defaults() -> None:
    config = ModelConfig(**VOCAB, norm="pre", position_offset=2, dropout=0.25, has_output_bias=True, attention_dim=64)
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    assert ModelConfig.from_dict(VOCAB) == ModelConfig.from_dict(VOCAB | {"attention_dim": None}) == ModelConfig(**VOCAB)
    assert ModelConfig(**VOCAB, d_model=96, num_heads=6).head_dim == 16
    wide = ModelConfig.from_dict(VOCAB | {"d_model": 100, "num_heads": 6, "attention_dim": 96, "positions": "learned"})
    assert wide.head_dim == 16
    assert ModelConfig(**VOCAB, pad_id=1, padding="predicted").eos_id == 1
    sizes = {"source_vocab_size": 50, "target_vocab_size": 100}  # the decoder may start with a token that only targets have
    assert ModelConfig(**sizes, is_embedding_shared=False, decoder_start_id=99).decoder_start_id == 99
    with pytest.raises(ModelConfigError, match="target_vocab_size"):
        ModelConfig.from_dict({"source_vocab_size": 100})
    with pytest.raises(FrozenInstanceError):
        config.d_model = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"width": 4}, "unknown model setting: width"),
        ({"d_model": "512"}, "d_model must be int, not '512'"),
        ({"d_model": True}, "d_model must be int, not True"),
        ({"dropout": "0.1"}, "dropout must be int or float, not '0.1'"),
        ({"is_projection_tied": 1}, "is_projection_tied must be bool, not 1"),
        ({"norm": "middle"}, "norm must be one of pre, post, not 'middle'"),
        ({"activation": "tanh"}, "activation must be one of relu, gelu, gelu_tanh, silu, not 'tanh'"),
        ({"num_decoder_layers": 0}, "num_decoder_layers must be at least 1, not 0"),
        ({"max_source_positions": -1}, "max_source_positions must be at least 1, not -1"),
        ({"dropout": 1.0}, r"dropout must be in \[0, 1\), not 1.0"),
        ({"attention_dropout": float("nan")}, "attention_dropout must be in"),
        ({"norm_epsilon": 0.0}, "norm_epsilon must be positive, not 0.0"),
        ({"d_model": 100, "num_heads": 3}, "d_model 100 is not a multiple of num_heads 3"),
        ({"d_model": 9, "num_heads": 3}, "sinusoidal positions need an even d_model, not 9"),
        ({"position_offset": -1}, "position_offset must not be negative, not -1"),
        ({"norm_epsilon": float("inf")}, "norm_epsilon must be positive, not inf"),
        ({"attention_dim": "64"}, "attention_dim must be int or null, not '64'"),
        ({"attention_dim": 0}, "attention_dim 0 is not a multiple of num_heads 8"),
        ({"attention_dim": 100}, "attention_dim 100 is not a multiple of num_heads 8"),
        ({"has_relative_bias_per_layer": True}, "has_relative_bias_per_layer needs relative positions, not sinusoidal"),
        ({"positions": "relative", "position_offset": 2}, "position_offset 2 means nothing to relative positions"),
        ({"positions": "relative", "relative_buckets": 2}, "relative_buckets must be even and at least 4, not 2"),
        ({"positions": "relative", "relative_buckets": 7}, "relative_buckets must be even and at least 4, not 7"),
        ({"positions": "relative", "relative_max_distance": 16}, "relative_max_distance must be above 16"),
        ({"relative_buckets": 0}, "relative_buckets must be at least 1, not 0"),
        ({"source_vocab_size": 90, "is_embedding_shared": False, "pad_id": 95}, "pad_id 95 is outside the vocabulary of 90"),
        ({"source_vocab_size": 99}, "is_embedding_shared needs equal vocabularies, not 99 and 100"),
        ({"eos_id": 100}, "eos_id 100 is outside the vocabulary of 100"),
        ({"decoder_start_id": -1}, "decoder_start_id -1 is outside the vocabulary"),
        ({"pad_id": 1}, "pad_id and eos_id are both 1"),
    ],
)
def test_impossible_setting_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelConfigError, match=message):
        ModelConfig.from_dict(VOCAB | fields)
