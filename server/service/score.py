"""Scores of a given target, and the alignment between its words and the source's.

Definitions. A target is tokenised as in training: its text, then end-of-sequence; an empty target is end-of-sequence alone. Each
of its T tokens has the log-probability (natural logarithm) that the model gives it after the source and the true tokens before it,
as greedy search reports it. `log_prob` is their sum, `score` is log_prob / T^length_penalty, the score in beam search of an answer
with these tokens that did not have to be cut short. Template and language may force every answer to begin with f tokens: these come
before the target and have no log-probabilities, but the length in the score is T + f then. After a prompt, the target continues it:
its text is tokenised as the rest of one text, and its first token follows the whole prompt.

The alignment has a row for each target token and a column for each source token, end-of-sequence included in both: the weights of
the encoder-decoder attention in the step that generates the row's token, averaged over heads, of one decoder layer or averaged over
all. Tokens around a source have columns too, but are part of no word.

Words are the runs of characters between white space (`str.split` of Python); punctuation belongs to the word it touches. A token
belongs to the word of its first character that is not white space; tokens of white space alone, and those without text, such as
end-of-sequence and languages, belong to none. Each target word j is linked to one source word: the i for which the attention,
summed over the rows of j's tokens and the columns of i's tokens, is the largest; of equals the first.
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
from dragoman.server.service.requests import ScoreRequest
from dragoman.server.service.search_options import check_length_penalty

if TYPE_CHECKING:
    from dragoman.server.models.loaded import LoadedModel


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """The attention between target and source tokens, end-of-sequence included.

    Attributes:
        weights: `[T, S]`.
        source_pieces: Bytes of each source token, S of them.
    """

    weights: NDArray[np.float32]
    source_pieces: Sequence[bytes]


@dataclass(frozen=True, slots=True, eq=False)
class Scores:
    """The whole answer to a score request.

    Attributes:
        request_id: The caller's or the server's.
        model: Name of the model.
        model_version: Of its bundle.
        log_prob: Of the whole target.
        score: The same by its length.
        tokens: Each target token, end-of-sequence included.
        source_tokens: Tokens of the source.
        alignment: If asked for.
        word_alignment: Links between words, if asked for; else empty.
    """

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
    """Return the answer to a score request.

    Args:
        request: The request.
        call: Its context.
        model: Its model.
        sequence: The request as the engine had it.
        template: Around its texts.
        scored: The engine's outcome, with log-probabilities.
    """
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
    """Return the links `i-j` of source word i and target word j, sorted, with spaces between: Pharaoh's format.

    Args:
        attention: `[T, S]`.
        source_pieces: Bytes of each source token, S of them.
        target_pieces: Bytes of each target token, T of them.
        task: Text before the source's own, tokenised with it; its words are not counted and have no links.
    """
    # The last word of a task that does not end in white space goes on in the text.
    num_before = len(task.split()) - (bool(task.split()) and not task[-1].isspace())
    sources = [None if word is None or word < num_before else word - num_before for word in token_words(source_pieces)]
    rows, columns = _membership(token_words(target_pieces)), _membership(sources)
    mass = rows @ attention.astype(np.float64) @ columns.T  # [target words, source words]
    if not mass.size:
        return ""
    links = sorted((int(i), j) for j, i in enumerate(mass.argmax(1)))
    return " ".join(f"{i}-{j}" for i, j in links)


def token_words(pieces: Sequence[bytes]) -> list[int | None]:
    """Return the word of each token, from 0, None for a token that belongs to none.

    Args:
        pieces: Bytes of each token; together the text, though each may end inside a character.
    """
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
