"""Our weights in Transformers' own models, as an implementation to compare with: Marian (post-norm) or Pegasus (pre-norm)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig, MarianConfig, MarianMTModel, PegasusConfig, PegasusForConditionalGeneration

from dragoman.model.ids import Ids
from dragoman.model.networks.transformer import DecoderLayer, EncoderLayer, Transformer
from dragoman.model.padding import pad

Beam = list[tuple[list[int], float]]
"""Token ids, end-of-sequence not included, and score of each answer to one source, best first."""


def to_transformers(ours: Transformer) -> Any:
    """Build the model of Transformers that computes the same, in double precision: our weights, position table and ban on padding.

    Raises:
        ValueError: If none of the two can hold the weights.
    """
    config = ours.config
    if not (config.is_embedding_shared and config.is_projection_tied):
        raise ValueError("Marian and Pegasus have one table for both embeddings and the projection")
    if config.has_embedding_norm or config.max_source_positions != config.max_target_positions or config.norm_epsilon != 1e-5:
        raise ValueError("Marian and Pegasus have no embedding norm, one number of positions, and a norm_epsilon of 1e-5")
    settings: dict[str, Any] = {
        "vocab_size": config.source_vocab_size,
        "max_position_embeddings": config.max_source_positions,
        "d_model": config.d_model,
        "encoder_layers": config.num_encoder_layers,
        "decoder_layers": config.num_decoder_layers,
        "encoder_attention_heads": config.num_heads,
        "decoder_attention_heads": config.num_heads,
        "encoder_ffn_dim": config.encoder_ffn_dim,
        "decoder_ffn_dim": config.decoder_ffn_dim,
        "activation_function": config.activation,
        "scale_embedding": config.is_embedding_scaled,
        "pad_token_id": config.pad_id,
        "eos_token_id": config.eos_id,
        "decoder_start_token_id": config.decoder_start_id,
        "forced_eos_token_id": None,
    }
    theirs: Any
    if config.norm == "post":
        theirs = MarianMTModel(MarianConfig(**settings))
    else:
        theirs = PegasusForConditionalGeneration(PegasusConfig(**settings))
    theirs.load_state_dict(_weights(ours))
    return theirs.double().eval()


@torch.inference_mode()
def generate(theirs: Any, sources: Sequence[Ids], num_beams: int, length_penalty: float, max_new_tokens: int) -> list[Beam]:
    """Decode sources, given as ids without special tokens, as one batch; return every answer of every source."""
    config = theirs.config
    found = _generate(
        theirs,
        sources,
        max_new_tokens=max_new_tokens,
        num_beams=num_beams,
        num_return_sequences=num_beams,
        early_stopping=False if num_beams > 1 else None,
        length_penalty=length_penalty if num_beams > 1 else None,
        return_dict_in_generate=True,
        output_scores=True,
    )
    if num_beams == 1:
        steps = theirs.compute_transition_scores(found.sequences, found.scores, normalize_logits=True)
        is_real = found.sequences[:, 1:] != config.pad_token_id
        scores = (steps.masked_fill(~is_real, 0.0).sum(-1) / is_real.sum(-1)).tolist()
    else:
        scores = found.sequences_scores.tolist()
    beams = list(zip(_answers(found.sequences, config), scores, strict=True))
    return [beams[start : start + num_beams] for start in range(0, len(beams), num_beams)]


@torch.inference_mode()
def best_answers(theirs: Any, sources: Sequence[Ids], num_beams: int, max_new_tokens: int) -> list[list[int]]:
    """Decode with a length penalty of 1 and early stopping; return the best answers alone, so that scores need not be kept."""
    early_stopping = True if num_beams > 1 else None
    found = _generate(theirs, sources, max_new_tokens=max_new_tokens, num_beams=num_beams, early_stopping=early_stopping)
    return _answers(found, theirs.config)


def _generate(theirs: Any, sources: Sequence[Ids], **settings: Any) -> Any:
    """Run their search on one batch."""
    config = theirs.config
    rows = [[*ids, config.eos_token_id] for ids in sources]
    ids = pad(rows, config.pad_token_id)
    mask = torch.tensor([[1] * len(row) + [0] * (ids.shape[1] - len(row)) for row in rows])
    search = GenerationConfig(  # type: ignore[no-untyped-call]
        do_sample=False,
        pad_token_id=config.pad_token_id,
        eos_token_id=config.eos_token_id,
        decoder_start_token_id=config.decoder_start_token_id,
        **settings,
    )
    return theirs.generate(input_ids=ids, attention_mask=mask, generation_config=search)


def _answers(sequences: Tensor, config: Any) -> list[list[int]]:
    """Return the tokens of generated rows, special ones left out."""
    special = (config.pad_token_id, config.eos_token_id)
    return [[i for i in row[1:] if i not in special] for row in sequences.tolist()]


def _weights(ours: Transformer) -> dict[str, Tensor]:
    """Return their state dictionary."""
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
