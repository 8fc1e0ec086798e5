"""Models that benchmarks make."""

from pathlib import Path

import pytest
import torch

from benchmarks.harness.models import endless_bundle, sharpen
from dragoman.export.bundle import Bundle
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.decode import StepDecoder
from dragoman.model.tokenizer import Tokenizer
from dragoman.model.transformer import Transformer
from dragoman.server.engine.messages import SearchOptions
from dragoman.server.offline import OfflineTranslator


def small_model(**switches: object) -> Transformer:
    torch.manual_seed(0)
    fields = {"d_model": 16, "num_heads": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "encoder_ffn_dim": 24}
    fields |= {"decoder_ffn_dim": 24, "max_source_positions": 32, "max_target_positions": 32} | switches
    return Transformer(ModelConfig(source_vocab_size=300, target_vocab_size=300, **fields)).eval()  # type: ignore[arg-type]


@pytest.mark.parametrize("norm", ["pre", "post"])
@torch.inference_mode()
def test_sharpening_makes_the_likeliest_token_as_likely_as_asked(norm: str) -> None:
    model = small_model(norm=norm, d_model=64)
    sharpen(model, 0.5)
    generator = torch.Generator().manual_seed(7)
    sources = torch.randint(3, 300, (64, 6), generator=generator).tolist()
    previous = torch.randint(3, 300, (64,), generator=generator)
    likeliest = StepDecoder(model, sources).step(previous).max(-1).values.exp()
    assert float(likeliest.mean()) == pytest.approx(0.5, abs=0.15)


def test_an_endless_bundle_never_ends_and_is_made_once(tmp_path: Path) -> None:
    tokenizer = Tokenizer.train(["a dog runs over the grass"], 280)
    model = small_model()
    Checkpoint("small", model, tokenizer).save(tmp_path / "checkpoint")
    folder = endless_bundle(tmp_path / "checkpoint", tmp_path / "cache")
    translator = OfflineTranslator(folder, 8, 1)
    for search in (SearchOptions(), SearchOptions(num_beams=3)):
        assert [end.reason for end in translator.run([[5, 6, 1], [7, 1]], 12, search)] == ["length", "length"]
    before = (folder / "bundle.json").stat().st_mtime_ns
    assert endless_bundle(tmp_path / "checkpoint", tmp_path / "cache") == folder
    assert (folder / "bundle.json").stat().st_mtime_ns == before
    with torch.no_grad():
        model.decoder.embedding.tokens.weight.mul_(1.01)
    Checkpoint("small", model, tokenizer).save(tmp_path / "checkpoint")
    version = Bundle.open(folder).manifest.version
    assert Bundle.open(endless_bundle(tmp_path / "checkpoint", tmp_path / "cache")).manifest.version != version
