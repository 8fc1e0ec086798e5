"""What every test folder may ask for."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:  # the fixtures load them, so that tests of the server need not wait for torch
    from torch import Tensor, nn
    from transformers import MarianMTModel, PegasusForConditionalGeneration

    from model.transformer import Transformer


@pytest.fixture(scope="session")
def multi30k() -> Path:
    """Folder of the Multi30k text: `DRAGOMAN_DATA`, else a `shared` folder beside the repository."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data" / "multi30k"
    folder = Path(os.environ.get("DRAGOMAN_DATA") or beside)
    if not (folder / "train.en.gz").exists():
        pytest.skip(f"no Multi30k text in {folder}; set DRAGOMAN_DATA to its folder")
    return folder


@pytest.fixture(scope="session")
def as_transformers() -> "Callable[[Transformer], MarianMTModel | PegasusForConditionalGeneration]":
    """Build Transformers' model with our weights, position table and ban on padding: Marian, or Pegasus where norms come first."""
    from transformers import MarianConfig, MarianMTModel, PegasusConfig, PegasusForConditionalGeneration

    def build(ours: "Transformer") -> MarianMTModel | PegasusForConditionalGeneration:
        config = ours.config
        is_pre_norm = config.norm == "pre"
        model_class, config_class = (
            (PegasusForConditionalGeneration, PegasusConfig) if is_pre_norm else (MarianMTModel, MarianConfig)
        )
        theirs = model_class(
            config_class(
                vocab_size=config.source_vocab_size,
                max_position_embeddings=config.max_source_positions,
                d_model=config.d_model,
                encoder_layers=config.num_encoder_layers,
                decoder_layers=config.num_decoder_layers,
                encoder_attention_heads=config.num_heads,
                decoder_attention_heads=config.num_heads,
                encoder_ffn_dim=config.encoder_ffn_dim,
                decoder_ffn_dim=config.decoder_ffn_dim,
                activation_function=config.activation,
                scale_embedding=True,
                pad_token_id=config.pad_id,
                eos_token_id=config.eos_id,
                decoder_start_token_id=config.decoder_start_id,
                forced_eos_token_id=None,
            )
        )
        table = ours.decoder.embedding.tokens.weight
        weights = {"model.shared.weight": table, "lm_head.weight": table}
        bias = ours.decoder.padding_logits
        weights["final_logits_bias"] = (bias if ours.decoder.output_bias is None else ours.decoder.output_bias + bias)[None]
        for name, side in (("encoder", ours.encoder), ("decoder", ours.decoder)):
            weights |= {
                f"model.{name}.embed_tokens.weight": table,
                f"model.{name}.embed_positions.weight": side.embedding.positions,
            }
            if is_pre_norm:
                weights |= {f"model.{name}.layer_norm.weight": side.norm.weight, f"model.{name}.layer_norm.bias": side.norm.bias}
            for i, layer in enumerate(side.layers):
                weights |= _layer_weights(layer, f"model.{name}.layers.{i}", is_decoder=name == "decoder")
        theirs.load_state_dict(weights)
        return theirs.eval()

    return build


def _layer_weights(ours: "nn.Module", theirs: str, *, is_decoder: bool) -> "dict[str, Tensor]":
    weights = _attention_weights(ours.self_attention, f"{theirs}.self_attn")
    modules = {
        "self_attn_layer_norm": ours.self_residual.norm,
        "final_layer_norm": ours.feed_residual.norm,
        "fc1": ours.feed_forward.inner,
        "fc2": ours.feed_forward.outer,
    }
    if is_decoder:
        weights |= _attention_weights(ours.cross_attention, f"{theirs}.encoder_attn")
        modules["encoder_attn_layer_norm"] = ours.cross_residual.norm
    for name, module in modules.items():
        weights |= {f"{theirs}.{name}.weight": module.weight, f"{theirs}.{name}.bias": module.bias}
    return weights


def _attention_weights(ours: "nn.Module", theirs: str) -> "dict[str, Tensor]":
    weights = {f"{theirs}.out_proj.weight": ours.output.weight, f"{theirs}.out_proj.bias": ours.output.bias}
    for name, weight, bias in zip("qkv", ours.input.weight.chunk(3), ours.input.bias.chunk(3), strict=True):
        weights |= {f"{theirs}.{name}_proj.weight": weight, f"{theirs}.{name}_proj.bias": bias}
    return weights
