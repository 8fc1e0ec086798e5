"""Small random checkpoints, and one bundle exported from one of them."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.export import storage
from dragoman.export.cpu import keep_sums_apart
from dragoman.export.exporter import export_checkpoint
from dragoman.export.graphs.transformer_encoder import EncoderGraph
from dragoman.export.graphs.transformer_scorer import ScorerGraph
from dragoman.export.graphs.transformer_step import StepGraph
from dragoman.export.tracing import trace
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.networks.architectures import network
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers

TEXTS = ["two dogs run over the grass", "a dog and a cat run", "the cat sat on the grass", "zwei Hunde laufen"] * 3
SMALL = {
    "source_vocab_size": 300,
    "target_vocab_size": 300,
    "d_model": 32,
    "num_heads": 4,
    "num_encoder_layers": 2,
    "num_decoder_layers": 2,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_source_positions": 24,
    "max_target_positions": 20,
}

SMALL_OF: dict[str, dict[str, Any]] = {
    "transformer": SMALL,
    "rnn": {
        "architecture": "rnn",
        "source_vocab_size": 300,
        "target_vocab_size": 300,
        "d_model": 32,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "max_source_positions": 24,
        "max_target_positions": 20,
    },
    "decoder": {
        "architecture": "decoder",
        "source_vocab_size": 300,
        "target_vocab_size": 300,
        "d_model": 32,
        "num_heads": 4,
        "num_decoder_layers": 2,
        "decoder_ffn_dim": 40,
        "max_source_positions": 30,
        "max_target_positions": 40,
    },
}
"""What a small model of each architecture is, but for the switches that a test is about."""

MakeCheckpoint = Callable[..., Checkpoint]
WriteGraphs = Callable[[Transformer, Path], Path]


@pytest.fixture(scope="session")
def tokenizers() -> Tokenizers:
    """Give a vocabulary of 280 tokens."""
    return Tokenizers.shared(ByteLevelTokenizer.train(TEXTS, 280))


@pytest.fixture(scope="session")
def make_checkpoint(tokenizers: Tokenizers) -> MakeCheckpoint:
    """Make a checkpoint, by default of a Transformer.

    Every parameter is random, biases and norms too, so that no mistake hides behind a 0 or a 1.
    """

    def make(seed: int = 0, **switches: Any) -> Checkpoint:
        model = network(ModelConfig(**(SMALL_OF[switches.get("architecture", "transformer")] | switches))).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in sorted(model.named_parameters()):
                is_scale = name.endswith("norm.weight")
                parameter.normal_(float(is_scale), 0.2, generator=generator)
        return Checkpoint("tiny", model, tokenizers)

    return make


@pytest.fixture(scope="session")
def checkpoint(make_checkpoint: MakeCheckpoint) -> Checkpoint:
    return make_checkpoint()


@pytest.fixture(scope="session")
def rnn_checkpoint(make_checkpoint: MakeCheckpoint) -> Checkpoint:
    return make_checkpoint(architecture="rnn")


@pytest.fixture(scope="session")
def decoder_checkpoint(make_checkpoint: MakeCheckpoint) -> Checkpoint:
    return make_checkpoint(architecture="decoder")


@pytest.fixture(scope="session")
def checkpoint_dir(checkpoint: Checkpoint, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("checkpoint") / "tiny"
    checkpoint.save(directory)
    (directory / "README.md").write_text("# tiny\n\nDomain: **dogs** on the grass\n")
    return directory


@pytest.fixture(scope="session")
def exported(checkpoint_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a bundle that no test may change."""
    output = tmp_path_factory.mktemp("bundle") / "tiny"
    export_checkpoint(checkpoint_dir, output)
    return output


@pytest.fixture
def bundle_dir(exported: Path, tmp_path: Path) -> Path:
    """Return a copy of the bundle, to be damaged."""
    return Path(shutil.copytree(exported, tmp_path / "bundle"))


@pytest.fixture(scope="session")
def write_graphs() -> WriteGraphs:
    """Write a model's graphs, and nothing else, into a folder that is made."""

    def write_all(model: Transformer, directory: Path) -> Path:
        directory.mkdir()
        encoder, decoder, scorer = (trace(graph(model)) for graph in (EncoderGraph, StepGraph, ScorerGraph))
        for graph in (encoder, decoder, scorer):
            keep_sums_apart(graph)
        storage.write_graphs((encoder, decoder, scorer), directory)
        return directory

    return write_all
