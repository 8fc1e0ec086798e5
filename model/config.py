"""The shape of a model: its architecture, every dimension and variant switch, and nothing about how it is trained or served."""

import math
from dataclasses import asdict, dataclass
from types import NoneType
from typing import Any, Literal, Self, get_args

from dragoman.model.errors import InputError

Architecture = Literal["transformer", "rnn", "decoder"]
Attention = Literal["additive", "dot", "scaled_dot", "none"]
Norm = Literal["pre", "post"]
NormKind = Literal["layer", "rms"]
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
Positions = Literal["sinusoidal", "learned", "relative", "rotary"]
Padding = Literal["excluded", "masked", "predicted"]
ROTARY_MULTIPLE = 16
"""Heads whose queries and keys are turned are a multiple of it wide."""
GROWING = ("num_encoder_layers", "num_decoder_layers", "encoder_ffn_dim", "decoder_ffn_dim")


class ModelConfigError(InputError):
    """A model configuration that cannot describe a model; the message names the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Dimensions and switches of one model. A switch that its architecture does not have is left as it is, see `UNUSED`."""

    source_vocab_size: int  # rows of the source embedding; of a language model, as many as there are target tokens
    target_vocab_size: int  # rows of the target embedding and of the output projection (V)
    # `transformer` has an encoder and a decoder (Vaswani et al., 2017, and its descendants); `rnn` has both, of gated recurrent
    # units, with attention between them or without (Bahdanau et al., 2015; Cho et al., 2014); `decoder` is a language model, which
    # goes on with a text (Radford et al., 2018).
    architecture: Architecture = "transformer"
    # Of an `rnn`, how a source token's score is made of the decoder's state and the token: by a small network (`additive`), by
    # their product (`dot`) or by that over √d_model (`scaled_dot`). With `none` there is no attention: all that the decoder knows
    # of the source is the encoder's last state.
    attention: Attention = "additive"
    # Width of every residual stream; of an `rnn` that of embeddings, of decoder states and of both encoder directions together.
    d_model: int = 512
    num_heads: int = 8  # attention heads (H) of every layer
    num_encoder_layers: int = 6  # encoder depth
    num_decoder_layers: int = 6  # decoder depth (L); of a language model, all there is
    encoder_ffn_dim: int = 2048  # inner width of the encoder's feed-forward layers
    decoder_ffn_dim: int = 2048  # inner width of the decoder's feed-forward layers
    max_source_positions: int = 512  # longest source in tokens, end-of-sequence included; of a language model, the longest prompt
    # Longest target in tokens, start token included; of a language model, prompt and answer together.
    max_target_positions: int = 512
    norm: Norm = "post"  # `post` normalises after the residual sum (the paper), `pre` before the sub-layer (and once at the end)
    # `layer` subtracts the mean, divides by the standard deviation and has a weight and a bias; `rms` divides by the root mean
    # square and has a weight (T5).
    norm_kind: NormKind = "layer"
    has_biases: bool = True  # whether the linear maps of attention and feed-forward layers have biases
    # Non-linearity of the feed-forward layers. `gelu` is the exact, erf form, `gelu_tanh` its approximation.
    activation: Activation = "relu"
    is_ffn_gated: bool = False  # feed-forward layers multiply what they activate by a second map of the same input (Shazeer, 2020)
    # Width of all heads side by side (H · Dh), or of additive attention's network; None where it is d_model.
    attention_dim: int | None = None
    is_attention_scaled: bool = True  # scores are divided by √Dh
    # `sinusoidal` is the paper's fixed table, `learned` a trained one; `relative` adds to the scores of self-attention what a head
    # has learnt about the distance from a query to a key (T5); `rotary` turns queries and keys by angles that grow with the
    # position (Su et al., 2021), in a language model only.
    positions: Positions = "sinusoidal"
    position_offset: int = 0  # added to every position before the table is read (BART and M2M-100 use 2)
    # Base of rotary positions: pair i of a head's turns by position / base^(2i/Dh).
    rotary_base: float = 10000.0
    # Distances that relative positions tell apart: those of the encoder are halved between the two directions.
    relative_buckets: int = 32
    relative_max_distance: int = 128  # from this distance on, all are in one bucket
    # Every layer has its own table of relative positions (UMT5); else a side's layers share one.
    has_relative_bias_per_layer: bool = False
    is_embedding_shared: bool = True  # source and target read one embedding table; the vocabularies must have equal sizes
    is_projection_tied: bool = True  # the output projection is the target embedding, transposed
    is_embedding_scaled: bool = True  # embeddings are multiplied by √d_model
    has_embedding_norm: bool = False  # a layer norm follows the sum of token and position embeddings
    has_output_bias: bool = False  # the logits get a bias per token (Marian's `final_logits_bias`)
    is_output_scaled: bool = False  # hidden states are divided by √d_model before the output projection (T5 where that is tied)
    # Treatment of padding when the next token is predicted. `excluded`: -inf before the softmax; `masked`: the softmax is over
    # all tokens, then padding is -inf, so that probabilities sum to less than 1 (what Transformers does with `bad_words_ids`);
    # `predicted`: a token like any other.
    padding: Padding = "excluded"
    dropout: float = 0.1  # probability on embeddings and on every sub-layer's output, in training only
    attention_dropout: float = 0.0  # probability on attention weights, in training only
    activation_dropout: float = 0.0  # probability inside the feed-forward layers, in training only
    norm_epsilon: float = 1e-5  # added to the variance, or mean square, in every norm
    pad_id: int = 0  # token that fills short rows; never attended to, and predicted as `padding` says
    eos_id: int = 1  # token that ends a sequence, on both sides
    decoder_start_id: int = 2  # token the decoder reads first

    def __post_init__(self) -> None:
        """Refuse a configuration that no model can have.

        Raises:
            ModelConfigError: Naming the field and the rule it breaks.
        """
        for name in _POSITIVE:
            if getattr(self, name) < 1:
                raise ModelConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in _DROPOUTS:
            if not 0 <= getattr(self, name) < 1:
                raise ModelConfigError(f"{name} must be in [0, 1), not {getattr(self, name)}")
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ModelConfigError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        for name in ("norm_epsilon", "rotary_base"):
            if not 0 < getattr(self, name) < math.inf:
                raise ModelConfigError(f"{name} must be positive, not {getattr(self, name)}")
        for name in UNUSED[self.architecture]:
            if getattr(self, name) != self.__dataclass_fields__[name].default:
                raise ModelConfigError(f"{name} means nothing to the architecture {self.architecture}: leave it out")
        self._check_attention()
        self._check_positions()
        self._check_tokens()

    def _check_attention(self) -> None:
        """Refuse heads that do not make up the attention's width, and directions of a recurrent encoder that are not alike."""
        if self.architecture == "rnn":
            if self.d_model % 2:
                raise ModelConfigError(f"an rnn reads in two directions, each half of d_model wide, so {self.d_model} must be even")
            if self.attention_dim is not None and (self.attention != "additive" or self.attention_dim < 1):
                raise ModelConfigError(f"attention_dim is the width of additive attention, at least 1, not {self.attention_dim}")
        elif self.attention_dim is None:
            if self.d_model % self.num_heads:
                raise ModelConfigError(f"d_model {self.d_model} is not a multiple of num_heads {self.num_heads}")
        elif self.attention_dim < 1 or self.attention_dim % self.num_heads:
            raise ModelConfigError(f"attention_dim {self.attention_dim} is not a multiple of num_heads {self.num_heads}")

    def _check_positions(self) -> None:
        """Refuse positions that there are no tables for."""
        is_sinusoidal = self.positions == "sinusoidal" and "positions" not in UNUSED[self.architecture]
        if is_sinusoidal and self.d_model % 2:
            raise ModelConfigError(f"sinusoidal positions need an even d_model, not {self.d_model}")
        if self.positions == "relative" and self.architecture == "decoder":
            raise ModelConfigError("relative positions are those of the architecture transformer, not of a decoder")
        if self.positions == "rotary" and self.architecture != "decoder":
            raise ModelConfigError(f"rotary positions are those of the architecture decoder, not of a {self.architecture}")
        if self.positions == "rotary" and self.head_dim % ROTARY_MULTIPLE:
            raise ModelConfigError(
                f"rotary positions need heads of a multiple of {ROTARY_MULTIPLE} wide; num_heads {self.num_heads} makes "
                f"them {self.head_dim}"
            )

        if self.position_offset < 0:
            raise ModelConfigError(f"position_offset must not be negative, not {self.position_offset}")
        if self.positions in ("relative", "rotary") and self.position_offset:
            raise ModelConfigError(
                f"position_offset {self.position_offset} means nothing to {self.positions} positions, which have no table"
            )
        if self.positions != "relative":
            if self.has_relative_bias_per_layer:
                raise ModelConfigError(f"has_relative_bias_per_layer needs relative positions, not {self.positions}")
            return
        if self.relative_buckets < 4 or self.relative_buckets % 2:
            raise ModelConfigError(f"relative_buckets must be even and at least 4, not {self.relative_buckets}")
        if self.relative_max_distance <= self.relative_buckets // 2:
            raise ModelConfigError(
                f"relative_max_distance must be above {self.relative_buckets // 2}, the half of relative_buckets, "
                f"not {self.relative_max_distance}"
            )

    def _check_tokens(self) -> None:
        """Refuse vocabularies and special tokens that contradict each other."""
        if self.architecture == "decoder" and self.source_vocab_size != self.target_vocab_size:
            raise ModelConfigError(
                f"a language model reads what it writes, so source_vocab_size {self.source_vocab_size} must be "
                f"target_vocab_size {self.target_vocab_size}"
            )
        if self.architecture == "decoder" and self.max_source_positions > self.max_target_positions:
            raise ModelConfigError(
                f"a prompt is part of the text: max_source_positions {self.max_source_positions} must not be above "
                f"max_target_positions {self.max_target_positions}"
            )
        if self.is_embedding_shared and self.source_vocab_size != self.target_vocab_size:
            raise ModelConfigError(
                f"is_embedding_shared needs equal vocabularies, not {self.source_vocab_size} and {self.target_vocab_size}"
            )
        for name in ("pad_id", "eos_id", "decoder_start_id"):
            is_targets = name == "decoder_start_id"
            vocab_size = self.target_vocab_size if is_targets else min(self.source_vocab_size, self.target_vocab_size)
            if not 0 <= getattr(self, name) < vocab_size:
                raise ModelConfigError(f"{name} {getattr(self, name)} is outside the vocabulary of {vocab_size}")
        if self.pad_id == self.eos_id and self.padding != "predicted":
            raise ModelConfigError(f"pad_id and eos_id are both {self.eos_id}: padding is never predicted, so nothing would end")

    @property
    def has_source(self) -> bool:
        """Whether there is text in another language, or of another kind, that the model reads before it writes."""
        return self.architecture != "decoder"

    @property
    def head_dim(self) -> int:
        """Width of one attention head (Dh)."""
        return (self.attention_dim or self.d_model) // self.num_heads

    def room_after(self, num_source: int) -> int:
        """Return how many tokens can be decoded after a source of so many, as it is encoded; a prompt takes room itself."""
        return self.max_target_positions - (0 if self.has_source else num_source)

    def differences(self, other: "ModelConfig") -> list[str]:
        """Return the fields, dropouts aside, that differ from another's; where none do, weights mean the same in both."""
        ours, theirs = asdict(self), asdict(other)
        return [name for name in ours if name not in _DROPOUTS and ours[name] != theirs[name]]

    def refuse_to_shrink(self, small: "ModelConfig") -> None:
        """Refuse to be what a model of `small` is grown to.

        Raises:
            ModelConfigError: If the models differ in more than the fields in `GROWING` and dropouts, if one of those is smaller
                than it was, or if a post-norm model is to get more layers: no layer of such a model leaves its input as it is.
        """
        for name in sorted(self.differences(small), key=GROWING.__contains__):
            wanted, has = getattr(self, name), getattr(small, name)
            complaint = f"its {name} is {has}, the configuration's {wanted}"
            if name not in GROWING or self.architecture == "rnn":
                raise ModelConfigError(complaint)
            if wanted < has:
                raise ModelConfigError(f"{complaint}: models only grow")
            if name.endswith("_layers") and self.norm == "post":
                raise ModelConfigError(f"{complaint}: post-norm models get no more layers")

    def to_dict(self) -> dict[str, Any]:
        """Return every field that means something to the architecture, ready for JSON."""
        return {name: value for name, value in asdict(self).items() if name not in UNUSED[self.architecture]}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Self:
        """Build from what `to_dict` gave; fields that are left out take their defaults.

        Raises:
            ModelConfigError: For an unknown or missing field, or one of a wrong type or value.
        """
        unknown = fields.keys() - cls.__dataclass_fields__.keys()
        if unknown:
            raise ModelConfigError(f"unknown model setting: {', '.join(sorted(unknown))}")
        for name, value in fields.items():
            expected = _TYPES.get(cls.__dataclass_fields__[name].type, (str,))
            if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
                raise ModelConfigError(f"{name} must be {_names_of(expected)}, not {value!r}")
        try:
            return cls(**fields)
        except TypeError as error:
            raise ModelConfigError(str(error).removeprefix("ModelConfig.__init__() ")) from error


# Switches that an architecture does not have.
UNUSED: dict[Architecture, tuple[str, ...]] = {
    "transformer": ("attention", "rotary_base"),
    "decoder": (
        "attention",
        "num_encoder_layers",
        "encoder_ffn_dim",
        "is_embedding_shared",
        "relative_buckets",
        "relative_max_distance",
        "has_relative_bias_per_layer",
    ),
    "rnn": (
        "num_heads",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "norm",
        "norm_kind",
        "has_biases",
        "activation",
        "is_ffn_gated",
        "is_attention_scaled",
        "positions",
        "position_offset",
        "rotary_base",
        "relative_buckets",
        "relative_max_distance",
        "has_relative_bias_per_layer",
        "has_embedding_norm",
        "is_output_scaled",
        "attention_dropout",
        "activation_dropout",
        "norm_epsilon",
    ),
}
_POSITIVE = [
    "source_vocab_size",
    "target_vocab_size",
    "d_model",
    "num_heads",
    "num_encoder_layers",
    "num_decoder_layers",
    "encoder_ffn_dim",
    "decoder_ffn_dim",
    "max_source_positions",
    "max_target_positions",
    "relative_buckets",
    "relative_max_distance",
]
_DROPOUTS = ("dropout", "attention_dropout", "activation_dropout")
_CHOICES = {
    "architecture": get_args(Architecture),
    "attention": get_args(Attention),
    "norm": get_args(Norm),
    "norm_kind": get_args(NormKind),
    "activation": get_args(Activation),
    "positions": get_args(Positions),
    "padding": get_args(Padding),
}
_TYPES: dict[Any, tuple[type, ...]] = {int: (int,), float: (int, float), bool: (bool,), int | None: (int, NoneType)}


def _names_of(types: tuple[type, ...]) -> str:
    """Name types as JSON's readers know them."""
    return " or ".join("null" if kind is NoneType else kind.__name__ for kind in types)
