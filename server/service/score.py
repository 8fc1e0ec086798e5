"""Score requests and word alignment."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dragoman.server.engine import messages
from dragoman.server.errors import InvalidRequest
from dragoman.server.service.answer_size import AnswerLimit, check_scores
from dragoman.server.service.answers import TokenLogProb, token_log_probs
from dragoman.server.service.context import Call
from dragoman.server.service.defaults import has_special_tokens
from dragoman.server.service.languages import Frame
from dragoman.server.service.ports import Model
from dragoman.server.service.requests import ScoreRequest
from dragoman.server.service.search_options import check_length_penalty
from dragoman.server.service.validation import Validator, check_deadline, check_priority


def token_words(pieces: Sequence[bytes]) -> list[int | None]:
    """Return the word of each token, from 0, None for a token that belongs to none.

    Args:
        pieces: What the tokens stand for; together the text, though each may end inside a character.
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


def word_alignment(
    attention: NDArray[np.float32], source_pieces: Sequence[bytes], target_pieces: Sequence[bytes], task: str = ""
) -> str:
    """Return the links `i-j` of source word i and target word j, sorted, with spaces between: Pharaoh's format.

    Args:
        attention: `[T, S]`.
        source_pieces: Bytes of each source token, S of them.
        target_pieces: Bytes of each target token, T of them.
        task: What comes before the source's own text and is tokenised with it; its words are not counted and have no links.
    """
    num_before = _num_words_before(task)
    sources = [None if word is None or word < num_before else word - num_before for word in token_words(source_pieces)]
    rows, columns = _membership(token_words(target_pieces)), _membership(sources)
    mass = rows @ attention.astype(np.float64) @ columns.T  # [target words, source words]
    if not mass.size:
        return ""
    links = sorted((int(i), j) for j, i in enumerate(mass.argmax(1)))
    return " ".join(f"{i}-{j}" for i, j in links)


def _num_words_before(task: str) -> int:
    """Return how many words end within a task; the last of one that does not end in white space goes on in the text."""
    words = task.split()
    return len(words) - (bool(words) and not task[-1].isspace())


def _membership(words: Sequence[int | None]) -> NDArray[np.float64]:
    """Return `[words, tokens]`, 1 where a token belongs to a word."""
    count = max((word for word in words if word is not None), default=-1) + 1
    table = np.zeros((count, len(words)))
    for token, word in enumerate(words):
        if word is not None:
            table[word, token] = 1
    return table


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """The attention between the tokens of a pair, end-of-sequence included.

    Attributes:
        weights: `[T, S]`.
        source_pieces: Bytes of each source token, S of them.
    """

    weights: NDArray[np.float32]
    source_pieces: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class PreparedPair:
    """A pair for the engine, and what only its answer needs to know about it.

    Attributes:
        request: For the engine.
        frame: What is said around its texts.
    """

    request: messages.ScoreRequest
    frame: Frame

    @property
    def target_ids(self) -> Sequence[int]:
        """Tokens that are told of: those of the target alone, end-of-sequence included."""
        return self.request.target_ids[len(self.frame.target_prefix) :]


@dataclass(frozen=True, slots=True, eq=False)
class PairScores:
    """All that a pair is answered with.

    Attributes:
        request_id: The caller's or ours.
        model: Name of the model that scored.
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


async def prepare_pair(
    request: ScoreRequest,
    model: Model,
    validator: Validator,
    *,
    arrival: float,
    remaining_seconds: float | None,
    share: messages.Share = messages.ANYBODY,
    limit: AnswerLimit | None = None,
) -> PreparedPair:
    """Return the pair for the engine.

    Args:
        request: What the caller sent.
        model: The model it is for.
        validator: What tokenises.
        arrival: `time.monotonic()` when it came.
        remaining_seconds: Until its deadline, None if it has none.
        share: Whose it is.
        limit: What can be answered; None for anything.

    Raises:
        InvalidRequest: Naming the field and the limit.
        DeadlineExceeded: If the deadline has passed already.
    """
    deadline = check_deadline(remaining_seconds)
    priority = check_priority(request.priority)
    check_length_penalty(request)
    layer = _check_layer(request, model)
    frame = model.frames.find(request.source_language, request.target_language)
    validator.check_target_length(request.target, model)
    has_special = has_special_tokens(request, model.manifest, model.tokenizers)
    source = await validator.tokenise_source(request.text, model, frame, has_special=has_special)
    target_ids = await validator.tokenise_target(request.target, model, frame, source)
    pair = messages.ScoreRequest(
        id=model.engine.next_id(),
        source_ids=source.ids,
        target_ids=target_ids,
        arrival=arrival,
        deadline=deadline,
        priority=priority,
        is_aligned=request.return_alignment or request.return_word_alignment,
        alignment_layer=layer,
        share=share,
        decoder_start_id=source.decoder_start_id,
    )
    if limit is not None and request.return_alignment:
        check_scores(pair, model.tokenizers, model.manifest.target_vocab_size, limit)
    return PreparedPair(pair, frame)


def to_scores(call: Call, model: Model, request: ScoreRequest, prepared: PreparedPair, scored: messages.Scored) -> PairScores:
    """Return what a pair is answered with.

    Args:
        call: The request's record.
        model: What scored.
        request: What the caller sent.
        prepared: The pair.
        scored: What the engine answered.
    """
    pair, target_ids = prepared.request, prepared.target_ids
    num_source, num_fed = len(pair.source_ids), len(pair.target_ids)
    num_forced = num_fed - len(target_ids)
    log_probs = scored.log_probs[num_forced:]
    log_prob = math.fsum(log_probs)
    alignment, words = None, ""
    if pair.is_aligned:
        weights = np.frombuffer(scored.alignment, np.float32).reshape(num_fed, num_source)[num_forced:]
        if request.return_alignment:
            source_pieces = [model.tokenizers.source.token_bytes(token) for token in pair.source_ids]
            alignment = Alignment(weights, source_pieces)
        if request.return_word_alignment:
            source_words = [model.tokenizers.source.word_bytes(token) for token in pair.source_ids]
            target_words = [model.tokenizers.target.word_bytes(token) for token in target_ids]
            words = word_alignment(weights, source_words, target_words, prepared.frame.task)
    return PairScores(
        request_id=call.request_id,
        model=model.name,
        model_version=model.version,
        log_prob=log_prob,
        score=log_prob / num_fed ** check_length_penalty(request, model.manifest.defaults.length_penalty),
        tokens=tuple(token_log_probs(model.tokenizers.target, target_ids, log_probs)),
        source_tokens=prepared.frame.num_source_tokens(pair.source_ids),
        alignment=alignment,
        word_alignment=words,
    )


def _check_layer(request: ScoreRequest, model: Model) -> int | None:
    """Return the layer that the alignment is taken from, None for the mean of all."""
    num_layers = model.manifest.attention_layers
    asked = [field for field in ("return_alignment", "return_word_alignment") if getattr(request, field)]
    if not num_layers and (asked or request.alignment_layer is not None):
        field = asked[0] if asked else "alignment_layer"
        raise InvalidRequest(field, f"model {model.name} has no attention between source and target to tell")
    if request.alignment_layer is None:
        return None
    if not asked:
        raise InvalidRequest("alignment_layer", "goes with return_alignment or return_word_alignment only")
    if not 0 <= request.alignment_layer < num_layers:
        raise InvalidRequest(
            "alignment_layer",
            f"{request.alignment_layer} is not in 0 to {num_layers - 1}, the layers of model {model.name} that attend to a source",
        )
    return request.alignment_layer
