"""A larger model to go on training from: deeper and wider, after the idea of Net2Net (Chen et al., 2016), or with more tokens."""

from dataclasses import replace

import torch
from torch import nn

from dragoman.model.checkpoint import Checkpoint
from dragoman.model.config import ModelConfig, ModelConfigError
from dragoman.model.networks.architectures import network
from dragoman.model.networks.network import Network
from dragoman.model.networks.transformer import DecoderLayer, SelfAttentionLayer
from dragoman.model.text.byte_level import ByteLevelTokenizer
from dragoman.model.text.tokenizers import Tokenizers


@torch.no_grad()
def grown(small: Network, config: ModelConfig) -> Network:
    """Return a model of `config`, in training mode, with the function of `small`.

    Feed-forward layers may get more inner units, whose weights towards the output are zero, and the encoder and the decoder more
    layers after their own, which add zero to the residual stream. What is new and not zero is drawn from PyTorch's global
    generator, as a new model's weights are.

    Raises:
        ModelConfigError: As `ModelConfig.refuse_to_shrink`.
    """
    config.refuse_to_shrink(small.config)
    large, weights = network(config), small.state_dict()
    for name, tensor in large.state_dict().items():
        if name not in weights:
            continue
        known = weights[name]
        if name.endswith("feed_forward.outer.weight"):
            tensor[:, known.shape[1] :] = 0
        tensor[tuple(map(slice, known.shape))] = known
    known_parts = dict(small.named_modules())
    for name, part in large.named_modules():
        if isinstance(part, SelfAttentionLayer | DecoderLayer) and name not in known_parts:
            silence(part)
    return large


@torch.no_grad()
def with_more_tokens(small: Checkpoint, tokenizer: ByteLevelTokenizer) -> Checkpoint:
    """Return a checkpoint with a larger vocabulary, to be trained further: a new token has the mean of its pieces' embeddings.

    It computes the same of the same ids; but from a text the larger vocabulary makes other ids.

    Args:
        small: Source and target have the tokens of its vocabulary.
        tokenizer: The larger vocabulary, see `ByteLevelTokenizer.extended`.

    Raises:
        ModelConfigError: If the model has more tokens than its vocabulary: the new ones would take their ids.
    """
    config = small.model.config
    vocabulary = small.tokenizers.byte_level()
    if {config.source_vocab_size, config.target_vocab_size} != {vocabulary.vocab_size}:
        raise ModelConfigError(f"{small.name}: the model has more tokens than the {vocabulary.vocab_size} of its vocabulary")
    pieces = vocabulary.pieces_of(tokenizer)
    large = network(replace(config, source_vocab_size=tokenizer.vocab_size, target_vocab_size=tokenizer.vocab_size))
    weights = small.model.state_dict()
    for name, tensor in large.state_dict().items():
        if name not in weights:
            continue
        known = weights[name]
        tensor[: len(known)] = known
        if len(known) < len(tensor):
            tensor[len(known) :] = torch.stack([known[ids].mean(0) for ids in pieces])
    return replace(small, model=large.eval(), tokenizers=Tokenizers.shared(tokenizer))


@torch.no_grad()
def silence(layer: SelfAttentionLayer | DecoderLayer) -> None:
    """Let a pre-norm layer add nothing to the residual stream."""
    outputs = [layer.self_attention.output, layer.feed_forward.outer]
    if isinstance(layer, DecoderLayer):
        outputs.append(layer.cross_attention.output)
    for output in outputs:
        nn.init.zeros_(output.weight)
        if output.bias is not None:
            nn.init.zeros_(output.bias)
