"""Small models with weights that leave nothing at zero or one, and a small vocabulary."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.model.config import UNUSED, ModelConfig
from dragoman.model.networks.architectures import network
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer

ModelMaker = Callable[..., Transformer]
Aligner = Callable[..., str]

SMALL: dict[str, Any] = {"source_vocab_size": 23, "target_vocab_size": 23, "d_model": 16, "num_heads": 4, "dropout": 0.0}
SMALL |= {"num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24}
SMALL |= {"max_source_positions": 40, "max_target_positions": 40}
T5: dict[str, Any] = {"norm": "pre", "norm_kind": "rms", "has_biases": False, "attention_dim": 24, "is_attention_scaled": False}
T5 |= {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 12, "is_embedding_scaled": False}
T5 |= {"padding": "predicted"}
LLAMA: dict[str, Any] = {"positions": "rotary", "norm": "pre", "norm_kind": "rms", "has_biases": False, "activation": "silu"}
LLAMA |= {"is_ffn_gated": True, "is_projection_tied": False, "is_embedding_scaled": False, "padding": "predicted"}
GPT: dict[str, Any] = {"positions": "learned", "norm": "pre", "activation": "gelu_tanh"}
GPT |= {"is_embedding_scaled": False, "padding": "predicted"}
EVERYTHING: dict[str, Any] = {"norm": "pre", "activation": "gelu", "positions": "learned", "position_offset": 2}
EVERYTHING |= {"is_embedding_shared": False, "target_vocab_size": 29, "is_projection_tied": False, "is_embedding_scaled": False}
EVERYTHING |= {"has_embedding_norm": True, "has_output_bias": True, "num_decoder_layers": 3}
SWITCHES: dict[str, dict[str, Any]] = {
    "paper": {},
    "pre-norm": {"norm": "pre"},
    "learned-offset": {"positions": "learned", "position_offset": 2, "is_embedding_scaled": False},
    "output-bias": {"has_output_bias": True},
    "separate": {"is_embedding_shared": False, "source_vocab_size": 31},
    "separate-untied": {"is_embedding_shared": False, "is_projection_tied": False, "target_vocab_size": 31},
    "depths": {"num_encoder_layers": 3, "num_decoder_layers": 1, "encoder_ffn_dim": 20, "decoder_ffn_dim": 40},
    "epsilon": {"norm_epsilon": 0.1, "num_heads": 1},
    "other-ids": {"pad_id": 5, "eos_id": 0, "decoder_start_id": 5},
    "masked": {"padding": "masked", "has_output_bias": True},
    "predicted": {"padding": "predicted"},
    "relative": {"positions": "relative", "relative_buckets": 8, "relative_max_distance": 6},
    "relative-per-layer": {"positions": "relative", "has_relative_bias_per_layer": True, "is_attention_scaled": False},
    "t5": T5 | {"is_output_scaled": True},
    "t5-gated": T5 | {"is_ffn_gated": True, "activation": "gelu_tanh", "is_projection_tied": False},
    "everything": EVERYTHING,
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Compute on one thread, so that sums are taken in one order."""
    torch.set_num_threads(1)


def small_network(seed: int = 0, **switches: Any) -> Any:
    """Build a small network in evaluation mode from switches; every parameter is random, biases and norms included."""
    torch.manual_seed(seed)
    unused = UNUSED[switches.get("architecture", "transformer")]
    sizes = {name: value for name, value in SMALL.items() if name not in unused}
    model = network(ModelConfig(**sizes | switches)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
    return model


@pytest.fixture(scope="session")
def make_model() -> ModelMaker:
    return small_network


@pytest.fixture(params=SWITCHES.values(), ids=SWITCHES.keys())
def any_model(request: pytest.FixtureRequest, make_model: ModelMaker) -> Transformer:
    """Give a model for each combination of switches that takes a path of its own."""
    return make_model(**request.param)


@pytest.fixture(scope="session")
def tokenizer() -> ByteLevelTokenizer:
    rng = random.Random(0)
    words = ["the", "dog", "runs", "through", "snow", "a", ",", ".", "don't"]
    words += ["über", "Straße", "façade", "coöperate", "собака", "雪", "🙂"]
    return ByteLevelTokenizer.train([" ".join(rng.choices(words, k=8)) for _ in range(300)], 500)


@pytest.fixture
def aligner(tmp_path: Path) -> Aligner:
    """Return a maker of a stand-in for eflomal-align, which keeps its text in `seen` and writes the links it was made with."""

    def make(forward: str, reverse: str) -> str:
        program, links = tmp_path / "eflomal-align", {"forward": forward, "reverse": reverse}
        for name, text in links.items():
            (tmp_path / name).write_text(text)
        program.write_text('#!/bin/sh\ncd "${0%/*}"; cat "$2" "$4" >seen; cat forward >"$6"; cat reverse >"$8"\n')
        program.chmod(0o755)
        return str(program)

    return make
