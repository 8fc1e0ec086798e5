"""Families of models: for each, its settings, the names of its tensors, and the files of its tokeniser.

BART's relatives (Marian, M2M100 and NLLB, BART, mBART, Pegasus) have biases, layer norms and absolute positions; T5's (T5, Flan,
ByT5, MADLAD-400, mT5, UMT5) have no biases, RMS norms and relative positions.
"""

import math
from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from dragoman.model.importers import tokenizers
from dragoman.model.importers.files import ForeignError, Settings
from dragoman.model.importers.mapping import SIDES, Architecture, Family, activation, special_ids
from dragoman.model.importers.report import Report
from dragoman.model.importers.tokenizers import TokenizerFiles
from dragoman.model.importers.weights import Foreign, Limits

MAX_TOKENS: Final = 512  # of T5's without a stated length: they were trained with it
MAX_BYTES: Final = 1024  # of ByT5, a token of which is a byte
_MAX_POSITIONS: Final = 2**17  # of tables that are made, whatever length the configuration states
_MAX_DISTANCE: Final = 2**16
_MAX_STATED_LENGTH: Final = 2**20  # `model_max_length` is 10^30 where it is not known
_OLD_POSITIONS: Final = ("embed_positions.weights", "embed_positions._float_tensor")


def _in_layers(theirs: str, names: Mapping[str, str]) -> dict[str, str]:
    """Return names of a layer's parts with those of the layer before them."""
    return {f"{{side}}.layers.{{n}}.{our}": f"{theirs}.{name}" for our, name in names.items()}


def _read_bart(family: Family, foreign: Foreign, limits: Limits, report: Report) -> dict[str, Any]:
    """Return the settings of a relative of BART that are no plain sizes."""
    config = foreign.config
    encoder_heads, decoder_heads = (config.size(f"{side}_attention_heads") for side in SIDES)
    if encoder_heads != decoder_heads:
        differ = f"encoder_attention_heads {encoder_heads} and decoder_attention_heads {decoder_heads} differ"
        raise ForeignError(f"{config.path}: {differ}; here all layers have as many")
    can_separate = "share_encoder_decoder_embeddings" in family.defaults
    are_shared = not can_separate or config.get("share_encoder_decoder_embeddings", bool)
    ids = special_ids(foreign)
    config.take("decoder_vocab_size")  # has no effect where sides share a vocabulary
    rows = config.size("max_position_embeddings", _MAX_POSITIONS)
    source, target = limits.max_source_tokens or rows, limits.max_target_tokens or rows
    if max(source, target) > rows and not family.has_longer_tables:
        raise ForeignError(
            f"{config.path}: its position tables have {rows} rows (max_position_embeddings), not {max(source, target)}"
        )
    report.translated.append(f"at most {source} source and {target} target tokens, of {rows} positions that config.json has")
    fields = {
        "target_vocab_size": config.size("vocab_size" if are_shared else "decoder_vocab_size"),
        "max_source_positions": source,
        "max_target_positions": target,
        "activation": activation(config, "activation_function", config.get("activation_function", str)),
        "position_offset": ids["pad_id"] + 1,
        "is_embedding_shared": are_shared,
        "is_embedding_scaled": config.get("scale_embedding", bool),
    }
    return {**fields, **family.settings, **ids}


def _read_t5(family: Family, foreign: Foreign, limits: Limits, report: Report) -> dict[str, Any]:
    """Return the settings of a relative of T5 that are no plain sizes."""
    config = foreign.config
    ffn, is_gated = _t5_activation(config)
    has_other_depth = config.find("num_decoder_layers", int) is not None
    source, target = _t5_lengths(foreign, limits, report)
    fields = {
        "attention_dim": config.size("num_heads") * config.size("d_kv"),
        "num_decoder_layers": config.size("num_decoder_layers" if has_other_depth else "num_layers"),
        "max_source_positions": source,
        "max_target_positions": target,
        "norm_epsilon": config.get("layer_norm_epsilon", float),
        "activation": ffn,
        "is_ffn_gated": is_gated,
        "relative_buckets": config.size("relative_attention_num_buckets", _MAX_DISTANCE),
        "relative_max_distance": config.size("relative_attention_max_distance", _MAX_DISTANCE),
        "is_output_scaled": _is_t5_output_scaled(family, config, report),
    }
    return {**family.settings, **fields, **special_ids(foreign, start=config.get("pad_token_id", int))}


def _is_t5_output_scaled(family: Family, config: Settings, report: Report) -> bool:
    """Return whether hidden states are divided by √d_model before the projection, as Transformers 5 does."""
    is_tied = config.find("tie_word_embeddings", bool) is not False
    stated = config.find("scale_decoder_outputs", bool)
    if "is_output_scaled" not in family.settings:
        return is_tied if stated is None else stated
    is_scaled: bool = family.settings["is_output_scaled"]
    if is_scaled and not is_tied:
        report.translated.append(
            "tie_word_embeddings false, yet hidden states are divided by √d_model before the projection: Transformers 5 does "
            "so with every model of this type, Transformers 4 did not; which is right, the score of a known text can tell"
        )
    return is_scaled


def _t5_activation(config: Settings) -> tuple[str, bool]:
    """Return the feed-forward layers' activation, and whether they are gated."""
    stated = config.get("feed_forward_proj", str)
    kind = stated.removeprefix("gated-")
    # "gated-gelu" has always meant the approximation, and "gelu" alone the exact one.
    name = "gelu_new" if stated == "gated-gelu" else kind
    for field, value in (("dense_act_fn", name), ("is_gated_act", kind != stated)):
        other = config.take(field)
        if other is not None and other != value:
            raise ForeignError(f"{config.path}: {field} {other!r:.40} does not go with feed_forward_proj {stated!r:.40}")
    return activation(config, "feed_forward_proj", name), kind != stated


def _t5_lengths(foreign: Foreign, limits: Limits, report: Report) -> tuple[int, int]:
    """Return the longest source and target; no table bounds them."""
    stated, origin = foreign.config.find("n_positions", int), "n_positions"
    if stated is None:
        known = foreign.tokenizer.find("model_max_length", float)
        stated = int(known) if known is not None and known < _MAX_STATED_LENGTH else None
        origin = "the tokeniser’s model_max_length"
    if stated is None or stated < 1:
        stated = MAX_BYTES if foreign.is_of_bytes else MAX_TOKENS
        origin = "which no file says"
    source, target = limits.max_source_tokens or stated, limits.max_target_tokens or stated
    report.translated.append(
        f"at most {source} source and {target} target tokens ({stated}: {origin}); relative positions have no table that ends, so "
        "--max-source-tokens and --max-target-tokens may say more"
    )
    return source, target


# Below, names of config.json with the values that Transformers takes where it lacks them.
_BART_DEFAULTS: Final = (
    dict(vocab_size=50265, max_position_embeddings=1024, activation_function="gelu", d_model=1024, scale_embedding=False)
    | dict(encoder_layers=12, encoder_ffn_dim=4096, encoder_attention_heads=16)
    | dict(decoder_layers=12, decoder_ffn_dim=4096, decoder_attention_heads=16)
)
_T5_DEFAULTS: Final = dict(
    **dict(vocab_size=32128, d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, layer_norm_epsilon=1e-6),
    **dict(relative_attention_num_buckets=32, relative_attention_max_distance=128, feed_forward_proj="relu"),
    **dict(pad_token_id=0, eos_token_id=1),
)
_MT5_DEFAULTS: Final = _T5_DEFAULTS | dict(
    vocab_size=250112, d_ff=1024, num_layers=8, num_heads=6, feed_forward_proj="gated-gelu", decoder_start_token_id=0
)


def _half_sinusoids(num_positions: int, d_model: int) -> Tensor:
    """Return Marian's and Pegasus' table `[num_positions, d_model]`: sin(p / 10000^(2i/d)) in half of a row, then cos."""
    angles = np.arange(num_positions)[:, None] / np.power(10000, 2 * np.arange((d_model + 1) // 2) / d_model)
    table = np.concatenate([np.sin(angles), np.cos(angles[:, : d_model // 2])], axis=1)
    return torch.from_numpy(table).float()


def _tensor2tensor_sinusoids(num_positions: int, d_model: int) -> Tensor:
    """Return M2M100's table `[num_positions, d_model]`: halves of sin and cos with frequencies 10000^(-i / (d/2 - 1))."""
    half = d_model // 2
    # In single precision, as M2M100 does: late positions multiply the rounding of a frequency.
    frequencies = torch.exp(torch.arange(half).float() * -(math.log(10000) / (half - 1)))
    angles = torch.arange(num_positions).float()[:, None] * frequencies
    table = torch.cat([angles.sin(), angles.cos()], 1)
    return torch.cat([table, torch.zeros(num_positions, 1)], 1) if d_model % 2 else table


BART_LIKE: Final = Architecture(
    settings={"positions": "learned"},
    sizes={"source_vocab_size": "vocab_size", "d_model": "d_model", "num_heads": "encoder_attention_heads"}
    | {f"num_{side}_layers": f"{side}_layers" for side in SIDES}
    | {f"{side}_ffn_dim": f"{side}_ffn_dim" for side in SIDES},
    read=_read_bart,
    prefix="model.",
    names={
        "{side}.embedding.positions": "{side}.embed_positions.weight",
        "{side}.embedding.norm.{part}": "{side}.layernorm_embedding.{part}",
        "{side}.norm.{part}": "{side}.layer_norm.{part}",
    }
    | _in_layers(
        "{side}.layers.{n}",
        {
            "self_attention.input.{part}": "self_attn.*_proj.{part}",
            "self_attention.output.{part}": "self_attn.out_proj.{part}",
            "self_residual.norm.{part}": "self_attn_layer_norm.{part}",
            "cross_attention.input.{part}": "encoder_attn.*_proj.{part}",
            "cross_attention.output.{part}": "encoder_attn.out_proj.{part}",
            "cross_residual.norm.{part}": "encoder_attn_layer_norm.{part}",
            "feed_forward.inner.{part}": "fc1.{part}",
            "feed_forward.outer.{part}": "fc2.{part}",
            "feed_residual.norm.{part}": "final_layer_norm.{part}",
        },
    ),
    # Versions, and position tables that are made anew.
    unused=tuple(f"{side}.{name}" for side in SIDES for name in ("version", *_OLD_POSITIONS)),
)
T5_LIKE: Final = Architecture(
    settings=dict(norm="pre", norm_kind="rms", has_biases=False, is_attention_scaled=False, positions="relative")
    | dict(is_embedding_scaled=False, is_embedding_shared=True),
    sizes=dict(source_vocab_size="vocab_size", target_vocab_size="vocab_size", d_model="d_model", num_heads="num_heads")
    | dict(num_encoder_layers="num_layers", encoder_ffn_dim="d_ff", decoder_ffn_dim="d_ff"),
    read=_read_t5,
    names={
        "{side}.norm.weight": "{side}.final_layer_norm.weight",
        "{side}.relative_bias.weight": "{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
        "{side}.relative_bias.{n}.weight": "{side}.block.{n}.layer.0.SelfAttention.relative_attention_bias.weight",
    }
    | _in_layers(
        "{side}.block.{n}.layer",
        {
            "self_attention.input.weight": "0.SelfAttention.*.weight",
            "self_attention.output.weight": "0.SelfAttention.o.weight",
            "self_residual.norm.weight": "0.layer_norm.weight",
            "cross_attention.input.weight": "1.EncDecAttention.*.weight",
            "cross_attention.output.weight": "1.EncDecAttention.o.weight",
            "cross_residual.norm.weight": "1.layer_norm.weight",
            "feed_forward.gate.weight": "{last}.DenseReluDense.wi_0.weight",
            "feed_forward.inner.weight": "{last}.DenseReluDense.{inner}.weight",
            "feed_forward.outer.weight": "{last}.DenseReluDense.wo.weight",
            "feed_residual.norm.weight": "{last}.layer_norm.weight",
        },
    ),
    unused=("decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight",),
    is_head_required=False,
)
_FAIRSEQ: Final = TokenizerFiles(("sentencepiece.bpe.model",), tokenizers.from_fairseq)
_BYTE_PAIRS: Final = TokenizerFiles(("vocab.json", "merges.txt"), tokenizers.from_byte_pairs)
_T5_FILES: Final = (TokenizerFiles(("spiece.model",), tokenizers.from_t5), _BYTE_PAIRS)  # CodeT5 has BART's files
FAMILIES: Final = {
    "marian": Family(
        name="Marian",
        architecture=BART_LIKE,
        settings={"norm": "post", "position_offset": 0},
        defaults=dict(_BART_DEFAULTS, vocab_size=58101, share_encoder_decoder_embeddings=True)
        | dict(pad_token_id=58100, eos_token_id=0, forced_eos_token_id=0, decoder_start_token_id=58100),
        tokenizers=(TokenizerFiles(("source.spm", "target.spm", "vocab.json"), tokenizers.from_marian),),
        has_output_bias=True,
        make_positions=_half_sinusoids,
    ),
    "m2m_100": Family(
        name="M2M100",  # and the dense models of NLLB; its position tables begin behind the padding token's row
        architecture=BART_LIKE,
        settings={"norm": "pre"},
        defaults=dict(_BART_DEFAULTS, vocab_size=128112, activation_function="relu", scale_embedding=True)
        | dict(pad_token_id=1, eos_token_id=2, bos_token_id=0, decoder_start_token_id=2),
        tokenizers=(TokenizerFiles(("sentencepiece.bpe.model", "vocab.json"), tokenizers.from_m2m100), _FAIRSEQ),
        make_positions=_tensor2tensor_sinusoids,
        has_longer_tables=True,
    ),
    "bart": Family(
        name="BART",  # the first two rows of its trained position tables are not used; nor are mBART's
        architecture=BART_LIKE,
        settings={"norm": "post", "has_embedding_norm": True, "position_offset": 2},
        defaults=_BART_DEFAULTS
        | dict(pad_token_id=1, eos_token_id=2, forced_eos_token_id=2, bos_token_id=0, decoder_start_token_id=2),
        tokenizers=(_BYTE_PAIRS,),
        has_output_bias=True,
    ),
    "mbart": Family(
        name="mBART",
        architecture=BART_LIKE,
        settings={"norm": "pre", "has_embedding_norm": True, "position_offset": 2},
        defaults=_BART_DEFAULTS | dict(pad_token_id=1, eos_token_id=2, forced_eos_token_id=2, bos_token_id=0),
        tokenizers=(_FAIRSEQ,),
        has_output_bias=True,
    ),
    "pegasus": Family(
        name="Pegasus",
        architecture=BART_LIKE,
        settings={"norm": "pre", "position_offset": 0},
        defaults=_BART_DEFAULTS | dict(pad_token_id=0, eos_token_id=1, forced_eos_token_id=1, decoder_start_token_id=0),
        tokenizers=(TokenizerFiles(("spiece.model",), tokenizers.from_pegasus),),
        has_output_bias=True,
        make_positions=_half_sinusoids,
    ),
    "t5": Family("T5", T5_LIKE, {}, _T5_DEFAULTS, _T5_FILES),
    "mt5": Family("mT5", T5_LIKE, {"is_output_scaled": False}, _MT5_DEFAULTS, _T5_FILES),
    "umt5": Family("UMT5", T5_LIKE, dict(is_output_scaled=True, has_relative_bias_per_layer=True), _MT5_DEFAULTS, _T5_FILES),
}
# Relatives that are not supported, and their difference.
_RELATIVES: Final = {
    **dict.fromkeys(("nllb-moe", "switch_transformers"), "a mixture of experts"),
    **dict.fromkeys(("longt5", "led", "pegasus_x"), "attention is local in its encoder"),
    "bigbird_pegasus": "attention is sparse in its encoder",
    "prophetnet": "it predicts several tokens at once",
    "fsmt": "its layers are others than BART's",
    "whisper": "it reads sound",
}


def family_of(config: Settings) -> Family:
    """Return the family of a configuration, and add the family's defaults to the configuration."""
    kind = config.get("model_type", str)
    if kind not in FAMILIES:
        why = f" ({_RELATIVES[kind]})" if kind in _RELATIVES else ""
        raise ForeignError(f"{config.path}: model_type {kind!r} is not known here{why}; known: {', '.join(sorted(FAMILIES))}")
    config.with_defaults(FAMILIES[kind].defaults)
    return FAMILIES[kind]
