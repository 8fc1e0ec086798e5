"""Models that benchmarks make."""

import shutil
from pathlib import Path

import pytest
import torch

from benchmarks.harness import models
from benchmarks.harness.models import endless_bundle, sharpen
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.decode import StepDecoder
from dragoman.model.networks.transformer import Transformer
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


def test_an_endless_bundle_never_ends(endless: tuple[Path, Path]) -> None:
    translator = OfflineTranslator(endless[1], 8, 1)
    for search in (SearchOptions(), SearchOptions(num_beams=3)):
        assert [end.reason for end in translator.run([[5, 6, 1], [7, 1]], 12, search)] == ["length", "length"]


class Exported(Exception):
    """An export that was about to begin."""


def test_an_endless_bundle_is_made_once_of_the_same_weights_by_the_same_exporter(
    endless: tuple[Path, Path], ordinary: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(source: Path, output: Path, precision: str, *, is_forced: bool) -> None:
        assert (output.name, precision, is_forced) == ("small-endless-fp32", "fp32", True)
        raise Exported(source)

    monkeypatch.setattr(models, "export_checkpoint", export)
    shutil.copytree(endless[1].parent, tmp_path / "cache")
    assert endless_bundle(ordinary, tmp_path / "cache") == tmp_path / "cache" / endless[1].name
    checkpoint = Checkpoint.load(ordinary)
    with torch.no_grad():
        checkpoint.model.decoder.embedding.tokens.weight.mul_(1.01)
    checkpoint.save(tmp_path / "other")
    with pytest.raises(Exported):
        endless_bundle(tmp_path / "other", tmp_path / "cache")
    (tmp_path / "cache" / "small-endless-fp32.exporter").write_text("another")
    with pytest.raises(Exported):
        endless_bundle(ordinary, tmp_path / "cache")
