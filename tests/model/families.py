"""Small models of Transformers with random weights in every parameter, and ours with the same weights, read by the importers."""

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    M2M100Config,
    M2M100ForConditionalGeneration,
    MarianConfig,
    MarianMTModel,
    MBartConfig,
    MBartForConditionalGeneration,
    MT5Config,
    MT5ForConditionalGeneration,
    PegasusConfig,
    PegasusForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    UMT5Config,
    UMT5ForConditionalGeneration,
)

from dragoman.model.importers.foreign import Foreign, Limits
from dragoman.model.importers.layout import load
from dragoman.model.importers.registry import family_of
from dragoman.model.importers.report import Report
from dragoman.model.networks.transformer import Transformer

VOCAB_SIZE, MAX_POSITIONS = 300, 40
BARTS: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": MAX_POSITIONS,
    "dropout": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}
T5S: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "d_model": 32,
    "d_kv": 24,  # heads are wider than the model
    "d_ff": 48,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 12,
    "dropout_rate": 0.0,
    "pad_token_id": 0,
    "eos_token_id": 1,
    "decoder_start_token_id": 0,
}
FAMILIES: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "marian": (MarianMTModel, MarianConfig(**BARTS, activation_function="swish", scale_embedding=True)),
    "m2m100": (M2M100ForConditionalGeneration, M2M100Config(**BARTS, activation_function="relu", scale_embedding=True)),
    "bart": (BartForConditionalGeneration, BartConfig(**BARTS, activation_function="gelu")),
    "bart-gelu-new": (BartForConditionalGeneration, BartConfig(**BARTS, activation_function="gelu_new")),
    "mbart": (MBartForConditionalGeneration, MBartConfig(**BARTS, activation_function="gelu", scale_embedding=True)),
    "pegasus": (PegasusForConditionalGeneration, PegasusConfig(**BARTS, activation_function="relu", scale_embedding=True)),
    "t5": (T5ForConditionalGeneration, T5Config(**T5S, feed_forward_proj="relu")),
    "t5-v1.1": (T5ForConditionalGeneration, T5Config(**T5S, feed_forward_proj="gated-gelu", tie_word_embeddings=False)),
    "t5-gated-silu": (T5ForConditionalGeneration, T5Config(**T5S, feed_forward_proj="gated-silu", layer_norm_epsilon=1e-2)),
    "mt5": (MT5ForConditionalGeneration, MT5Config(**T5S, feed_forward_proj="gated-gelu")),
    "umt5": (UMT5ForConditionalGeneration, UMT5Config(**T5S, feed_forward_proj="gated-gelu")),
}


def random_pair(family: str, seed: int = 0, scale: float = 0.1) -> tuple[PreTrainedModel, Transformer]:
    """Make a model of Transformers and ours with its weights; neither biases nor norms are left at zero and one."""
    kind, config = FAMILIES[family]
    theirs = kind(config).eval()
    generator = torch.Generator().manual_seed(seed)
    tensors = [*theirs.named_parameters(), *((name, x) for name, x in theirs.named_buffers() if name == "final_logits_bias")]
    with torch.no_grad():
        for name, tensor in tensors:
            if tensor.requires_grad or name == "final_logits_bias":
                is_scale = "norm" in name and name.endswith("weight")
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * scale + float(is_scale))
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        foreign = Foreign.open(Path(folder))
        layout = family_of(foreign.config).architecture.lay_out(foreign, Limits(MAX_POSITIONS, MAX_POSITIONS), Report())
        padding: Any = "masked" if family == "marian" else "predicted"
        ours = load(replace(layout, config=replace(layout.config, padding=padding)), foreign.weights)
    return theirs, ours.eval()


def ragged(lengths: Iterable[int], seed: int = 1) -> list[list[int]]:
    """Draw sources of some lengths, end-of-sequence included."""
    generator = torch.Generator().manual_seed(seed)
    return [[*torch.randint(3, VOCAB_SIZE, (length - 1,), generator=generator).tolist(), 1] for length in lengths]
