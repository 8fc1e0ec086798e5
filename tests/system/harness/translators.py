"""Small random models with languages, which every protocol can call: quick ones, and one whose answers take their time."""

from pathlib import Path

import torch

from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.generation import Defaults, Language, Languages
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers


def make_quick(folder: Path) -> None:
    """Export `alpha`, from English to German, and `beta`, to French: six tokens unless a request has another limit."""
    export_translator(folder, "alpha", "de", d_model=64, num_layers=1, max_new_tokens=6)
    export_translator(folder, "beta", "fr", d_model=64, num_layers=1, max_new_tokens=6)


def make_slow(folder: Path) -> None:
    """Export `alpha`, from English to German: 900 tokens, each of which takes its time."""
    export_translator(folder, "alpha", "de", d_model=512, num_layers=6, max_new_tokens=900)


def export_translator(folder: Path, name: str, target: str, *, d_model: int, num_layers: int, max_new_tokens: int) -> None:
    torch.manual_seed(0)
    config = ModelConfig(
        source_vocab_size=280,
        target_vocab_size=280,
        d_model=d_model,
        num_encoder_layers=1,
        num_decoder_layers=num_layers,
        encoder_ffn_dim=d_model,
        decoder_ffn_dim=4 * d_model,
        max_source_positions=64,
        max_target_positions=1000,
        has_output_bias=True,
    )
    model = Transformer(config).eval()
    assert model.decoder.output_bias is not None
    model.decoder.output_bias.data[config.eos_id] = -60
    tokenizers = Tokenizers.shared(ByteLevelTokenizer.train(["a dog runs over the grass"], 280))
    languages = Languages(source=[Language(code="en")], target=[Language(code=target)], default_source="en", default_target=target)
    checkpoint = Checkpoint(name, model, tokenizers, languages=languages, defaults=Defaults(max_new_tokens=max_new_tokens))
    checkpoint.save(folder / "checkpoints" / name)
    export_checkpoint(folder / "checkpoints" / name, folder / "bundles" / name)
