"""The small models that are trained: each with Transformers' own classes and the tokeniser files of its family."""

import io
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sentencepiece
from transformers import (
    MarianConfig,
    MarianMTModel,
    MarianTokenizer,
    T5Config,
    T5ForConditionalGeneration,
    T5Tokenizer,
)

MAX_LENGTH = 128
"""Of an answer, and of a source, in tokens."""
T5_VOCABULARY = 4128
"""Longer than the tokeniser's, as the published models' is."""


@dataclass(frozen=True, slots=True)
class Family:
    """A model to train.

    Attributes:
        prefix: Said to the model before every source.
        tokenizer: Makes the tokeniser from sources, targets and a folder for its files.
        model: Makes the model, with random weights, for a tokeniser.
        learning_rate: The largest, after warming up.
        num_epochs: Passes over the corpus, after which it translates well enough to tell mistakes from noise.
        batch_size: Pairs a step.
        has_zero_start: Whether the embedding of padding, which the decoder starts from, is held at zero. So it is in models that
            Marian itself has trained, and CTranslate2 counts on it; Transformers' training would move it.
        has_relative_steps: Whether it is trained as T5 was, with Adafactor, whose steps are relative to the size of what they
            change: queries and embeddings begin with sizes that lie far apart.
        task: The one of its configuration that it is trained for; empty where it has none.
    """

    prefix: str
    tokenizer: Callable[[Sequence[str], Sequence[str], Path], Any]
    model: Callable[[Any], Any]
    learning_rate: float
    num_epochs: float
    batch_size: int
    has_zero_start: bool = False
    has_relative_steps: bool = False
    task: str = ""


def marian_tokenizer(sources: Sequence[str], targets: Sequence[str], folder: Path) -> Any:
    """Train a SentencePiece model a side, and one vocabulary of the pieces of both: end-of-sequence first, padding last."""
    models = {"source.spm": _pieces(sources, 2500), "target.spm": _pieces(targets, 2500)}
    vocabulary = {"</s>": 0, "<unk>": 1}
    for name, model in models.items():
        (folder / name).write_bytes(model)
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        for i in range(processor.get_piece_size()):
            if not (processor.is_control(i) or processor.is_unknown(i)):
                vocabulary.setdefault(processor.id_to_piece(i), len(vocabulary))
    vocabulary["<pad>"] = len(vocabulary)
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False, indent=1), encoding="utf-8")
    return MarianTokenizer.from_pretrained(folder, source_lang="en", target_lang="de", model_max_length=MAX_LENGTH)


def marian_model(tokenizer: Any) -> Any:
    """Return a model as Marian's English-German ones are, but small, with a `generation_config` like theirs."""
    pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
    config = MarianConfig(
        vocab_size=len(tokenizer),
        max_position_embeddings=MAX_LENGTH,
        d_model=128,
        encoder_layers=3,
        decoder_layers=3,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=512,
        decoder_ffn_dim=512,
        activation_function="swish",
        scale_embedding=True,
        dropout=0.1,
        pad_token_id=pad,
        eos_token_id=end,
        decoder_start_token_id=pad,
        forced_eos_token_id=end,
    )
    model: Any = MarianMTModel(config)
    settings = model.generation_config
    settings.num_beams, settings.max_length = 4, MAX_LENGTH
    settings.bad_words_ids, settings.forced_eos_token_id = [[pad]], end
    return model


def t5_tokenizer(sources: Sequence[str], targets: Sequence[str], folder: Path) -> Any:
    """Train one SentencePiece model of both sides' text, with T5's special tokens."""
    (folder / "spiece.model").write_bytes(_pieces([*sources, *targets], 4000, pad_id=0, eos_id=1, unk_id=2, bos_id=-1))
    return T5Tokenizer.from_pretrained(folder, model_max_length=MAX_LENGTH)


def t5_model(tokenizer: Any) -> Any:
    """Return a model as T5 is, with the gated feed-forward of its version 1.1, but small."""
    assert len(tokenizer) <= T5_VOCABULARY
    settings: dict[str, Any] = dict(
        vocab_size=T5_VOCABULARY,
        d_model=128,
        d_kv=32,
        num_heads=4,
        num_layers=3,
        num_decoder_layers=3,
        d_ff=384,
        feed_forward_proj="gated-gelu",
        dropout_rate=0.1,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        task_specific_params={T5_TASK: {"max_length": MAX_LENGTH, "num_beams": 4, "prefix": T5_PREFIX}},
    )
    model: Any = T5ForConditionalGeneration(T5Config(**settings))
    model.generation_config.max_length = MAX_LENGTH
    return model


def _pieces(texts: Sequence[str], size: int, **settings: Any) -> bytes:
    """Train a unigram model and return its file."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        vocab_size=size,
        model_type="unigram",
        character_coverage=1.0,
        num_threads=1,
        minloglevel=1,
        **settings,
    )
    return model.getvalue()


T5_TASK = "translation_en_to_de"
T5_PREFIX = "translate English to German: "
FAMILIES = {
    "marian": Family("", marian_tokenizer, marian_model, 2e-3, 7, 64, has_zero_start=True),
    "t5": Family(T5_PREFIX, t5_tokenizer, t5_model, 1e-2, 5, 32, has_relative_steps=True, task=T5_TASK),
}
