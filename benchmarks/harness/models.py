"""Models of benchmarks, and their bundles, cached in a folder.

Random models, and those called endless, never end a sequence: the benchmark chooses how long answers are.
"""

import argparse
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
from dataclasses import replace
from functools import cache as remembered
from pathlib import Path

import torch

from dragoman.export.bundle import Bundle, BundleError, hash_file
from dragoman.export.exporter import export_checkpoint
from dragoman.model.checkpoint import WEIGHTS_FILE, Checkpoint
from dragoman.model.config import ModelConfig
from dragoman.model.decode import StepDecoder
from dragoman.model.networks.architectures import network
from dragoman.model.networks.network import Network
from dragoman.model.networks.transformer import DecoderLayer, Transformer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "model/pretrained/en-de"
NEVER = -60.0
"""Bias of the end-of-sequence logit: far below every other."""

SEED = 0
VOCAB_SIZE = 32_000
LIKELIEST_PROBABILITY = 0.6
"""Mean probability of the likeliest token, about that of a trained translation model."""


MODELS = ("en-de", "en-de-base")
PRECISIONS = ("fp32", "int8")


def add_model_options(parser: argparse.ArgumentParser, model: str = "en-de", precision: str = "fp32") -> None:
    """Add the options that `chosen_bundle` reads."""
    parser.add_argument("--model", choices=MODELS, default=model, help="The shipped model, or widened to Transformer-base's size.")
    parser.add_argument("--precision", choices=PRECISIONS, default=precision)
    parser.add_argument("--bundle", type=Path, help="Any bundle, in place of model and precision.")


def chosen_bundle(arguments: argparse.Namespace) -> Path:
    """Return the bundle of the command line's options, exported if needed."""
    bundle: Path | None = arguments.bundle
    return bundle or bundle_of(checkpoint_of(arguments.model), arguments.cache, arguments.precision)


def checkpoint_of(model: str) -> Checkpoint:
    """Return one of `MODELS`."""
    from benchmarks.harness.widened import widened_checkpoint

    return Checkpoint.load(SHIPPED) if model == "en-de" else widened_checkpoint()


def random_texts(tokenizer: ByteLevelTokenizer, num_tokens: int, count: int) -> list[str]:
    """Draw texts of random words with exactly `num_tokens` tokens, end-of-sequence included."""
    assert num_tokens > 1, "end-of-sequence is a token"
    candidates = sorted(token[1:] for token in tokenizer.encoder.get_vocab() if token[0] == "Ġ" and token[1:].isalpha())
    words = [word for word in candidates if word.isascii() and len(tokenizer.encode(word)) == 1]
    generator = random.Random(SEED)
    return [" ".join(generator.choices(words, k=num_tokens - 1)) for _ in range(count)]


def endless_bundle(checkpoint: Path, cache: Path) -> Path:
    """Export a checkpoint with end-of-sequence ruled out; return the bundle's folder."""
    loaded = Checkpoint.load(checkpoint)
    return bundle_of(Checkpoint(f"{loaded.name}-endless", without_end(loaded.model), loaded.tokenizers), cache)


def base_bundle(cache: Path) -> Path:
    """Export `base_checkpoint`; return the bundle's folder."""
    return bundle_of(base_checkpoint(), cache)


def base_checkpoint() -> Checkpoint:
    """Make a random model of the size of Transformer-base (Vaswani et al., 2017): 6+6 layers, d_model 512; it never ends.

    It has the tokeniser of the shipped en-de model for reading text; most of its answers are ids beyond that vocabulary.
    """
    config = ModelConfig(source_vocab_size=VOCAB_SIZE, target_vocab_size=VOCAB_SIZE, has_output_bias=True)
    torch.manual_seed(SEED)
    model = Transformer(config).eval()
    sharpen(model)
    return Checkpoint("base-endless", without_end(model), Tokenizers.load(SHIPPED))


@torch.inference_mode()
def sharpen(model: Transformer, probability: float = LIKELIEST_PROBABILITY) -> None:
    """Scale a random model's last layer norm until its likeliest tokens have the given mean probability."""
    last = model.decoder.layers[-1]
    assert isinstance(last, DecoderLayer)
    norm = model.decoder.norm if model.config.norm == "pre" else last.feed_residual.norm
    assert isinstance(norm, torch.nn.LayerNorm)
    generator = torch.Generator().manual_seed(SEED)
    sources = torch.randint(3, model.config.source_vocab_size, (32, 8), generator=generator).tolist()
    previous = torch.randint(3, model.config.target_vocab_size, (32,), generator=generator)
    low, high = 0.0, 64.0
    for _ in range(12):  # the likeliest token's probability rises with the gain
        middle = (low + high) / 2
        norm.weight.fill_(middle)
        likeliest = StepDecoder(model, sources).step(previous).max(-1).values.exp().mean()
        low, high = (middle, high) if likeliest < probability else (low, middle)
    norm.weight.fill_(round(middle, 1))  # the same number however sums are rounded


def without_end(model: Network) -> Network:
    """Return the same model with an output bias that excludes end-of-sequence."""
    config = replace(model.config, has_output_bias=True)
    endless = network(config).eval()
    endless.load_state_dict(model.state_dict(), strict=False)  # only the bias may be missing, which starts at zero
    assert endless.decoder.output_bias is not None
    endless.decoder.output_bias.data[config.eos_id] = NEVER
    return endless


def bundle_by(source: Path, checkpoint: Checkpoint, cache: Path, precision: str = "fp32") -> Path:
    """Export like `bundle_of`, by the exporter of another checkout, in the format that its server reads.

    Raises:
        subprocess.CalledProcessError: If that exporter fails; standard error has the cause.
    """
    digest = _exporter_digest(source)
    folder = cache.resolve() / f"{checkpoint.name}-{precision}-{digest[:12]}"
    note = cache / f"{folder.name}.exporter"
    with tempfile.TemporaryDirectory() as scratch:
        saved = Path(scratch) / checkpoint.name
        checkpoint.save(saved)
        made_of = f"{digest} {hash_file(saved / WEIGHTS_FILE)}"
        if not (folder.is_dir() and note.is_file() and note.read_text() == made_of):
            shutil.rmtree(folder, ignore_errors=True)
            cache.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "dragoman", "export", str(saved), str(folder), "--precision", precision]
            environment = {**os.environ, "PYTHONPATH": str(source)}
            subprocess.run(command, cwd=source, env=environment, stdout=subprocess.DEVNULL, check=True)
    note.write_text(made_of)
    return folder


def bundle_of(checkpoint: Checkpoint, cache: Path, precision: str = "fp32") -> Path:
    """Export a checkpoint into the cache, unless the same exporter has put the same weights there; return the bundle's folder.

    Raises:
        ExportError: If there is no such precision.
    """
    cache.mkdir(parents=True, exist_ok=True)
    folder = cache / f"{checkpoint.name}-{precision}"
    note, exporter = cache / f"{folder.name}.exporter", _exporter_digest()
    with tempfile.TemporaryDirectory() as scratch:
        checkpoint.save(Path(scratch))
        try:
            is_same = Bundle.open(folder).manifest.origin.weights_sha256 == hash_file(Path(scratch) / WEIGHTS_FILE)
        except BundleError:
            is_same = False  # there is none, or one of another format
        if is_same and note.is_file() and note.read_text() == exporter:
            return folder
        export_checkpoint(Path(scratch), folder, precision, is_forced=True)
    note.write_text(exporter)
    return folder


@remembered
def _exporter_digest(source: Path = ROOT) -> str:
    """Return a digest of the code that makes bundles."""
    digest = hashlib.sha256()
    for path in sorted(path for folder in ("export", "model") for path in (source / folder).rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
