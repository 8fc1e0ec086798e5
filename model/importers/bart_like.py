"""The architecture of BART's relatives: biases and layer norms everywhere, absolute positions. A family says what it has of it."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from dragoman.model.config import ModelConfig, Norm
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.family import activation, model_config, special_ids
from dragoman.model.importers.foreign import Foreign, Limits
from dragoman.model.importers.layout import Layout, Source
from dragoman.model.importers.positions import TableMaker
from dragoman.model.importers.report import Report
from dragoman.model.importers.settings import Settings
from dragoman.model.importers.tables import TableNames, Tables, choose_tables
from dragoman.model.importers.weights import Weights

# Of a layer: ours, theirs.
_SELF: Final = (("self_attention", "self_attn"), ("self_residual.norm", "self_attn_layer_norm"))
_CROSS: Final = (("cross_attention", "encoder_attn"), ("cross_residual.norm", "encoder_attn_layer_norm"))
_FEED_FORWARD: Final = (
    ("feed_forward.inner", "fc1"),
    ("feed_forward.outer", "fc2"),
    ("feed_residual.norm", "final_layer_norm"),
)
_PARTS: Final = ("weight", "bias")
# What Transformers takes where `config.json` is silent, as far as the families agree.
DEFAULTS: Final = {
    "max_position_embeddings": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "activation_function": "gelu",
    "d_model": 1024,
    "scale_embedding": False,
    "tie_word_embeddings": True,
}
_BIAS: Final = "final_logits_bias"
_MAX_POSITIONS: Final = 2**17  # a table that no file has is made, however long it is said to be


@dataclass(frozen=True, slots=True, kw_only=True)
class BartLike:
    """What tells the families apart.

    Attributes:
        norm: Whether norms come before or after what they are for.
        has_embedding_norm: A norm follows the embeddings.
        has_output_bias: The logits may have a bias each.
        position_offset: What is added to a position to find its row; None for the padding token's id and one.
        make_positions: Makes the position tables that the files leave out; None where they are trained.
        has_longer_tables: Tables are as long as they need to be, whatever `max_position_embeddings` says.
        may_separate_sides: `share_encoder_decoder_embeddings` may say that source and target have vocabularies of their own.
    """

    norm: Norm
    has_embedding_norm: bool = False
    has_output_bias: bool = True
    position_offset: int | None = 0
    make_positions: TableMaker | None = None
    has_longer_tables: bool = False
    may_separate_sides: bool = False

    def lay_out(self, foreign: Foreign, limits: Limits, report: Report) -> Layout:
        """See `Architecture`."""
        config, weights = foreign.config, foreign.weights
        prefix = "model." if any(f"model.{side}.layers.0.fc1.weight" in weights for side in ("encoder", "decoder")) else ""
        are_shared = not self.may_separate_sides or config.get("share_encoder_decoder_embeddings", bool)
        ours = self._config(foreign, limits, are_shared, report)
        if ours.num_encoder_layers + ours.num_decoder_layers > len(weights):
            raise ForeignError(f"{config.path}: more layers than {weights.path} has tensors")
        for name in _relics(prefix):
            if name in weights:
                weights.pass_over(name)
        names = TableNames(
            f"{prefix}shared.weight",
            f"{prefix}encoder.embed_tokens.weight",
            f"{prefix}decoder.embed_tokens.weight",
            "lm_head.weight",
        )
        tables = choose_tables(names, weights, report, is_tied=config.get("tie_word_embeddings", bool), are_sides_shared=are_shared)
        has_bias = self.has_output_bias and _BIAS in weights
        if has_bias and not weights.read(_BIAS).any():
            has_bias = False
            report.translated.append(f"{_BIAS} is zero everywhere: left out")
        ours = model_config(
            config,
            **ours.to_dict()
            | {
                "is_embedding_shared": tables.encoder == tables.decoder,
                "is_projection_tied": tables.head == tables.decoder,
                "has_output_bias": has_bias,
            },
        )
        sources = dict(self._sources(ours, prefix, tables, config, weights))
        return Layout(ours, sources)

    def _config(self, foreign: Foreign, limits: Limits, are_shared: bool, report: Report) -> ModelConfig:
        """Return our configuration, but for what the tensors say."""
        config = foreign.config
        heads = {side: config.size(f"{side}_attention_heads") for side in ("encoder", "decoder")}
        if heads["encoder"] != heads["decoder"]:
            raise ForeignError(
                f"{config.path}: encoder_attention_heads {heads['encoder']} and decoder_attention_heads {heads['decoder']} differ; "
                "here all layers have as many"
            )
        ids = special_ids(foreign)
        vocab_size = config.size("vocab_size")
        config.take("decoder_vocab_size")  # says nothing where sides share a vocabulary
        target_size = vocab_size if are_shared else config.size("decoder_vocab_size")
        lengths = self._lengths(config, limits, report)
        return model_config(
            config,
            source_vocab_size=vocab_size,
            target_vocab_size=target_size,
            d_model=config.size("d_model"),
            num_heads=heads["encoder"],
            num_encoder_layers=config.size("encoder_layers"),
            num_decoder_layers=config.size("decoder_layers"),
            encoder_ffn_dim=config.size("encoder_ffn_dim"),
            decoder_ffn_dim=config.size("decoder_ffn_dim"),
            max_source_positions=lengths[0],
            max_target_positions=lengths[1],
            norm=self.norm,
            activation=activation(config, "activation_function", config.get("activation_function", str)),
            positions="learned",
            position_offset=ids["pad_id"] + 1 if self.position_offset is None else self.position_offset,
            is_embedding_shared=are_shared,
            is_embedding_scaled=config.get("scale_embedding", bool),
            has_embedding_norm=self.has_embedding_norm,
            padding="predicted",
            **ids,
        )

    def _lengths(self, config: Settings, limits: Limits, report: Report) -> tuple[int, int]:
        """Return the longest source and target."""
        said = config.size("max_position_embeddings", _MAX_POSITIONS)
        wanted = (limits.max_source_tokens or said, limits.max_target_tokens or said)
        if max(wanted) > said and not self.has_longer_tables:
            raise ForeignError(f"{config.path}: its position tables have {said} rows (max_position_embeddings), not {max(wanted)}")
        report.translated.append(
            f"at most {wanted[0]} source and {wanted[1]} target tokens, of {said} positions that config.json has"
        )
        return wanted

    def _sources(
        self, ours: ModelConfig, prefix: str, tables: Tables, config: Settings, weights: Weights
    ) -> Iterator[tuple[str, Source]]:
        """Yield where each parameter comes from."""
        sides = {
            "encoder": (ours.num_encoder_layers, ours.max_source_positions, tables.encoder),
            "decoder": (ours.num_decoder_layers, ours.max_target_positions, tables.decoder),
        }
        for side, (num_layers, num_positions, table) in sides.items():
            outer = f"{prefix}{side}."
            yield f"{side}.embedding.tokens.weight", Source((table,))
            yield f"{side}.embedding.positions", self._positions(f"{outer}embed_positions.weight", num_positions, ours, weights)
            norms = [("embedding.norm", "layernorm_embedding")] * self.has_embedding_norm + [("norm", "layer_norm")] * (
                self.norm == "pre"
            )
            for our, their in norms:
                yield from ((f"{side}.{our}.{part}", Source((f"{outer}{their}.{part}",))) for part in _PARTS)
            for index in range(num_layers):
                yield from _layer(f"{side}.layers.{index}.", f"{outer}layers.{index}.", side == "decoder")
        if not ours.is_projection_tied:
            yield "decoder.projection.weight", Source((tables.head,))
        if ours.has_output_bias:
            yield "decoder.output_bias", Source((_BIAS,))

    def _positions(self, name: str, num_positions: int, ours: ModelConfig, weights: Weights) -> Source:
        """Return where a position table comes from."""
        rows = num_positions + ours.position_offset
        if self.make_positions is None or name in weights:
            return Source((name,), rows=rows)
        return Source(make=partial(self.make_positions, rows, ours.d_model))


def _layer(ours: str, theirs: str, is_decoder: bool) -> Iterator[tuple[str, Source]]:
    """Yield where the parameters of one layer come from."""
    for (attention, their_attention), (norm, their_norm) in (_SELF, _CROSS)[: 1 + is_decoder]:
        for part in _PARTS:
            inputs = tuple(f"{theirs}{their_attention}.{which}_proj.{part}" for which in "qkv")
            yield f"{ours}{attention}.input.{part}", Source(inputs)
            yield f"{ours}{attention}.output.{part}", Source((f"{theirs}{their_attention}.out_proj.{part}",))
            yield f"{ours}{norm}.{part}", Source((f"{theirs}{their_norm}.{part}",))
    for our, their in _FEED_FORWARD:
        yield from ((f"{ours}{our}.{part}", Source((f"{theirs}{their}.{part}",))) for part in _PARTS)


def _relics(prefix: str) -> Iterator[str]:
    """Yield names of tensors that old files have and nobody reads: versions, and position tables that are made anew."""
    for side in ("encoder", "decoder"):
        for name in ("version", "embed_positions.weights", "embed_positions._float_tensor"):
            yield f"{prefix}{side}.{name}"
