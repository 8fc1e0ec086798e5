"""Models for scenarios: bundles of small random models, and a folder of versions that a test changes while a server watches it."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dragoman.export.bundle import Bundle
from dragoman.export.exporter import export_checkpoint
from dragoman.export.manifest import content_version
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.generation import Defaults, Language, Languages, Template
from dragoman.model.networks.architectures import network
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers

# Options of servers in tests of versions: frequent polls and one thread.
FLAGS = ("--models-poll-seconds", "0.1", "--num-threads", "1")
TRAINING_TEXTS = ["a dog runs over the grass", "the grass is green", "two dogs, and a cat", "Zwei Hunde laufen über das Gras."]
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "transformer": {"num_encoder_layers": 2, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "num_heads": 4},
    "tied": {"num_encoder_layers": 1, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "num_heads": 2, "has_output_bias": True},
    "attentive": {"architecture": "rnn", "num_encoder_layers": 2},
    "forgetful": {"architecture": "rnn", "num_encoder_layers": 1, "attention": "none"},
    "language": {"architecture": "decoder", "num_heads": 2, "decoder_ffn_dim": 40, "positions": "rotary", "norm": "pre"}
    | {"max_source_positions": 200, "max_target_positions": 240},
}


def seal(folder: Path, **fields: Any) -> None:
    """Have a manifest say what its files are now; fields of it may be others. Its version is what all that gives."""
    manifest = folder / "bundle.json"
    content = json.loads(manifest.read_text())
    for path, entry in content["files"].items():
        data = (folder / path).read_bytes()
        entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(content))
    version = content_version(Bundle.open(folder, is_checked=False).manifest)
    manifest.write_text(json.dumps(content | {"version": version} | fields))


class ModelFolder:
    def __init__(self, path: Path, bundles: Path) -> None:
        self.path, self._bundles = path, bundles
        self.asked: dict[str, list[float]] = {}
        path.mkdir(exist_ok=True)

    def put(self, model: str, version: str, bundle: str, change: Callable[[Path], object] = lambda _: None) -> str:
        """Put down a version, whole at once, under that model's name; return what its content gives."""
        scratch = self.path / f".{model}-{version}"
        self.copy(bundle, scratch, model)
        change(scratch)
        (self.path / model).mkdir(exist_ok=True)
        self._note(model)
        scratch.rename(self.path / model / version)
        return self.content(bundle)

    def copy(self, bundle: str, to: Path, model: str) -> None:
        """Copy a bundle under a model's name, of which its version does not depend."""
        shutil.copytree(self.bundle(bundle), to)
        manifest = to / "bundle.json"
        manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"name": model}))

    def remove(self, model: str, version: str = "") -> None:
        """Take a version away, or a whole model, at once."""
        scratch = self.path / f".gone-{model}-{version}"
        self._note(model)
        (self.path / model / version).rename(scratch)
        shutil.rmtree(scratch)

    def say(self, model: str, text: str) -> None:
        (self.path / model).mkdir(exist_ok=True)
        self._note(model)
        scratch = self.path / model / ".model.toml"
        scratch.write_text(text)
        scratch.rename(self.path / model / "model.toml")

    def bundle(self, name: str) -> Path:
        return self._bundles / name

    def content(self, bundle: str) -> str:
        return str(json.loads((self.bundle(bundle) / "bundle.json").read_text())["version"])

    def _note(self, model: str) -> None:
        self.asked.setdefault(model, []).append(time.time())


def make_endless(folder: Path) -> None:
    for seed, name in enumerate(("alpha", "beta")):
        export_endless(folder, name, name, seed, d_model=256)


def make_versions(folder: Path) -> None:
    for seed, (directory, name) in enumerate((("one", "alpha"), ("two", "alpha"), ("three", "alpha"), ("other", "beta"))):
        export_endless(folder, directory, name, seed)


def make_quick(folder: Path) -> None:
    for name, target in (("alpha", "de"), ("beta", "fr")):
        sizes = {"num_encoder_layers": 1, "num_decoder_layers": 1, "encoder_ffn_dim": 64, "decoder_ffn_dim": 256}
        export_endless(folder, name, name, parts=(Template(), translating(target), Defaults(max_new_tokens=6)), **sizes)


def make_slow(folder: Path) -> None:
    sizes = {"num_encoder_layers": 1, "num_decoder_layers": 6, "encoder_ffn_dim": 512, "decoder_ffn_dim": 2048}
    parts = (Template(), translating("de"), Defaults(max_new_tokens=900))
    export_endless(folder, "alpha", "alpha", d_model=512, parts=parts, **sizes)


def make_short(folder: Path) -> None:
    german = Language(code="deu_Latn", names=["de"], source_prefix=[270], source_suffix=[271], target_prefix=[272])
    french = Language(code="fra_Latn", names=["fr"], target_prefix=[273, 274], decoder_start_id=275)
    languages = Languages(source=[german, french], target=[german, french], default_source="fra_Latn", default_target="deu_Latn")
    template = Template(source_prefix=[276], task="{source} to {target}: ")
    defaults = Defaults(num_beams=2, length_penalty=0.5, no_repeat_ngram_size=3, min_new_tokens=2, is_end_forced=True)
    parts = (template, languages, defaults)
    export_endless(folder, "alpha", "alpha", parts=parts, num_heads=4, max_target_positions=64)


def translating(target: str) -> Languages:
    return Languages(source=[Language(code="en")], target=[Language(code=target)], default_source="en", default_target=target)


def export_endless(
    folder: Path, directory: str, name: str, seed: int = 0, d_model: int = 64, parts: tuple[Any, ...] = (), **sizes: int
) -> None:
    """Export a random model that never ends a sequence; `parts` are template, languages and defaults of its checkpoint."""
    torch.manual_seed(seed)
    usual = {"num_encoder_layers": 2, "num_decoder_layers": 2, "encoder_ffn_dim": 2 * d_model, "decoder_ffn_dim": 2 * d_model}
    positions = {"max_source_positions": 64, "max_target_positions": 1000}
    fields: dict[str, Any] = {"source_vocab_size": 280, "target_vocab_size": 280, "d_model": d_model, **usual, **positions, **sizes}
    model = Transformer(ModelConfig(**fields, has_output_bias=True)).eval()
    assert model.decoder.output_bias is not None
    model.decoder.output_bias.data[model.config.eos_id] = -60
    tokenizers = Tokenizers.shared(ByteLevelTokenizer.train(["a dog runs over the grass"], 280))
    Checkpoint(name, model, tokenizers, *parts).save(folder / "checkpoints" / directory)
    export_checkpoint(folder / "checkpoints" / directory, folder / "bundles" / directory)


def make_architectures(folder: Path) -> None:
    """Export a random model of each architecture; no parameter is 0 or 1."""
    tokenizers = Tokenizers.shared(ByteLevelTokenizer.train(TRAINING_TEXTS, 300))
    for seed, (name, fields) in enumerate(ARCHITECTURES.items()):
        size = tokenizers.source.vocab_size
        sizes = {"source_vocab_size": size, "target_vocab_size": size, "d_model": 32, "num_decoder_layers": 2}
        positions = {"max_source_positions": 64, "max_target_positions": 48}
        config = ModelConfig(**(sizes | positions | fields))
        torch.manual_seed(seed)
        model = network(config).eval()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for key, parameter in sorted(model.named_parameters()):
                parameter.normal_(float(key.endswith("norm.weight")), 0.25, generator=generator)
                if name == "tied" and parameter.shape[0] == size:  # each token has a twin, exactly as likely
                    parameter[1::2] = parameter[::2]
        Checkpoint(name, model, tokenizers).save(folder / "checkpoints" / name)
        export_checkpoint(folder / "checkpoints" / name, folder / "bundles" / name)
