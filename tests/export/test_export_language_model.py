"""Checkpoints of language models through the gate: in single precision and in 8 bits, with all tokens and with a shortlist."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dragoman.export.arguments import ExportError, Shortlist
from dragoman.export.bundle import Bundle
from dragoman.export.exporter import export_checkpoint
from dragoman.export.fields import Precision
from dragoman.export.parity import ParityError
from dragoman.export.running import OnnxRunner
from dragoman.export.verify import verify
from dragoman.model.checkpoint import Checkpoint
from dragoman.model.text.tokenizers import Tokenizers
from tests.export.graphs.test_language_model import GPT, LLAMA, random_model

VOCAB: dict[str, Any] = {"source_vocab_size": 300, "target_vocab_size": 300}
KINDS = {"llama": LLAMA, "gpt": GPT}
Exported = tuple[Checkpoint, Path]


def checkpoint_of(tokenizers: Tokenizers, **switches: Any) -> Checkpoint:
    return Checkpoint("text", random_model(**VOCAB | switches), tokenizers)


@pytest.fixture(scope="module", params=KINDS)
def saved(request: pytest.FixtureRequest, tokenizers: Tokenizers, tmp_path_factory: pytest.TempPathFactory) -> Exported:
    checkpoint = checkpoint_of(tokenizers, **KINDS[request.param])
    directory = tmp_path_factory.mktemp("texts") / "checkpoint"
    checkpoint.save(directory)
    return checkpoint, directory


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_language_model_passes_the_gate(saved: Exported, precision: Precision, tmp_path: Path) -> None:
    checkpoint, directory = saved
    export_checkpoint(directory, tmp_path / "bundle", precision=precision)
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert (manifest.architecture, manifest.has_prompts, manifest.num_attention_layers) == ("decoder", True, 0)
    assert [(cache.name, cache.role, cache.shape) for cache in manifest.caches] == [
        (f"self_{part}_{layer}", "self", [4, "T", 16]) for layer in range(2) for part in "kv"
    ]
    assert manifest.parity.max_log_prob_difference < 1e-4
    runner = OnnxRunner(tmp_path / "bundle", checkpoint.model.config, num_threads=1)
    prompt = [2, *range(20, 53)]
    (given,) = runner.encode([prompt])
    slots = runner.slots(1, 64, 1)
    slots.fill(0, given)
    ids, log_probs = slots.step(np.array([7]), np.array([0]), np.array([len(prompt)]), 5)
    with torch.inference_mode():
        hidden = checkpoint.model.observe(prompt, [7]).hidden
        expected = checkpoint.model.decoder.log_probs(hidden)[0].numpy()
    np.testing.assert_allclose(log_probs[0], expected[ids[0]], rtol=0, atol=1e-4 if precision == "fp32" else 0.5)


@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_language_model_chooses_from_a_shortlist(tokenizers: Tokenizers, precision: Precision, tmp_path: Path) -> None:
    checkpoint_of(tokenizers, **LLAMA).save(tmp_path / "checkpoint")
    listed = Shortlist(["two dogs run over the grass", "a cat sat"])
    export_checkpoint(tmp_path / "checkpoint", tmp_path / "bundle", precision=precision, shortlist=listed)
    assert Bundle.open(tmp_path / "bundle").manifest.num_choices < 300


def test_gate_notices_a_changed_weight_of_what_reads_prompts(saved: Exported, tmp_path: Path) -> None:
    checkpoint, directory = saved
    export_checkpoint(directory, tmp_path / "bundle")
    assert verify(checkpoint, tmp_path / "bundle").num_token_mismatches == 0
    other = random_model(**VOCAB | checkpoint.model.config.to_dict())
    with torch.no_grad():
        other.decoder.layers[0].self_attention.input.weight[70, 3] += 0.3  # of a key
    changed = Checkpoint("other", other, checkpoint.tokenizers)
    changed.save(tmp_path / "changed")
    export_checkpoint(tmp_path / "changed", tmp_path / "theirs")
    for name in ("encoder.onnx", "encoder.weights"):
        (tmp_path / "bundle" / name).write_bytes((tmp_path / "theirs" / name).read_bytes())
    with pytest.raises(ParityError):
        verify(checkpoint, tmp_path / "bundle")


@pytest.mark.parametrize("asked", [{"precision": "fp16"}, {"precision": "bf16"}, {"precision": "int8", "cache_precision": "int8"}])
def test_what_a_language_model_cannot_be_is_refused_by_name(saved: Exported, asked: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="architecture decoder"):
        export_checkpoint(saved[1], tmp_path / "bundle", **asked)
    assert not (tmp_path / "bundle").exists()
