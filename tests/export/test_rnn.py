"""Recurrent encoder–decoders through the gate."""

from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.export.arguments import ExportError
from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.networks.rnn import Rnn
from dragoman.model.text.tokenizers import Tokenizers


def write(tokenizers: Tokenizers, directory: Path, **switches: Any) -> Path:
    """Write a checkpoint whose every parameter is random."""
    sizes = {"source_vocab_size": 300, "target_vocab_size": 300, "d_model": 32, "num_encoder_layers": 1, "num_decoder_layers": 2}
    model = Rnn(ModelConfig(architecture="rnn", max_source_positions=24, max_target_positions=20, **sizes, **switches)).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for _, parameter in sorted(model.named_parameters()):
            parameter.normal_(0, 0.2, generator=generator)
    Checkpoint("tiny", model, tokenizers).save(directory)
    return directory


@pytest.mark.parametrize(
    ("attention", "precision"), [("additive", "int8"), ("dot", "fp32"), ("scaled_dot", "fp32"), ("none", "int8")]
)
def test_bundle_answers_as_its_checkpoint(tokenizers: Tokenizers, tmp_path: Path, attention: str, precision: Any) -> None:
    bundle = export_checkpoint(write(tokenizers, tmp_path / "tiny", attention=attention), tmp_path / "bundle", precision)
    parity = bundle.manifest.parity
    assert parity.max_log_prob_difference < 2e-5 and parity.num_token_mismatches == 0
    assert bundle.manifest.num_attention_layers == (attention != "none")


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_devices_are_not_for_them(tokenizers: Tokenizers, tmp_path: Path, precision: Any) -> None:
    with pytest.raises(ExportError, match=f"rnn .*not in {precision}"):
        export_checkpoint(write(tokenizers, tmp_path / "tiny"), tmp_path / "bundle", precision)
