"""Models for scenarios: bundles of small random models, and a folder of versions that a test changes while a server watches it."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from dragoman.export.bundle import Bundle, content_version
from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.networks.transformer import Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers

# What tests of versions have in common: looks follow each other quickly, and the calls of tests are short.
FLAGS = ("--models-poll-seconds", "0.1", "--num-threads", "1", "--restart-backoff-initial-seconds", "0.1")


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
    """A folder of models that a test changes while a server watches it."""

    def __init__(self, path: Path, bundles: Path) -> None:
        self.path, self._bundles = path, bundles
        self.asked: dict[str, list[float]] = {}
        path.mkdir(exist_ok=True)

    def put(self, model: str, version: str, bundle: str, change: Callable[[Path], object] = lambda _: None) -> str:
        """Put down a version, whole at once; return what its content gives."""
        scratch = self.path / f".{model}-{version}"
        shutil.copytree(self.bundle(bundle), scratch)
        change(scratch)
        (self.path / model).mkdir(exist_ok=True)
        self._note(model)
        scratch.rename(self.path / model / version)
        return self.content(bundle)

    def remove(self, model: str, version: str) -> None:
        """Take a version away, at once as one that watches sees it."""
        scratch = self.path / f".gone-{model}-{version}"
        self._note(model)
        (self.path / model / version).rename(scratch)
        shutil.rmtree(scratch)

    def say(self, model: str, text: str) -> None:
        """Write a model's `model.toml`."""
        (self.path / model).mkdir(exist_ok=True)
        self._note(model)
        scratch = self.path / model / ".model.toml"
        scratch.write_text(text)
        scratch.rename(self.path / model / "model.toml")

    def bundle(self, name: str) -> Path:
        """Return where a bundle lies that versions are made of."""
        return self._bundles / name

    def content(self, bundle: str) -> str:
        """Return the version that a bundle's content gives."""
        return str(json.loads((self.bundle(bundle) / "bundle.json").read_text())["version"])

    def _note(self, model: str) -> None:
        self.asked.setdefault(model, []).append(time.time())


def make_endless(folder: Path) -> None:
    for seed, name in enumerate(("alpha", "beta")):
        export_endless(folder, name, name, seed, 256)


def export_endless(folder: Path, directory: str, name: str, seed: int, d_model: int) -> None:
    """Export a random model that never ends a sequence."""
    tokenizer = ByteLevelTokenizer.train(["a dog runs over the grass"], 280)
    torch.manual_seed(seed)
    config = ModelConfig(
        source_vocab_size=280,
        target_vocab_size=280,
        d_model=d_model,
        num_encoder_layers=2,
        num_decoder_layers=2,
        encoder_ffn_dim=2 * d_model,
        decoder_ffn_dim=2 * d_model,
        max_source_positions=64,
        max_target_positions=1000,
        has_output_bias=True,
    )
    model = Transformer(config).eval()
    assert model.decoder.output_bias is not None
    model.decoder.output_bias.data[config.eos_id] = -60
    Checkpoint(name, model, Tokenizers.shared(tokenizer)).save(folder / "checkpoints" / directory)
    export_checkpoint(folder / "checkpoints" / directory, folder / "bundles" / directory)
