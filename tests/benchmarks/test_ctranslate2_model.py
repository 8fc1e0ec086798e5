"""Our weights in CTranslate2: the same answers, for every kind of model."""

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.engines.sides import CTranslate2Engine, Workload
from dragoman.model.config import ModelConfig
from dragoman.model.decode import beam_search, greedy_search
from dragoman.model.networks.transformer import Transformer
from tests.oracles.ctranslate2_model import write_model

pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed: pip install '.[benchmark]'")

SOURCES = [[3, 4, 5, 6, 7, 8, 9], [10, 11], [12], [13, 14, 15]]


def random_model(**switches: Any) -> Transformer:
    torch.manual_seed(2)
    shape: dict[str, Any] = {
        "source_vocab_size": 50,
        "target_vocab_size": 50,
        "d_model": 32,
        "num_heads": 4,
        "num_encoder_layers": 2,
        "num_decoder_layers": 3,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 40,
        "max_source_positions": 16,
        "max_target_positions": 16,
    }
    model = Transformer(ModelConfig(**shape | switches)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.1))
    return model


@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"norm": "pre"},
        {"norm": "pre", "positions": "learned", "position_offset": 2, "has_output_bias": True},
        {"activation": "gelu", "has_embedding_norm": True, "is_embedding_scaled": False},
        {"activation": "silu", "is_projection_tied": False, "norm_epsilon": 0.1},
        {"is_embedding_shared": False, "source_vocab_size": 60},
    ],
)
def test_answers_are_the_same(switches: dict[str, Any], tmp_path: Path) -> None:
    model = random_model(**switches)
    write_model(model, tmp_path)
    engine = CTranslate2Engine(tmp_path, "float32", 1, 1)
    greedy = engine.run(Workload([], SOURCES, 1, 8), 4).answers
    assert greedy == [hypothesis.ids for hypothesis in greedy_search(model, SOURCES, 8)]
    beams = engine.run(Workload([], SOURCES, 3, 8), 2).answers
    assert len(beams) == len(beam_search(model, SOURCES, 3, 8, 1.0))
    assert all(0 not in answer and len(answer) <= 8 for answer in greedy + beams)


def test_padding_is_never_an_answer(tmp_path: Path) -> None:
    model = random_model(has_output_bias=True)
    assert model.decoder.output_bias is not None
    model.decoder.output_bias.data[0] = 100.0
    write_model(model, tmp_path)
    answers = CTranslate2Engine(tmp_path, "float32", 1, 1).run(Workload([], SOURCES, 1, 8), 4).answers
    assert answers == [hypothesis.ids for hypothesis in greedy_search(model, SOURCES, 8)]
    assert not any(0 in answer for answer in answers)


def test_int8_weights_take_a_fraction_of_the_space(tmp_path: Path) -> None:
    model = random_model(d_model=64)
    write_model(model, tmp_path / "float32")
    write_model(model, tmp_path / "int8", "int8")
    sizes = {kind: (tmp_path / kind / "model.bin").stat().st_size for kind in ("float32", "int8")}
    assert sizes["int8"] < 0.5 * sizes["float32"]
    answers = CTranslate2Engine(tmp_path / "int8", "int8", 1, 1).run(Workload([], SOURCES, 1, 8), 4).answers
    assert [len(answer) for answer in answers] == [len(hypothesis.ids) for hypothesis in greedy_search(model, SOURCES, 8)]


def test_the_model_stays_as_it_was(tmp_path: Path) -> None:
    """CTranslate2 quantises the arrays that it is given in place."""
    model = random_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write_model(model, tmp_path, "int8")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
