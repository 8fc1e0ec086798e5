"""Conversion of checkpoints to models of Transformers: Marian (post-norm) or Pegasus (pre-norm)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, MarianConfig, MarianMTModel, PegasusConfig, PegasusForConditionalGeneration

from dragoman.model.decode import pad
from dragoman.model.networks.transformer import DecoderLayer, EncoderLayer, Transformer


def to_transformers(ours: Transformer) -> Any:
    """Return the equal model of Transformers in double precision, with the same weights, position table and ban on padding.

    Raises:
        ValueError: If neither can hold the weights.
    """
    config = ours.config
    if not (config.is_embedding_shared and config.is_projection_tied):
        raise ValueError("Marian and Pegasus have one table for both embeddings and the projection")
    if config.has_embedding_norm or config.max_source_positions != config.max_target_positions or config.norm_epsilon != 1e-5:
        raise ValueError("Marian and Pegasus have no embedding norm, one number of positions, and a norm_epsilon of 1e-5")
    same = ("d_model", "encoder_ffn_dim", "decoder_ffn_dim")
    heads = dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), config.num_heads)
    settings: dict[str, Any] = {name: getattr(config, name) for name in same} | heads
    settings |= {"vocab_size": config.source_vocab_size, "max_position_embeddings": config.max_source_positions}
    settings |= {"encoder_layers": config.num_encoder_layers, "decoder_layers": config.num_decoder_layers}
    settings |= {"activation_function": config.activation, "scale_embedding": config.is_embedding_scaled}
    settings |= {"pad_token_id": config.pad_id, "eos_token_id": config.eos_id, "decoder_start_token_id": config.decoder_start_id}
    settings["forced_eos_token_id"] = None
    theirs: Any
    if config.norm == "post":
        theirs = MarianMTModel(MarianConfig(**settings))
    else:
        theirs = PegasusForConditionalGeneration(PegasusConfig(**settings))
    theirs.load_state_dict(_weights(ours))
    return theirs.double().eval()


@torch.inference_mode()
def best_answers(theirs: Any, sources: Sequence[Sequence[int]], num_beams: int, max_new_tokens: int) -> list[list[int]]:
    """Decode sources, given as ids without special tokens, as one batch with a length penalty of 1 and early stopping.

    Return the best answers alone, so that scores need not be kept.
    """
    config = theirs.config
    rows = [[*ids, config.eos_token_id] for ids in sources]
    ids = pad(rows, config.pad_token_id)
    mask = torch.tensor([[1] * len(row) + [0] * (ids.shape[1] - len(row)) for row in rows])
    search = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        num_beams=num_beams,
        early_stopping=True if num_beams > 1 else None,
        max_new_tokens=max_new_tokens,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
    )
    found = theirs.generate(input_ids=ids, attention_mask=mask, generation_config=search)
    special = (config.pad_token_id, config.eos_token_id)
    return [[i for i in row[1:] if i not in special] for row in found.tolist()]


def _weights(ours: Transformer) -> dict[str, Tensor]:
    table = ours.decoder.embedding.tokens.weight
    bias = ours.decoder.padding_logits
    assert isinstance(bias, Tensor)
    if ours.decoder.output_bias is not None:
        bias = bias + ours.decoder.output_bias
    weights = {"model.shared.weight": table, "lm_head.weight": table, "final_logits_bias": bias[None]}
    for name, side in (("encoder", ours.encoder), ("decoder", ours.decoder)):
        positions = side.embedding.positions[ours.config.position_offset :]
        assert isinstance(positions, Tensor)
        weights |= {f"model.{name}.embed_tokens.weight": table, f"model.{name}.embed_positions.weight": positions}
        if ours.config.norm == "pre":
            weights |= _parameters(side.norm, f"model.{name}.layer_norm")
        for i, layer in enumerate(side.layers):
            assert isinstance(layer, EncoderLayer | DecoderLayer)
            weights |= _layer(layer, f"model.{name}.layers.{i}")
    return weights


def _layer(ours: EncoderLayer | DecoderLayer, theirs: str) -> dict[str, Tensor]:
    weights = _attention(ours.self_attention, f"{theirs}.self_attn")
    modules: dict[str, nn.Module] = {
        "self_attn_layer_norm": ours.self_residual.norm,
        "final_layer_norm": ours.feed_residual.norm,
        "fc1": ours.feed_forward.inner,
        "fc2": ours.feed_forward.outer,
    }
    if isinstance(ours, DecoderLayer):
        weights |= _attention(ours.cross_attention, f"{theirs}.encoder_attn")
        modules["encoder_attn_layer_norm"] = ours.cross_residual.norm
    for name, module in modules.items():
        weights |= _parameters(module, f"{theirs}.{name}")
    return weights


def _attention(ours: Any, theirs: str) -> dict[str, Tensor]:
    weights = _parameters(ours.output, f"{theirs}.out_proj")
    for name, weight, bias in zip("qkv", ours.input.weight.chunk(3), ours.input.bias.chunk(3), strict=True):
        weights |= {f"{theirs}.{name}_proj.weight": weight, f"{theirs}.{name}_proj.bias": bias}
    return weights


def _parameters(module: nn.Module, name: str) -> dict[str, Tensor]:
    return {f"{name}.{key}": parameter for key, parameter in module.named_parameters()}
