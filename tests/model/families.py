"""Small models of Transformers with random weights in every parameter, and ours with the same weights, read by the importers."""

import tempfile
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from dragoman.model.importers.families import family_of
from dragoman.model.importers.mapping import lay_out, load
from dragoman.model.importers.report import Report
from dragoman.model.importers.weights import Foreign, Limits
from dragoman.model.networks.transformer import Transformer

VOCAB_SIZE, MAX_POSITIONS = 300, 40
IDS: dict[str, Any] = {"vocab_size": VOCAB_SIZE, "d_model": 32, "pad_token_id": 0, "eos_token_id": 1}
BARTS = IDS | {"encoder_layers": 3, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
BARTS |= {"encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "max_position_embeddings": MAX_POSITIONS, "dropout": 0.0}
BARTS |= {"decoder_start_token_id": 2, "forced_eos_token_id": None}
# Heads are wider than the model.
T5S = IDS | {"d_kv": 24, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
T5S |= {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0}
SCALED = BARTS | {"scale_embedding": True}
# Of a family: its name in Transformers, and the fields of a small configuration.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "marian": ("Marian", SCALED | {"activation_function": "swish"}),
    "bart": ("Bart", BARTS | {"activation_function": "gelu"}),
    "bart-gelu-new": ("Bart", BARTS | {"activation_function": "gelu_new"}),
    "mbart": ("MBart", SCALED | {"activation_function": "gelu"}),
    "t5": ("T5", T5S | {"feed_forward_proj": "relu"}),
    "t5-v1.1": ("T5", T5S | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5-gated-silu": ("T5", T5S | {"feed_forward_proj": "gated-silu", "layer_norm_epsilon": 1e-2}),
    "umt5": ("UMT5", T5S | {"feed_forward_proj": "gated-gelu"}),
}


def random_pair(family: str, seed: int = 0, scale: float = 0.1) -> tuple[PreTrainedModel, Transformer]:
    """Make a model of Transformers and ours with its weights; neither biases nor norms are left at zero and one."""
    name, fields = FAMILIES[family]
    kind = getattr(transformers, "MarianMTModel" if name == "Marian" else f"{name}ForConditionalGeneration")
    theirs: PreTrainedModel = kind(getattr(transformers, f"{name}Config")(**fields)).eval()
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
        layout = lay_out(family_of(foreign.config), foreign, Limits(MAX_POSITIONS, MAX_POSITIONS), Report())
        padding: Any = "masked" if family == "marian" else "predicted"
        ours = load(layout._replace(config=replace(layout.config, padding=padding)), foreign.weights)
    return theirs, ours.eval()


def ragged(lengths: Iterable[int], seed: int = 1) -> list[list[int]]:
    """Draw sources of some lengths, end-of-sequence included."""
    generator = torch.Generator().manual_seed(seed)
    return [[*torch.randint(3, VOCAB_SIZE, (length - 1,), generator=generator).tolist(), 1] for length in lengths]
