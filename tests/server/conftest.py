"""One tiny bundle for every test that needs a real model, with the checkpoint it came from."""

import shutil
from pathlib import Path

import pytest
import torch

from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.tokenizer import Tokenizer
from dragoman.model.transformer import Transformer


@pytest.fixture(scope="session")
def tiny_checkpoint() -> Checkpoint:
    """A random model that never ends a sequence by itself; no mistake hides behind a parameter that is 0 or 1."""
    config = ModelConfig(
        source_vocab_size=280,
        target_vocab_size=280,
        d_model=32,
        num_heads=4,
        num_encoder_layers=2,
        num_decoder_layers=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=40,
        max_source_positions=24,
        max_target_positions=20,
        has_output_bias=True,
    )
    model = Transformer(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(float(name.endswith("norm.weight")), 0.2, generator=generator)
        assert model.decoder.output_bias is not None
        model.decoder.output_bias[config.eos_id] = -60
    return Checkpoint("tiny", model, Tokenizer.train(["a dog runs over the grass"], 280))


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Checkpoint, shelf) -> Path:
    """Return its bundle, which no test may change."""

    def make(folder: Path) -> None:
        tiny_checkpoint.save(folder / "checkpoint")
        export_checkpoint(folder / "checkpoint", folder / "bundle")

    return shelf.get("tiny", make) / "bundle"


@pytest.fixture
def bundle_copy(tiny_bundle: Path, tmp_path: Path) -> Path:
    """Return a copy of it, to be damaged."""
    return Path(shutil.copytree(tiny_bundle, tmp_path / "bundle"))
