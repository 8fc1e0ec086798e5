"""A model of which benchmarks' parts can be tried."""

from pathlib import Path

import pytest

from tests.shelf import Shelf


@pytest.fixture(scope="session")
def endless(shelf: Shelf) -> tuple[Path, Path]:
    """Folders of a small checkpoint that never ends a sequence, and, in a cache of its own, of its bundle; it reads text."""
    folder = shelf.get("small", make_endless)
    return folder / "checkpoint", folder / "cache" / "small-endless-fp32"


@pytest.fixture(scope="session")
def ordinary(endless: tuple[Path, Path]) -> Path:
    """Folder of the checkpoint that the endless one was made of."""
    return endless[0].with_name("ordinary")


def make_endless(folder: Path) -> None:
    import torch

    from benchmarks.harness.models import endless_bundle, without_end
    from dragoman.model.checkpoint import Checkpoint
    from dragoman.model.config import ModelConfig
    from dragoman.model.networks.transformer import Transformer
    from dragoman.model.text.byte_level import ByteLevelTokenizer
    from dragoman.model.text.tokenizers import Tokenizers

    torch.manual_seed(0)
    config = ModelConfig(
        source_vocab_size=400,
        target_vocab_size=400,
        d_model=16,
        num_heads=2,
        num_encoder_layers=1,
        num_decoder_layers=2,
        encoder_ffn_dim=24,
        decoder_ffn_dim=24,
        max_source_positions=64,
        max_target_positions=64,
    )
    tokenizer = ByteLevelTokenizer.train(["a dog runs over the grass while two men stand on a ladder and one child plays"] * 9, 380)
    model = Transformer(config).eval()
    Checkpoint("small", model, Tokenizers.shared(tokenizer)).save(folder / "ordinary")
    Checkpoint("small-endless", without_end(model), Tokenizers.shared(tokenizer)).save(folder / "checkpoint")
    endless_bundle(folder / "ordinary", folder / "cache")
