"""Small models of Transformers with random weights in every parameter, and the same weights under our names.

The mapping is this file's own, so that the network is compared with Transformers and with no importer of ours.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
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

from dragoman.model.config import ModelConfig
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
ACTIVATIONS = {"swish": "silu", "silu": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}


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
    return theirs, (t5_of_ours if hasattr(config, "d_kv") else bart_of_ours)(theirs)


def bart_of_ours(theirs: Any) -> Transformer:
    """Return ours with the weights of a model whose parts are called as BART's are."""
    config, weights = theirs.config, theirs.state_dict()
    is_m2m = config.model_type == "m2m_100"
    ours = Transformer(
        ModelConfig(
            source_vocab_size=config.vocab_size,
            target_vocab_size=config.vocab_size,
            d_model=config.d_model,
            num_heads=config.encoder_attention_heads,
            num_encoder_layers=config.encoder_layers,
            num_decoder_layers=config.decoder_layers,
            encoder_ffn_dim=config.encoder_ffn_dim,
            decoder_ffn_dim=config.decoder_ffn_dim,
            max_source_positions=config.max_position_embeddings,
            max_target_positions=config.max_position_embeddings,
            norm="pre" if "model.encoder.layer_norm.weight" in weights else "post",
            activation=ACTIVATIONS[config.activation_function],  # type: ignore[arg-type]
            positions="learned",
            position_offset={"bart": 2, "mbart": 2, "m2m_100": config.pad_token_id + 1}.get(config.model_type, 0),
            is_embedding_scaled=config.scale_embedding,
            has_embedding_norm="model.encoder.layernorm_embedding.weight" in weights,
            has_output_bias="final_logits_bias" in weights,
            padding="masked" if config.model_type == "marian" else "predicted",
        )
    ).eval()
    new: dict[str, Tensor] = {}
    for side in ("encoder", "decoder"):
        stack = getattr(theirs.model, side)
        table = stack.embed_positions.weights[: MAX_POSITIONS + config.pad_token_id + 1] if is_m2m else stack.embed_positions.weight
        new |= {f"{side}.embedding.tokens.weight": stack.embed_tokens.weight, f"{side}.embedding.positions": table}
        new |= _renamed(weights, f"model.{side}.layer_norm", f"{side}.norm")
        new |= _renamed(weights, f"model.{side}.layernorm_embedding", f"{side}.embedding.norm")
        for i in range(len(stack.layers)):
            there, here = f"model.{side}.layers.{i}", f"{side}.layers.{i}"
            for attention, name in (("self_attn", "self"), ("encoder_attn", "cross"))[: 1 + (side == "decoder")]:
                for part in ("weight", "bias"):
                    blocks = [weights[f"{there}.{attention}.{x}_proj.{part}"] for x in "qkv"]
                    new[f"{here}.{name}_attention.input.{part}"] = torch.cat(blocks)
                new |= _renamed(weights, f"{there}.{attention}.out_proj", f"{here}.{name}_attention.output")
                new |= _renamed(weights, f"{there}.{attention}_layer_norm", f"{here}.{name}_residual.norm")
            for part, name in (
                ("fc1", "feed_forward.inner"),
                ("fc2", "feed_forward.outer"),
                ("final_layer_norm", "feed_residual.norm"),
            ):
                new |= _renamed(weights, f"{there}.{part}", f"{here}.{name}")
    if "final_logits_bias" in weights:
        new["decoder.output_bias"] = weights["final_logits_bias"][0]
    return _with_weights(ours, new)


def t5_of_ours(theirs: Any) -> Transformer:
    """Return ours with the weights of a T5, mT5 or UMT5."""
    config, weights = theirs.config, theirs.state_dict()
    is_per_layer = config.model_type == "umt5"
    # As this version of Transformers has it; it ties the output projection whatever the configuration says.
    is_scaled = is_per_layer or (config.model_type == "t5" and config.scale_decoder_outputs)
    ours = Transformer(
        ModelConfig(
            source_vocab_size=config.vocab_size,
            target_vocab_size=config.vocab_size,
            d_model=config.d_model,
            num_heads=config.num_heads,
            num_encoder_layers=config.num_layers,
            num_decoder_layers=config.num_decoder_layers,
            encoder_ffn_dim=config.d_ff,
            decoder_ffn_dim=config.d_ff,
            max_source_positions=MAX_POSITIONS,
            max_target_positions=MAX_POSITIONS,
            norm="pre",
            norm_kind="rms",
            norm_epsilon=config.layer_norm_epsilon,
            has_biases=False,
            activation=ACTIVATIONS[config.dense_act_fn],  # type: ignore[arg-type]
            is_ffn_gated=config.is_gated_act,
            attention_dim=config.num_heads * config.d_kv,
            is_attention_scaled=False,
            positions="relative",
            relative_buckets=config.relative_attention_num_buckets,
            relative_max_distance=config.relative_attention_max_distance,
            has_relative_bias_per_layer=is_per_layer,
            is_embedding_scaled=False,
            is_output_scaled=is_scaled,
            is_projection_tied=torch.equal(theirs.lm_head.weight, theirs.shared.weight),
            padding="predicted",
            decoder_start_id=0,
        )
    ).eval()
    new: dict[str, Tensor] = {"decoder.projection.weight": theirs.lm_head.weight} if ours.decoder.projection is not None else {}
    for side in ("encoder", "decoder"):
        new[f"{side}.embedding.tokens.weight"] = theirs.shared.weight
        new[f"{side}.norm.weight"] = weights[f"{side}.final_layer_norm.weight"]
        for i in range(len(getattr(theirs, side).block)):
            there, here = f"{side}.block.{i}.layer", f"{side}.layers.{i}"
            bias = f"{there}.0.SelfAttention.relative_attention_bias.weight"
            if bias in weights:
                new[f"{side}.relative_bias.{i}.weight" if is_per_layer else f"{side}.relative_bias.weight"] = weights[bias]
            attentions = (("SelfAttention", "self"), ("EncDecAttention", "cross"))[: 1 + (side == "decoder")]
            for j, (attention, name) in enumerate(attentions):
                blocks = [weights[f"{there}.{j}.{attention}.{x}.weight"] for x in "qkv"]
                new[f"{here}.{name}_attention.input.weight"] = torch.cat(blocks)
                new[f"{here}.{name}_attention.output.weight"] = weights[f"{there}.{j}.{attention}.o.weight"]
                new[f"{here}.{name}_residual.norm.weight"] = weights[f"{there}.{j}.layer_norm.weight"]
            last = len(attentions)
            new[f"{here}.feed_residual.norm.weight"] = weights[f"{there}.{last}.layer_norm.weight"]
            products = {"wi_0": "gate", "wi_1": "inner", "wo": "outer"} if config.is_gated_act else {"wi": "inner", "wo": "outer"}
            for part, name in products.items():
                new[f"{here}.feed_forward.{name}.weight"] = weights[f"{there}.{last}.DenseReluDense.{part}.weight"]
    return _with_weights(ours, new)


def _renamed(weights: dict[str, Tensor], there: str, here: str) -> dict[str, Tensor]:
    """Return a weight and a bias under another name, as many as there are."""
    return {f"{here}.{part}": weights[f"{there}.{part}"] for part in ("weight", "bias") if f"{there}.{part}" in weights}


def _with_weights(ours: Transformer, new: dict[str, Tensor]) -> Transformer:
    """Fill every parameter; none may be left and none may be over."""
    ours.load_state_dict({name: tensor.detach().clone() for name, tensor in new.items()}, strict=True)
    return ours


def ragged(lengths: Iterable[int], seed: int = 1) -> list[list[int]]:
    """Draw sources of some lengths, end-of-sequence included."""
    generator = torch.Generator().manual_seed(seed)
    return [[*torch.randint(3, VOCAB_SIZE, (length - 1,), generator=generator).tolist(), 1] for length in lengths]
