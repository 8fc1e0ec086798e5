"""Every family and variant of checkpoint: the class of Transformers, small settings, and the published `generation_config`.

Lengths are scaled to small models. Languages are spelt as Transformers' tokenisers spell them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.oracles import vocabularies

Settings = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Variant:
    """One kind of checkpoint.

    Attributes:
        model: Its class in Transformers; the class of its configuration is found by it.
        tokens: Writes tokeniser files into a folder; returns settings of the configuration that follow from them.
        settings: Those of a small configuration.
        generation: `generation_config`, without what the configuration says itself.
        pairs: Source and target languages to try; None where a side has none.
        said: The way the target language is given to Transformers: the answer's first token is "forced", the decoder's "start" is
            the language, or a text goes before the source's, with "{}" for the language (or its English name, for T5).
        task: For `dragoman import --task`; Transformers is given that task's parameters with every call.
        has_json: Whether it has a `tokenizer.json` beside SentencePiece's file, without which Transformers reads it as another.
        mended: Corrects the `tokenizer.json` that Transformers writes.
    """

    model: str
    tokens: Callable[[Path], Settings]
    settings: Settings
    generation: Settings = field(default_factory=dict)
    pairs: tuple[tuple[str | None, str | None], ...] = ((None, None),)
    said: str = ""
    task: str = ""
    has_json: bool = False
    mended: Callable[[dict[str, Any]], dict[str, Any]] | None = None


def _size(tokens: Callable[..., int], **options: Any) -> Callable[[Path], Settings]:
    return lambda folder: {"vocab_size": tokens(folder, **options)}


def _marian(**options: Any) -> Callable[[Path], Settings]:
    def settings(folder: Path) -> Settings:
        size = vocabularies.marian(folder, **options)
        return {"vocab_size": size, "pad_token_id": size - 1, "decoder_start_token_id": size - 1}

    return settings


def _marian_pair(folder: Path) -> Settings:
    source, target = vocabularies.marian_pair(folder)
    return {"vocab_size": source, "decoder_vocab_size": target, "pad_token_id": target - 1, "decoder_start_token_id": target - 1}


def _mbart_cc25(folder: Path) -> Settings:
    """An answer begins with its language: here the last but five of 25 before the mask, as published for Romanian."""
    size = vocabularies.mbart(folder)
    return {"vocab_size": size, "decoder_start_token_id": size - 1 - vocabularies.MBART_LANGUAGES + 19}


_DEPTHS = dict(encoder_layers=3, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4)
_BART_LIKE = dict(d_model=64, **_DEPTHS, encoder_ffn_dim=96, decoder_ffn_dim=80, max_position_embeddings=160)
_BUCKETS = dict(relative_attention_num_buckets=8, relative_attention_max_distance=20)
_T5_LIKE = dict(d_model=64, d_kv=24, d_ff=96, num_layers=3, num_decoder_layers=2, num_heads=4, **_BUCKETS)
_T5_IDS = dict(pad_token_id=0, eos_token_id=1, decoder_start_token_id=0)
_CODE_T5_IDS = dict(pad_token_id=1, eos_token_id=2, decoder_start_token_id=1)
_GATED = dict(_T5_LIKE, **_T5_IDS, feed_forward_proj="gated-gelu", tie_word_embeddings=False)
_MARIAN = dict(_BART_LIKE, activation_function="swish", scale_embedding=True, eos_token_id=0, bos_token_id=0, forced_eos_token_id=0)
_UNSHARED = dict(activation_function="relu", share_encoder_decoder_embeddings=False, tie_word_embeddings=False)
_FAIRSEQ = dict(_BART_LIKE, pad_token_id=1, bos_token_id=0, eos_token_id=2)
_M2M = dict(_FAIRSEQ, activation_function="relu", scale_embedding=True, decoder_start_token_id=2)
_BART = dict(_FAIRSEQ, activation_function="gelu", decoder_start_token_id=2, forced_eos_token_id=2)
_MBART = dict(_FAIRSEQ, activation_function="gelu", scale_embedding=True, forced_eos_token_id=2)
_PEGASUS_IDS = dict(pad_token_id=0, bos_token_id=0, eos_token_id=1, decoder_start_token_id=0, forced_eos_token_id=1)
_PEGASUS = dict(_BART_LIKE, activation_function="relu", scale_embedding=True, **_PEGASUS_IDS)
_FIVE_BEAMS = dict(max_length=30, num_beams=5, early_stopping=True)
_MARIAN_DEFAULTS = dict(max_length=32, num_beams=4, is_padding_banned=True)
_SUMMARY = dict(early_stopping=True, length_penalty=2.0, max_length=40, min_length=8, no_repeat_ngram_size=3, num_beams=4)
_TASKS: dict[str, Any] = {"summarization": dict(_SUMMARY, max_length=200, min_length=30, prefix="summarize: ")} | {
    f"translation_en_to_{code}": dict(early_stopping=True, max_length=28, num_beams=4, prefix=f"translate English to {name}: ")
    for code, name in (("de", "German"), ("fr", "French"), ("ro", "Romanian"))
}
_T5 = dict(_T5_LIKE, **_T5_IDS, feed_forward_proj="relu", task_specific_params=_TASKS)
_NLLB: dict[str, Any] = dict(generation=dict(max_length=30), said="forced", has_json=True, mended=vocabularies.languages_first)
_M2M_MODEL, _MBART_MODEL = "M2M100ForConditionalGeneration", "MBartForConditionalGeneration"
_BART_MODEL, _T5_MODEL = "BartForConditionalGeneration", "T5ForConditionalGeneration"

_MARIAN_PAIRS = ((None, "fra"), (None, "deu"), (None, "spa_Latn"))
_M2M_PAIRS = (("en", "de"), ("en", "fr"), ("fr", "zh"))
_NLLB_PAIRS = (("eng_Latn", "deu_Latn"), ("eng_Latn", "fra_Latn"), ("fra_Latn", "zho_Hant"))
_LEGACY_PAIRS = (("eng_Latn", "deu_Latn"), ("deu_Latn", "fra_Latn"))
_MBART_PAIRS = (("en_XX", "ro_RO"), ("en_XX", "de_DE"), ("de_DE", "zh_CN"))
_MBART50_PAIRS = (("en_XX", "de_DE"), ("en_XX", "fr_XX"), ("de_DE", "sl_SI"))
_T5_PAIRS = (("en", "de"), ("en", "fr"), ("en", "ro"))
_MADLAD_PAIRS = ((None, "de"), (None, "fr"), (None, "zh_Hant"))
_UNTIED = dict(_BART, tie_word_embeddings=False), dict(early_stopping=True, no_repeat_ngram_size=3, num_beams=4, max_length=30)
_BART_FORCED = dict(_BART, forced_bos_token_id=0), dict(_SUMMARY, forced_bos_token_id=0)
_UMT5 = dict(_GATED, tie_word_embeddings=True)
_MULTILINGUAL = _marian(languages=vocabularies.MARIAN_LANGUAGES)
_LEGACY = _size(vocabularies.nllb, legacy_behaviour=True)
_50 = dict(_MBART, decoder_start_token_id=2)
_TRANSLATION: dict[str, Any] = dict(pairs=_T5_PAIRS, said="translate English to {}: ", task="translation")
_NO_EXTRA = _size(vocabularies.t5, extra_ids=0)
_BEAMS_8 = dict(length_penalty=0.6, max_length=24, num_beams=8)
_MADLAD = dict(_GATED, pad_token_id=1, eos_token_id=2)

VARIANTS = {
    "marian": Variant("MarianMTModel", _marian(), _MARIAN, dict(_MARIAN_DEFAULTS, num_beams=6, renormalize_logits=True)),
    "marian-two-vocabularies": Variant("MarianMTModel", _marian_pair, dict(_MARIAN, **_UNSHARED), _MARIAN_DEFAULTS),
    "marian-multilingual": Variant("MarianMTModel", _MULTILINGUAL, _MARIAN, _MARIAN_DEFAULTS, _MARIAN_PAIRS, ">>{}<< "),
    "m2m100": Variant(_M2M_MODEL, _size(vocabularies.m2m100), _M2M, _FIVE_BEAMS, _M2M_PAIRS, "forced"),
    "nllb": Variant(_M2M_MODEL, _size(vocabularies.nllb), _M2M, pairs=_NLLB_PAIRS, **_NLLB),
    "nllb-legacy": Variant(_M2M_MODEL, _LEGACY, _M2M, pairs=_LEGACY_PAIRS, **_NLLB),
    "bart": Variant(_BART_MODEL, _size(vocabularies.bart), *_BART_FORCED),
    "bart-untied": Variant(_BART_MODEL, _size(vocabularies.bart), *_UNTIED),
    "mbart": Variant(_MBART_MODEL, _mbart_cc25, _MBART, _FIVE_BEAMS, _MBART_PAIRS, "start"),
    "mbart50": Variant(_MBART_MODEL, _size(vocabularies.mbart, is_fifty=True), _50, _FIVE_BEAMS, _MBART50_PAIRS, "forced"),
    "pegasus": Variant("PegasusForConditionalGeneration", _size(vocabularies.pegasus), _PEGASUS, _BEAMS_8),
    "t5": Variant(_T5_MODEL, _size(vocabularies.t5), _T5),
    "t5-translation": Variant(_T5_MODEL, _size(vocabularies.t5), _T5, **_TRANSLATION),
    "t5-v1.1": Variant(_T5_MODEL, _size(vocabularies.t5), _GATED),
    "mt5": Variant("MT5ForConditionalGeneration", _NO_EXTRA, _GATED),
    "codet5": Variant(_T5_MODEL, _size(vocabularies.bart), dict(_T5_LIKE, **_CODE_T5_IDS)),
    "byt5": Variant(_T5_MODEL, _size(vocabularies.byt5), _GATED),
    "umt5": Variant("UMT5ForConditionalGeneration", _NO_EXTRA, _UMT5, has_json=True),
    "madlad": Variant(_T5_MODEL, _size(vocabularies.madlad), _MADLAD, pairs=_MADLAD_PAIRS, said="<2{}> "),
}
