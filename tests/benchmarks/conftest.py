"""A model of which benchmarks' parts can be tried."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def endless(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of a small checkpoint that never ends a sequence, and, in a cache of its own, of its bundle; it reads text."""
    import torch

    from benchmarks.harness.models import bundle_of, without_end
    from dragoman.model.checkpoint import Checkpoint
    from dragoman.model.config import ModelConfig
    from dragoman.model.tokenizer import Tokenizer
    from dragoman.model.transformer import Transformer

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
    tokenizer = Tokenizer.train(["a dog runs over the grass while two men stand on a ladder and one child plays"] * 9, 380)
    checkpoint = Checkpoint("small-endless", without_end(Transformer(config).eval()), tokenizer)
    folder = tmp_path_factory.mktemp("endless")
    checkpoint.save(folder / "checkpoint")
    return folder / "checkpoint", bundle_of(checkpoint, folder / "cache")
