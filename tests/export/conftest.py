"""Small random checkpoints, and bundles exported from them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dragoman.export import storage
from dragoman.export.arguments import Shortlist
from dragoman.export.bundle import MANIFEST_FILE, Bundle, hash_file
from dragoman.export.exporter import export_checkpoint
from dragoman.export.graphs.transformer import EncoderGraph, ScorerGraph, StepGraph
from dragoman.export.rewriting import keep_sums_apart
from dragoman.export.tracing import trace
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.networks.architectures import network
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from tests.model.conftest import GPT, LLAMA
from tests.shelf import Shelf

TEXTS = ["two dogs run over the grass", "a dog and a cat run", "the cat sat on the grass", "zwei Hunde laufen"] * 3
SHORTLIST_TEXT = ["the dog and the cat", "the dog"]
CALIBRATION = ["a dog and a cat run", "the cat sat"]
SMALL: dict[str, Any] = dict.fromkeys(("source_vocab_size", "target_vocab_size"), 300) | {"d_model": 32, "num_heads": 4}
SMALL |= {"num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40}
SMALL |= {"max_source_positions": 24, "max_target_positions": 20}
UNUSED = ("num_heads", "encoder_ffn_dim", "decoder_ffn_dim")
DECODER = {name: value for name, value in SMALL.items() if not name.startswith(("num_encoder", "encoder"))}
# Sizes of a small model of each architecture.
SMALL_OF: dict[str, dict[str, Any]] = {
    "transformer": SMALL,
    "rnn": {name: value for name, value in SMALL.items() if name not in UNUSED},
    "decoder": DECODER | {"max_source_positions": 30, "max_target_positions": 40},
}
# GELU, learned positions with offset, an embedding norm, an output bias, a deeper encoder.
PRE_NORM: dict[str, Any] = {"norm": "pre", "activation": "gelu", "positions": "learned", "position_offset": 2}
PRE_NORM |= {"has_embedding_norm": True, "has_output_bias": True, "is_embedding_scaled": False}
PRE_NORM |= {"num_encoder_layers": 3, "num_decoder_layers": 1, "max_source_positions": 100, "max_target_positions": 40}
# Vocabularies and projection of their own, SiLU, a deeper decoder, a start at padding.
SEPARATE: dict[str, Any] = {"activation": "silu", "is_embedding_shared": False, "is_projection_tied": False}
SEPARATE |= {"target_vocab_size": 290, "num_encoder_layers": 1, "num_decoder_layers": 3, "pad_id": 289, "decoder_start_id": 289}
SEPARATE |= {"max_source_positions": 6, "max_target_positions": 3}
KINDS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "long": {"max_source_positions": 150, "max_target_positions": 150},  # a row has positions that are not driven one by one
    "pre-norm": PRE_NORM,
    "separate": SEPARATE,
    "one token": {"max_source_positions": 1, "max_target_positions": 1, "num_heads": 1},
    "additive": {"architecture": "rnn", "attention": "additive", "num_encoder_layers": 1},
    "no attention": {"architecture": "rnn", "attention": "none"},
    "llama": LLAMA | {"architecture": "decoder", "d_model": 64},
    "gpt": GPT | {"architecture": "decoder", "d_model": 64},
}
"""Models that are exported, by name; what differs from the small one of their architecture."""

MakeCheckpoint = Callable[..., Checkpoint]
Export = Callable[..., Bundle]
WriteGraphs = Callable[[Transformer, Path], Path]


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change a JSON file."""
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def seal(directory: Path, name: str) -> None:
    """Let a bundle's manifest say what a file now holds."""
    entry = {"size": (directory / name).stat().st_size, "sha256": hash_file(directory / name)}
    edit(directory / MANIFEST_FILE, lambda manifest: manifest["files"].update({name: entry}))


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
def export(make_checkpoint: MakeCheckpoint, shelf: Shelf) -> Export:
    """Export a checkpoint of a kind; each bundle is made once for the whole run, and no test may change it."""

    def get(kind: str = "tiny", precision: str = "fp32", *, is_short: bool = False, **options: Any) -> Bundle:
        def make(folder: Path) -> None:
            make_checkpoint(**KINDS[kind]).save(folder / "checkpoint")
            (folder / "checkpoint/README.md").write_text("# tiny\n\nDomain: **dogs** on the grass\n")
            texts = {"shortlist": Shortlist(SHORTLIST_TEXT) if is_short else None}
            texts |= {"calibration": CALIBRATION if (kind, precision) == ("tiny", "int8") else None}
            export_checkpoint(folder / "checkpoint", folder / "bundle", precision, **texts, **options)

        name = "-".join(["export", kind, precision, *["short"] * is_short, *map(str, options.values())])
        return Bundle.open(shelf.get(name, make) / "bundle", is_checked=False)

    return get


@pytest.fixture(scope="session")
def exported(export: Export) -> Path:
    """Return a bundle that no test may change."""
    return export().directory


@pytest.fixture(scope="session")
def checkpoint_dir(exported: Path) -> Path:
    """Return the checkpoint of that bundle."""
    return exported.with_name("checkpoint")


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
