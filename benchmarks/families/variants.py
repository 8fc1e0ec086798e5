"""Every family and variant: the class of Transformers, its settings at a small and a real size, its published `generation_config`.

Lengths are scaled to small models. Languages are pairs as Transformers' tokenisers spell them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.families import vocabularies

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """One kind of checkpoint.

    Attributes:
        name: What it is called here.
        model: Its class in Transformers; the class of its configuration is found by it.
        tokens: Writes tokeniser files into a folder for a vocabulary filled up to a size (None: as it is); returns settings of the
            configuration that follow from them, at least `vocab_size`.
        small: Settings of a small configuration.
        real: Those of a published one, if that is tried.
        real_vocab_size: Tokens at the real size.
        generation: `generation_config`, without what the configuration says itself.
        pairs: Source and target languages to try, as Transformers' tokeniser spells them; None where a side has none.
        said: How Transformers is told the target language: the answer's first token is forced, the decoder begins with it, or a
            text goes before the source's, with "{}" for the language (or for its English name, of those that T5 knows).
        task: What `dragoman import --task` is told; Transformers is given that task's parameters with every call.
        has_json: Whether it has a `tokenizer.json` beside SentencePiece's file, without which Transformers reads it as another.
        mended: Puts right what today's Transformers writes there.
    """

    name: str
    model: str
    tokens: Callable[[Path, int | None], Settings]
    small: Settings
    real: Settings | None = None
    real_vocab_size: int | None = None
    generation: Settings = field(default_factory=dict)
    pairs: tuple[tuple[str | None, str | None], ...] = ((None, None),)
    said: str = ""
    task: str = ""
    has_json: bool = False
    mended: Callable[[dict[str, Any]], dict[str, Any]] | None = None


def _size(tokens: Callable[..., int], **options: Any) -> Callable[[Path, int | None], Settings]:
    """Wrap a function that fills up its vocabulary."""
    return lambda folder, filled_to: {"vocab_size": tokens(folder, filled_to, **options)}


def _fixed(tokens: Callable[..., int], **options: Any) -> Callable[[Path, int | None], Settings]:
    """Wrap a function that does not."""
    return lambda folder, filled_to: {"vocab_size": tokens(folder, **options)}


def _marian(tokens: Callable[[Path, int | None], int]) -> Callable[[Path, int | None], Settings]:
    def settings(folder: Path, filled_to: int | None) -> Settings:
        size = tokens(folder, filled_to)
        return {"vocab_size": size, "pad_token_id": size - 1, "decoder_start_token_id": size - 1}

    return settings


def _marian_pair(folder: Path, filled_to: int | None) -> Settings:
    source, target = vocabularies.marian_pair(folder)
    return {"vocab_size": source, "decoder_vocab_size": target, "pad_token_id": target - 1, "decoder_start_token_id": target - 1}


def _mbart_cc25(folder: Path, filled_to: int | None) -> Settings:
    """mBART-25 begins an answer with its language: here the last but five of 25 before the mask, as published for Romanian."""
    size = vocabularies.mbart(folder)
    return {"vocab_size": size, "decoder_start_token_id": size - 1 - vocabularies.MBART_LANGUAGES + 19}


_BART_LIKE = dict(
    d_model=64,
    encoder_layers=3,
    decoder_layers=2,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=80,
    max_position_embeddings=160,
)
_T5_LIKE = dict(
    d_model=64,
    d_kv=24,
    d_ff=96,
    num_layers=3,
    num_decoder_layers=2,
    num_heads=4,
    relative_attention_num_buckets=8,
    relative_attention_max_distance=20,
)
_GATED = dict(_T5_LIKE, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
_MARIAN = dict(_BART_LIKE, activation_function="swish", scale_embedding=True, eos_token_id=0, bos_token_id=0, forced_eos_token_id=0)
_FAIRSEQ = dict(pad_token_id=1, bos_token_id=0, eos_token_id=2)
_OPUS = dict(
    d_model=512,
    encoder_layers=6,
    decoder_layers=6,
    encoder_attention_heads=8,
    decoder_attention_heads=8,
    encoder_ffn_dim=2048,
    decoder_ffn_dim=2048,
    max_position_embeddings=512,
)
_BART_BASE = dict(
    _OPUS,
    d_model=768,
    encoder_attention_heads=12,
    decoder_attention_heads=12,
    encoder_ffn_dim=3072,
    decoder_ffn_dim=3072,
    max_position_embeddings=1024,
)
_NLLB_600M = dict(
    _OPUS,
    d_model=1024,
    encoder_layers=12,
    decoder_layers=12,
    encoder_attention_heads=16,
    decoder_attention_heads=16,
    encoder_ffn_dim=4096,
    decoder_ffn_dim=4096,
    max_position_embeddings=1024,
)
_FLAN_BASE = dict(
    d_model=768,
    d_kv=64,
    d_ff=2048,
    num_layers=12,
    num_decoder_layers=12,
    num_heads=12,
    relative_attention_num_buckets=32,
    relative_attention_max_distance=128,
)
_SUMMARY = dict(early_stopping=True, length_penalty=2.0, max_length=40, min_length=8, no_repeat_ngram_size=3, num_beams=4)
_TASKS = {
    "summarization": dict(_SUMMARY, max_length=200, min_length=30, prefix="summarize: "),
    "translation_en_to_de": dict(early_stopping=True, max_length=28, num_beams=4, prefix="translate English to German: "),
    "translation_en_to_fr": dict(early_stopping=True, max_length=28, num_beams=4, prefix="translate English to French: "),
    "translation_en_to_ro": dict(early_stopping=True, max_length=28, num_beams=4, prefix="translate English to Romanian: "),
}
_M2M = dict(_BART_LIKE, **_FAIRSEQ, activation_function="relu", scale_embedding=True, decoder_start_token_id=2)
_BART = dict(_BART_LIKE, **_FAIRSEQ, activation_function="gelu", decoder_start_token_id=2, forced_eos_token_id=2)
_MBART = dict(_BART_LIKE, **_FAIRSEQ, activation_function="gelu", scale_embedding=True, forced_eos_token_id=2)
_T5_IDS = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
_MARIAN_DEFAULTS = dict(max_length=32, num_beams=4, is_padding_banned=True)

_ALL = (
    Variant(
        "marian",
        "MarianMTModel",
        _marian(vocabularies.marian),
        _MARIAN,
        dict(_MARIAN, **_OPUS),
        58_101,
        dict(_MARIAN_DEFAULTS, num_beams=6, renormalize_logits=True),
    ),
    Variant(
        "marian-two-vocabularies",
        "MarianMTModel",
        _marian_pair,
        dict(_MARIAN, activation_function="relu", share_encoder_decoder_embeddings=False, tie_word_embeddings=False),
        generation=_MARIAN_DEFAULTS,
    ),
    Variant(
        "marian-multilingual",
        "MarianMTModel",
        _marian(lambda folder, filled_to: vocabularies.marian(folder, filled_to, vocabularies.MARIAN_LANGUAGES)),
        _MARIAN,
        generation=_MARIAN_DEFAULTS,
        pairs=((None, "fra"), (None, "deu"), (None, "spa_Latn")),
        said=">>{}<< ",
    ),
    Variant(
        "m2m100",
        "M2M100ForConditionalGeneration",
        _fixed(vocabularies.m2m100),
        _M2M,
        generation=dict(max_length=30, num_beams=5, early_stopping=True),
        pairs=(("en", "de"), ("en", "fr"), ("fr", "zh")),
        said="forced",
    ),
    Variant(
        "nllb",
        "M2M100ForConditionalGeneration",
        _size(vocabularies.nllb),
        _M2M,
        dict(_M2M, **_NLLB_600M),
        256_206,
        dict(max_length=30),
        has_json=True,
        mended=vocabularies.languages_first,
        pairs=(("eng_Latn", "deu_Latn"), ("eng_Latn", "fra_Latn"), ("fra_Latn", "zho_Hant")),
        said="forced",
    ),
    Variant(
        "nllb-legacy",
        "M2M100ForConditionalGeneration",
        _size(vocabularies.nllb, is_legacy=True),
        _M2M,
        generation=dict(max_length=30),
        pairs=(("eng_Latn", "deu_Latn"), ("deu_Latn", "fra_Latn")),
        said="forced",
        has_json=True,
        mended=vocabularies.languages_first,
    ),
    Variant(
        "bart",
        "BartForConditionalGeneration",
        _size(vocabularies.bart),
        dict(_BART, forced_bos_token_id=0),
        dict(_BART, **_BART_BASE, forced_bos_token_id=0),
        50_265,
        dict(_SUMMARY, forced_bos_token_id=0),
    ),
    Variant(
        "bart-untied",
        "BartForConditionalGeneration",
        _size(vocabularies.bart),
        dict(_BART, tie_word_embeddings=False),
        generation=dict(early_stopping=True, no_repeat_ngram_size=3, num_beams=4, max_length=30),
    ),
    Variant(
        "mbart",
        "MBartForConditionalGeneration",
        _mbart_cc25,
        _MBART,
        generation=dict(early_stopping=True, max_length=30, num_beams=5),
        pairs=(("en_XX", "ro_RO"), ("en_XX", "de_DE"), ("de_DE", "zh_CN")),
        said="start",
    ),
    Variant(
        "mbart50",
        "MBartForConditionalGeneration",
        _fixed(vocabularies.mbart, is_fifty=True),
        dict(_MBART, decoder_start_token_id=2),
        generation=dict(early_stopping=True, max_length=30, num_beams=5),
        pairs=(("en_XX", "de_DE"), ("en_XX", "fr_XX"), ("de_DE", "sl_SI")),
        said="forced",
    ),
    Variant(
        "pegasus",
        "PegasusForConditionalGeneration",
        _fixed(vocabularies.pegasus),
        dict(
            _BART_LIKE,
            activation_function="relu",
            scale_embedding=True,
            pad_token_id=0,
            bos_token_id=0,
            eos_token_id=1,
            decoder_start_token_id=0,
            forced_eos_token_id=1,
        ),
        generation=dict(length_penalty=0.6, max_length=24, num_beams=8),
    ),
    Variant(
        "t5",
        "T5ForConditionalGeneration",
        _size(vocabularies.t5),
        dict(_T5_LIKE, **_T5_IDS, feed_forward_proj="relu", task_specific_params=_TASKS),
    ),
    Variant(
        "t5-translation",
        "T5ForConditionalGeneration",
        _size(vocabularies.t5),
        dict(_T5_LIKE, **_T5_IDS, feed_forward_proj="relu", task_specific_params=_TASKS),
        pairs=(("en", "de"), ("en", "fr"), ("en", "ro")),
        said="translate English to {}: ",
        task="translation",
    ),
    Variant(
        "t5-v1.1",
        "T5ForConditionalGeneration",
        _size(vocabularies.t5),
        dict(_GATED, **_T5_IDS),
        dict(_GATED, **_T5_IDS, **_FLAN_BASE),
        32_128,
    ),
    Variant("mt5", "MT5ForConditionalGeneration", _size(vocabularies.t5, extra_ids=0), dict(_GATED, **_T5_IDS)),
    Variant("byt5", "T5ForConditionalGeneration", _fixed(vocabularies.byt5), dict(_GATED, **_T5_IDS)),
    Variant(
        "umt5",
        "UMT5ForConditionalGeneration",
        _size(vocabularies.t5, extra_ids=0),
        dict(_GATED, **_T5_IDS, tie_word_embeddings=True),
        has_json=True,
    ),
    Variant(
        "madlad",
        "T5ForConditionalGeneration",
        _fixed(vocabularies.madlad),
        dict(_GATED, pad_token_id=1, eos_token_id=2, decoder_start_token_id=0),
        pairs=((None, "de"), (None, "fr"), (None, "zh_Hant")),
        said="<2{}> ",
    ),
)
VARIANTS = {variant.name: variant for variant in _ALL}
