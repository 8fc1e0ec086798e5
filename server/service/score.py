"""Scores of a given target, and word alignment.

Scores: a target is its text and end-of-sequence (an empty target is end-of-sequence alone). Each of its T tokens has the natural
log-probability given the source and the true tokens before it. `log_prob` is their sum, `score` is log_prob / T^length_penalty, the
beam-search score of an uncut answer with these tokens. f tokens forced by template and language come before the target without
log-probabilities, but then the score's length is T + f. After a prompt, the target is tokenised as the rest of one text.

Alignment: encoder-decoder attention weights `[T, S]`, end-of-sequence included in both, of the step that generates the row's token,
averaged over heads, of one decoder layer or averaged over all. Tokens around a source have columns too, but are part of no word.

Words are separated by white space (`str.split`); punctuation belongs to the word it touches. A token belongs to the word of its
first character that is not white space; tokens of white space alone or without text belong to none. Each target word j is linked to
the source word i with the largest attention, summed over the rows of j's tokens and the columns of i's tokens; the first of equals.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from dragoman.server.engine import messages
from dragoman.server.service.answers import TokenLogProb, token_log_probs
from dragoman.server.service.context import Call
from dragoman.server.service.languages import PromptTemplate
from dragoman.server.service.requests import ScoreRequest, check_length_penalty

if TYPE_CHECKING:
    from dragoman.server.models.loaded import LoadedModel


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """Attention weights `[T, S]` of target and source tokens, end-of-sequence included, and the source tokens' bytes."""

    weights: NDArray[np.float32]
    source_pieces: Sequence[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The whole answer to a score request; see the module. `word_alignment` is empty unless requested."""

    request_id: str
    model: str
    model_version: str
    log_prob: float
    score: float
    tokens: Sequence[TokenLogProb]
    source_tokens: int
    alignment: Alignment | None
    word_alignment: str


def to_scores(
    request: ScoreRequest,
    call: Call,
    model: "LoadedModel",
    sequence: messages.ScoreRequest,
    template: PromptTemplate,
    scored: messages.Scored,
) -> Scores:
    """Return the answer to a score request."""
    num_source, num_fed, num_forced = len(sequence.source_ids), len(sequence.target_ids), len(template.target_prefix)
    target_ids, log_probs = sequence.target_ids[num_forced:], scored.log_probs[num_forced:]
    log_prob = math.fsum(log_probs)
    source, target = model.tokenizers.source, model.tokenizers.target
    alignment, words = None, ""
    if sequence.is_aligned:
        weights = np.frombuffer(scored.alignment, np.float32).reshape(num_fed, num_source)[num_forced:]
        if request.return_alignment:
            alignment = Alignment(weights, [*map(source.token_bytes, sequence.source_ids)])
        if request.return_word_alignment:
            source_words, target_words = map(source.word_bytes, sequence.source_ids), map(target.word_bytes, target_ids)
            words = word_alignment(weights, [*source_words], [*target_words], template.task)
    return Scores(
        request_id=call.request_id,
        model=model.name,
        model_version=model.version,
        log_prob=log_prob,
        score=log_prob / num_fed ** check_length_penalty(request, model.manifest.defaults.length_penalty),
        tokens=tuple(token_log_probs(target, target_ids, log_probs)),
        source_tokens=call.source_tokens,
        alignment=alignment,
        word_alignment=words,
    )


def word_alignment(
    attention: NDArray[np.float32], source_pieces: Sequence[bytes], target_pieces: Sequence[bytes], task: str = ""
) -> str:
    """Return the word links `i-j` (source word i, target word j), sorted and separated by spaces (Pharaoh format).

    `attention` is `[T, S]`, pieces are the bytes of each token. Words of `task`, text before the source, are not counted.
    """
    # The last word of a task that does not end in white space continues in the text.
    num_before = len(task.split()) - (bool(task.split()) and not task[-1].isspace())
    sources = [None if word is None or word < num_before else word - num_before for word in token_words(source_pieces)]
    rows, columns = _membership(token_words(target_pieces)), _membership(sources)
    mass = rows @ attention.astype(np.float64) @ columns.T  # [target words, source words]
    if not mass.size:
        return ""
    links = sorted((int(i), j) for j, i in enumerate(mass.argmax(1)))
    return " ".join(f"{i}-{j}" for i, j in links)


def token_words(pieces: Sequence[bytes]) -> list[int | None]:
    """Return the word index of each token, None for a token of no word; `pieces` joined are the text, split at any byte."""
    text = b"".join(pieces).decode("utf-8", "surrogateescape")
    word_of_byte: list[int | None] = []
    word, is_inside = -1, False
    for character in text:
        is_space = character.isspace()
        word += not (is_space or is_inside)
        is_inside = not is_space
        word_of_byte += [None if is_space else word] * len(character.encode("utf-8", "surrogateescape"))
    words: list[int | None] = []
    start = 0
    for piece in pieces:
        inside = (found for found in word_of_byte[start : start + len(piece)] if found is not None)
        words.append(next(inside, None))
        start += len(piece)
    return words


def _membership(words: Sequence[int | None]) -> NDArray[np.float64]:
    """Return `[words, tokens]`, 1 where a token belongs to a word."""
    count = max((word for word in words if word is not None), default=-1) + 1
    table = np.zeros((count, len(words)))
    for token, word in enumerate(words):
        if word is not None:
            table[word, token] = 1
    return table
