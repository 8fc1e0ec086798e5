"""T5's families, by `model_type`: t5 (v1.0, v1.1, Flan, ByT5, MADLAD-400), mt5, umt5. No biases, RMS norms, relative positions."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from dragoman.model.config import ModelConfig
from dragoman.model.importers.errors import ForeignError
from dragoman.model.importers.family import Family, activation, model_config, special_ids
from dragoman.model.importers.foreign import Foreign, Limits
from dragoman.model.importers.layout import Layout, Source
from dragoman.model.importers.report import Report
from dragoman.model.importers.settings import Settings
from dragoman.model.importers.tables import TableNames, Tables, choose_tables
from dragoman.model.importers.tokenisers import TokenizerFiles, from_byte_pairs, from_t5

MAX_TOKENS: Final = 512  # where a folder says nothing: what these models were trained with
MAX_BYTES: Final = 1024  # of ByT5, a token of which is a byte
_SANE_LENGTH: Final = 2**20  # `model_max_length` is 10^30 where nobody knows it
_MAX_DISTANCE: Final = 2**16
_NAMES: Final = TableNames("shared.weight", "encoder.embed_tokens.weight", "decoder.embed_tokens.weight", "lm_head.weight")
_BIAS: Final = "SelfAttention.relative_attention_bias.weight"
# Old files have it, and no version of the network ever read it.
_RELIC: Final = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Like:
    """What tells the families apart.

    Attributes:
        is_output_scaled: Whether hidden states are divided by √d_model before the projection; None where the configuration says.
        has_bias_per_layer: Every layer has a table of relative positions of its own.
    """

    is_output_scaled: bool | None
    has_bias_per_layer: bool = False

    def lay_out(self, foreign: Foreign, limits: Limits, report: Report) -> Layout:
        """See `Architecture`."""
        config, weights = foreign.config, foreign.weights
        is_tied = config.find("tie_word_embeddings", bool) is not False
        ours = self._config(foreign, limits, report)
        if ours.num_encoder_layers + ours.num_decoder_layers > len(weights):
            raise ForeignError(f"{config.path}: more layers than {weights.path} has tensors")
        if _RELIC in weights:
            weights.pass_over(_RELIC)
        tables = choose_tables(_NAMES, weights, report, is_tied=is_tied, is_head_required=False)
        fields = {"is_embedding_shared": tables.encoder == tables.decoder, "is_projection_tied": tables.head == tables.decoder}
        ours = model_config(config, **ours.to_dict() | fields)
        return Layout(ours, dict(_sources(ours, tables)))

    def _config(self, foreign: Foreign, limits: Limits, report: Report) -> ModelConfig:
        """Return our configuration, but for what the tensors say."""
        config = foreign.config
        kind, is_gated = _activation(config)
        num_heads, vocab_size, ffn_dim = config.size("num_heads"), config.size("vocab_size"), config.size("d_ff")
        num_layers = config.size("num_layers")
        has_other_depth = config.find("num_decoder_layers", int) is not None
        lengths = _lengths(foreign, limits, report)
        return model_config(
            config,
            source_vocab_size=vocab_size,
            target_vocab_size=vocab_size,
            d_model=config.size("d_model"),
            num_heads=num_heads,
            attention_dim=num_heads * config.size("d_kv"),
            num_encoder_layers=num_layers,
            num_decoder_layers=config.size("num_decoder_layers") if has_other_depth else num_layers,
            encoder_ffn_dim=ffn_dim,
            decoder_ffn_dim=ffn_dim,
            max_source_positions=lengths[0],
            max_target_positions=lengths[1],
            norm="pre",
            norm_kind="rms",
            norm_epsilon=config.get("layer_norm_epsilon", float),
            has_biases=False,
            activation=kind,
            is_ffn_gated=is_gated,
            is_attention_scaled=False,
            positions="relative",
            relative_buckets=config.size("relative_attention_num_buckets", _MAX_DISTANCE),
            relative_max_distance=config.size("relative_attention_max_distance", _MAX_DISTANCE),
            has_relative_bias_per_layer=self.has_bias_per_layer,
            is_embedding_scaled=False,
            is_output_scaled=self._is_scaled(config, report),
            padding="predicted",
            **special_ids(foreign, start=config.get("pad_token_id", int)),
        )

    def _is_scaled(self, config: Settings, report: Report) -> bool:
        """Return whether the hidden states are scaled before the projection, as Transformers 5 does."""
        is_tied = config.find("tie_word_embeddings", bool) is not False
        said = config.find("scale_decoder_outputs", bool)
        is_scaled = self.is_output_scaled
        if is_scaled is None:
            is_scaled = is_tied if said is None else said
        elif is_scaled and not is_tied:
            report.translated.append(
                "tie_word_embeddings false, yet hidden states are divided by √d_model before the projection: Transformers 5 does "
                "so with every model of this type, Transformers 4 did not; which is right, the score of a known text can tell"
            )
        return is_scaled


def _activation(config: Settings) -> tuple[str, bool]:
    """Return the feed-forward layers' activation, and whether they are gated."""
    said = config.get("feed_forward_proj", str)
    kind = said.removeprefix("gated-")
    is_gated = kind != said
    # "gated-gelu" has always meant the approximation, and "gelu" alone the exact one.
    name = "gelu_new" if said == "gated-gelu" else kind
    for field, value in (("dense_act_fn", name), ("is_gated_act", is_gated)):
        stated = config.take(field)
        if stated is not None and stated != value:
            raise ForeignError(f"{config.path}: {field} {stated!r:.40} does not go with feed_forward_proj {said!r:.40}")
    return activation(config, "feed_forward_proj", name), is_gated


def _lengths(foreign: Foreign, limits: Limits, report: Report) -> tuple[int, int]:
    """Return the longest source and target: there is no table that bounds them."""
    said, where = foreign.config.find("n_positions", int), "n_positions"
    if said is None:
        known = foreign.tokenizer.find("model_max_length", float)
        said = int(known) if known is not None and known < _SANE_LENGTH else None
        where = "the tokeniser’s model_max_length"
    if said is None or said < 1:
        said = MAX_BYTES if foreign.is_of_bytes else MAX_TOKENS
        where = "which no file says"
    source, target = limits.max_source_tokens or said, limits.max_target_tokens or said
    report.translated.append(
        f"at most {source} source and {target} target tokens ({said}: {where}); relative positions have no table that ends, so "
        "--max-source-tokens and --max-target-tokens may say more"
    )
    return source, target


def _sources(ours: ModelConfig, tables: Tables) -> Iterator[tuple[str, Source]]:
    """Yield where each parameter comes from."""
    sides = {"encoder": (ours.num_encoder_layers, tables.encoder), "decoder": (ours.num_decoder_layers, tables.decoder)}
    for side, (num_layers, table) in sides.items():
        yield f"{side}.embedding.tokens.weight", Source((table,))
        yield f"{side}.norm.weight", Source((f"{side}.final_layer_norm.weight",))
        if not ours.has_relative_bias_per_layer:
            yield f"{side}.relative_bias.weight", Source((f"{side}.block.0.layer.0.{_BIAS}",))
        for index in range(num_layers):
            theirs = f"{side}.block.{index}.layer."
            if ours.has_relative_bias_per_layer:
                yield f"{side}.relative_bias.{index}.weight", Source((f"{theirs}0.{_BIAS}",))
            yield from _layer(f"{side}.layers.{index}.", theirs, side == "decoder", ours.is_ffn_gated)
    if not ours.is_projection_tied:
        yield "decoder.projection.weight", Source((tables.head,))


def _layer(ours: str, theirs: str, is_decoder: bool, is_gated: bool) -> Iterator[tuple[str, Source]]:
    """Yield where the parameters of one layer come from."""
    for index, (name, their) in enumerate((("self", "SelfAttention"), ("cross", "EncDecAttention"))[: 1 + is_decoder]):
        inputs = tuple(f"{theirs}{index}.{their}.{which}.weight" for which in "qkv")
        yield f"{ours}{name}_attention.input.weight", Source(inputs)
        yield f"{ours}{name}_attention.output.weight", Source((f"{theirs}{index}.{their}.o.weight",))
        yield f"{ours}{name}_residual.norm.weight", Source((f"{theirs}{index}.layer_norm.weight",))
    last = f"{theirs}{1 + is_decoder}."
    maps = {"gate": "wi_0", "inner": "wi_1", "outer": "wo"} if is_gated else {"inner": "wi", "outer": "wo"}
    for our, their in maps.items():
        yield f"{ours}feed_forward.{our}.weight", Source((f"{last}DenseReluDense.{their}.weight",))
    yield f"{ours}feed_residual.norm.weight", Source((f"{last}layer_norm.weight",))


_DEFAULTS: Final = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "relative_attention_max_distance": 128,
    "layer_norm_epsilon": 1e-6,
    "feed_forward_proj": "relu",
    "pad_token_id": 0,
    "eos_token_id": 1,
}
_MULTILINGUAL: Final = _DEFAULTS | {
    "vocab_size": 250112,
    "d_ff": 1024,
    "num_layers": 8,
    "num_heads": 6,
    "feed_forward_proj": "gated-gelu",
    "decoder_start_token_id": 0,
}
# CodeT5 has BART's files.
_FILES: Final = (TokenizerFiles(("spiece.model",), from_t5), TokenizerFiles(("vocab.json", "merges.txt"), from_byte_pairs))
T5: Final = Family(
    name="T5",
    model_type="t5",
    defaults=_DEFAULTS,
    architecture=T5Like(is_output_scaled=None),
    tokenizers=_FILES,
)
MT5: Final = Family(
    name="mT5", model_type="mt5", defaults=_MULTILINGUAL, architecture=T5Like(is_output_scaled=False), tokenizers=_FILES
)
UMT5: Final = Family(
    name="UMT5",
    model_type="umt5",
    defaults=_MULTILINGUAL,
    architecture=T5Like(is_output_scaled=True, has_bias_per_layer=True),
    tokenizers=_FILES,
)
