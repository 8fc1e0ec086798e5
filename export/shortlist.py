"""Shortlists: the tokens that a model may choose from, and a decoder with an output projection for those alone.

A step of a model with a large vocabulary spends most of its time on tokens that a language never uses. A list that is fixed at
export is exact for the tokens it has, and independent of the batch.
"""

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import TypeVar

import torch
from torch import nn

from dragoman.export.arguments import ExportError
from dragoman.model.config import ModelConfig
from dragoman.model.generation import Languages, Template
from dragoman.model.networks.layers import Predictor
from dragoman.model.text.tokenizer import Tokenizer

BATCH_LINES = 1024
_Decoder = TypeVar("_Decoder", bound=Predictor)


def choose_shortlist(
    texts: Iterable[str],
    tokenizer: Tokenizer,
    config: ModelConfig,
    template: Template,
    languages: Languages | None,
    size: int | None = None,
) -> list[int]:
    """Return the ids of a shortlist, rising.

    They are the tokens of the texts; end-of-sequence and padding; what template and languages force answers to begin with; and
    every token that is a single byte or character, the unknown one included, so that whatever can be said at all still can.

    Args:
        texts: In the target language.
        tokenizer: Of the target.
        config: Of the model.
        template: What is said to it around every text.
        languages: Those it knows, if any.
        size: Keep so many tokens of the texts, the most frequent; of equals the lower id. By default all.

    Raises:
        ExportError: If the texts hold nothing.
    """
    counts = _count(texts, tokenizer)
    if not counts:
        raise ExportError("the shortlist's text is empty")
    kept = sorted(counts, key=lambda i: (-counts[i], i))[:size]
    return sorted({*kept, *needed_ids(tokenizer, config, template, languages)})


def needed_ids(tokenizer: Tokenizer, config: ModelConfig, template: Template, languages: Languages | None) -> set[int]:
    """Return the ids that every shortlist of a model holds."""
    forced = set(template.target_prefix).union(*(language.target_prefix for language in (languages.target if languages else ())))
    elements = {i for i in range(tokenizer.vocab_size) if _is_element(tokenizer.token_bytes(i))}
    return {config.eos_id, config.pad_id, *forced, *elements}


def _is_element(content: bytes) -> bool:
    """Tell whether a token is one byte or one character, spaces aside; special tokens, which say nothing, are not."""
    stripped = content.strip(b" ")
    return bool(content) and (len(stripped) <= 1 or len(stripped.decode("utf-8", "replace")) == 1)


def _count(texts: Iterable[str], tokenizer: Tokenizer) -> Counter[int]:
    counts: Counter[int] = Counter()
    lines = iter(texts)
    while batch := list(islice(lines, BATCH_LINES)):
        for ids in tokenizer.encode_batch(batch):
            counts.update(ids)
    return counts


def shortened(decoder: _Decoder, ids: Sequence[int]) -> _Decoder:
    """Return a decoder with the same layers whose logits are those of some tokens.

    Their values are the bits of the whole projection's; log-probabilities are normalised over these tokens alone.

    Args:
        decoder: Of a model in evaluation mode; it stays as it is.
        ids: Rising; padding is among them.
    """
    rows = torch.tensor(ids)
    short = copy.copy(decoder)
    for registry in ("_parameters", "_buffers", "_modules"):  # a copied module shares these
        short.__dict__[registry] = dict(decoder.__dict__[registry])
    weight = decoder.output_weight.detach()[rows]
    short.projection = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    short.projection.weight = nn.Parameter(weight, requires_grad=False)
    if decoder.output_bias is not None:
        short.output_bias = nn.Parameter(decoder.output_bias.detach()[rows], requires_grad=False)
    short.padding_logits = decoder.padding_logits[rows]
    short.pad_ids = torch.searchsorted(rows, decoder.pad_ids)
    return short
