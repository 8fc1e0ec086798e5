"""Conversion of checkpoints to CTranslate2 through its public model specification."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dragoman.model.networks.attention import MultiHeadAttention
from dragoman.model.networks.transformer import DecoderLayer, EncoderLayer, Transformer

BANNED = -1e9
"""Bias of padding's logit: minus infinity would make a score that is not a number."""


def write_model(ours: Transformer, folder: Path, quantization: str = "float32") -> None:
    """Write a CTranslate2 model whose tokens are named by their ids and which never generates padding.

    Args:
        ours: Model in single precision.
        folder: Created if absent; its files are replaced.
        quantization: CTranslate2's name of the weights' format, `float32` or `int8`.

    Raises:
        ImportError: If CTranslate2 is not installed.
    """
    specs: Any = import_module("ctranslate2.specs")
    common: Any = import_module("ctranslate2.specs.common_spec")
    config = ours.config
    spec = specs.TransformerSpec.from_config(
        (config.num_encoder_layers, config.num_decoder_layers),
        config.num_heads,
        pre_norm=config.norm == "pre",
        activation={"relu": common.Activation.RELU, "gelu": common.Activation.GELU, "silu": common.Activation.SWISH}[
            config.activation
        ],
        layernorm_embedding=config.has_embedding_norm,
    )
    for theirs, side, source in ((spec.encoder, ours.encoder, True), (spec.decoder, ours.decoder, False)):
        embeddings = theirs.embeddings[0] if source else theirs.embeddings
        embeddings.weight = _array(side.embedding.tokens.weight)
        theirs.scale_embeddings = config.is_embedding_scaled
        theirs.position_encodings.encodings = _array(side.embedding.positions[config.position_offset :])
        if config.has_embedding_norm:
            _norm(theirs.layernorm_embedding, side.embedding.norm)
        if config.norm == "pre":
            _norm(theirs.layer_norm, side.norm)
        for target, layer in zip(theirs.layer, side.layers, strict=True):
            assert isinstance(layer, EncoderLayer | DecoderLayer)
            _layer(target, layer)
    spec.decoder.projection.weight = _array(ours.decoder.output_weight)
    spec.decoder.projection.bias = _array(_output_bias(ours))
    spec.register_source_vocabulary([str(i) for i in range(config.source_vocab_size)])
    spec.register_target_vocabulary([str(i) for i in range(config.target_vocab_size)])
    spec.config.bos_token = spec.config.decoder_start_token = str(config.decoder_start_id)
    spec.config.eos_token, spec.config.unk_token = str(config.eos_id), str(config.pad_id)
    spec.config.add_source_eos = True
    spec.config.layer_norm_epsilon = config.norm_epsilon
    spec.validate()
    spec.optimize(quantization)
    folder.mkdir(parents=True, exist_ok=True)
    spec.save(str(folder))


def _output_bias(ours: Transformer) -> Tensor:
    decoder = ours.decoder
    bias = torch.zeros_like(decoder.padding_logits) if decoder.output_bias is None else decoder.output_bias.detach().clone()
    bias[ours.config.pad_id] = BANNED
    return bias


def _layer(theirs: Any, ours: EncoderLayer | DecoderLayer) -> None:
    attention = ours.self_attention
    _linear(theirs.self_attention.linear[0], attention.input.weight, attention.input.bias)
    _linear(theirs.self_attention.linear[1], attention.output.weight, attention.output.bias)
    _norm(theirs.self_attention.layer_norm, ours.self_residual.norm)
    if isinstance(ours, DecoderLayer):
        _cross_attention(theirs.attention, ours.cross_attention)
        _norm(theirs.attention.layer_norm, ours.cross_residual.norm)
    _linear(theirs.ffn.linear_0, ours.feed_forward.inner.weight, ours.feed_forward.inner.bias)
    _linear(theirs.ffn.linear_1, ours.feed_forward.outer.weight, ours.feed_forward.outer.bias)
    _norm(theirs.ffn.layer_norm, ours.feed_residual.norm)


def _cross_attention(theirs: Any, ours: MultiHeadAttention) -> None:
    width = ours.input.weight.shape[1]
    weight, bias = ours.input.weight, ours.input.bias
    _linear(theirs.linear[0], weight[:width], bias[:width])
    _linear(theirs.linear[1], weight[width:], bias[width:])
    _linear(theirs.linear[2], ours.output.weight, ours.output.bias)


def _linear(theirs: Any, weight: Tensor, bias: Tensor) -> None:
    theirs.weight, theirs.bias = _array(weight), _array(bias)


def _norm(theirs: Any, ours: Any) -> None:
    theirs.gamma, theirs.beta = _array(ours.weight), _array(ours.bias)


def _array(tensor: Any) -> Any:
    return tensor.detach().numpy().copy()  # CTranslate2 quantises in place
