"""Results and scores: plain, frozen data, and its conversion from messages."""

import uuid
from dataclasses import dataclass
from typing import Literal

from dragoman.client.errors import InternalError
from dragoman.client.request import check_text, fill
from dragoman.v1 import generation_pb2

FinishReason = Literal["eos", "length"]

_FINISH_REASONS: dict[int, FinishReason] = {
    generation_pb2.FINISH_REASON_EOS: "eos",
    generation_pb2.FINISH_REASON_LENGTH: "length",
}


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request, end-of-sequence included.

    Attributes:
        source_tokens: Tokens the encoder read.
        generated_tokens: Tokens generated for all answers, the forced prefix not.
    """

    source_tokens: int
    generated_tokens: int


@dataclass(frozen=True, slots=True)
class Timings:
    """Time of a request in the parts of the server, in seconds, without the network.

    Attributes:
        queue_seconds: From arrival at the engine until admission to a slot.
        prefill_seconds: Encoder pass.
        decode_seconds: First decode step to last.
        time_to_first_token_seconds: From arrival at the server until the first token.
        total_seconds: From arrival at the server until the answer left.
    """

    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    time_to_first_token_seconds: float
    total_seconds: float


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """A token and its log-probability.

    Attributes:
        token: Its id.
        piece: Its text in UTF-8, which may be a part of a character; empty for end-of-sequence.
        log_prob: Natural logarithm of its probability, before temperature, penalties and suppression.
        top: The likeliest tokens at its position, likeliest first; empty unless asked for, and for those tokens themselves.
    """

    token: int
    piece: bytes
    log_prob: float
    top: tuple["TokenLogProb", ...] = ()


@dataclass(frozen=True, slots=True)
class Answer:
    """One of a request's answers.

    Attributes:
        text: The answer.
        tokens: Its token ids, those of the forced prefix included, end-of-sequence not.
        finish_reason: As `Result.finish_reason`.
        score: Sum of the generated tokens' log-probabilities over their number to the power `length_penalty`.
        log_probs: One for each generated token, end-of-sequence included, the forced prefix not; empty unless asked for.
        unmet_terms: Sources of the terms in the text that the answer does not have, or not as often.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    score: float
    log_probs: tuple[TokenLogProb, ...] = ()
    unmet_terms: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Segment:
    """A part of a divided text that was answered alone.

    Attributes:
        source_start, source_end: Its place in the text, in characters.
        target_start, target_end: The place of its answer in `Result.text`.
        score: As `Answer.score`.
        is_cut: Whether its sentence was too long for the model and goes on in the next segment.
    """

    source_start: int
    source_end: int
    target_start: int
    target_end: int
    score: float
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Result:
    """The answer to a request.

    Attributes:
        text: The best answer; of samples the first drawn.
        tokens: Its token ids, those of the forced prefix included, end-of-sequence not.
        finish_reason: `eos` if the model ended the sequence, `length` if `max_new_tokens` were generated.
        is_truncated: Whether the source was cut to the model's limit.
        model: The model that answered.
        model_version: Version of its bundle.
        request_id: The request's id, as in the server's log.
        usage: Tokens read and generated.
        timings: Where the time went.
        answers: All answers, the one above first: beams by falling score, samples as drawn, alternatives by falling
            log-probability of the token they differ in.
        seed: Seed of the samples; None without sampling.
        shortlist_tokens: Tokens that the answers were chosen from; 0 for the model's whole vocabulary.
        warnings: Warnings for a person, such as that the text has more sentences than the model takes at a time.
        segments: Parts of a text that was divided, see `Search.split`; scores are then means over them.
    """

    text: str
    tokens: tuple[int, ...]
    finish_reason: FinishReason
    is_truncated: bool
    model: str
    model_version: str
    request_id: str
    usage: Usage
    timings: Timings
    answers: tuple[Answer, ...]
    seed: int | None = None
    shortlist_tokens: int = 0
    warnings: tuple[str, ...] = ()
    segments: tuple[Segment, ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of the first answer that is streamed.

    Attributes:
        text: Text that follows what came before; never half a character, may be empty.
        tokens: Token ids that follow those that came before.
        result: The whole answer, in the last piece only.
    """

    text: str
    tokens: tuple[int, ...]
    result: Result | None = None


def blank_result(model: str) -> Result:
    """Return the result for a blank text, which is not sent to a server: one empty answer."""
    return Result(
        text="",
        tokens=(),
        finish_reason="eos",
        is_truncated=False,
        model=model,
        model_version="",
        request_id="",
        usage=Usage(0, 0),
        timings=Timings(0.0, 0.0, 0.0, 0.0, 0.0),
        answers=(Answer("", (), "eos", 0.0),),
    )


def result_from_proto(message: generation_pb2.GenerateResponse) -> Result:
    """Convert an answer; raises `InternalError` if its finish reason is unknown."""
    return Result(
        text=message.text,
        tokens=tuple(message.tokens),
        finish_reason=_finish_reason(message.finish_reason, message.request_id),
        is_truncated=message.is_truncated,
        model=message.model,
        model_version=message.model_version,
        request_id=message.request_id,
        usage=Usage(message.usage.source_tokens, message.usage.generated_tokens),
        timings=Timings(
            queue_seconds=message.timings.queue_seconds,
            prefill_seconds=message.timings.prefill_seconds,
            decode_seconds=message.timings.decode_seconds,
            time_to_first_token_seconds=message.timings.time_to_first_token_seconds,
            total_seconds=message.timings.total_seconds,
        ),
        answers=tuple(_answer_from_proto(answer, message.request_id) for answer in message.answers),
        seed=message.seed if message.HasField("seed") else None,
        shortlist_tokens=message.shortlist_tokens,
        warnings=tuple(message.warnings),
        segments=tuple(
            Segment(one.source_start, one.source_end, one.target_start, one.target_end, one.score, one.is_cut)
            for one in message.segments
        ),
    )


def _answer_from_proto(message: generation_pb2.Answer, request_id: str) -> Answer:
    return Answer(
        text=message.text,
        tokens=tuple(message.tokens),
        finish_reason=_finish_reason(message.finish_reason, request_id),
        score=message.score,
        log_probs=tuple(map(_log_prob_from_proto, message.log_probs)),
        unmet_terms=tuple(message.unmet_terms),
    )


def _log_prob_from_proto(message: generation_pb2.TokenLogProb) -> TokenLogProb:
    return TokenLogProb(message.token, message.piece, message.log_prob, tuple(map(_log_prob_from_proto, message.top)))


def _finish_reason(number: int, request_id: str) -> FinishReason:
    reason = _FINISH_REASONS.get(number)
    if reason is None:
        problem = f"the answer's finish_reason {number} is unknown; the server may be newer than this client"
        raise InternalError(problem, request_id)
    return reason


def piece_from_proto(message: generation_pb2.GenerateStreamResponse) -> Piece:
    """Convert a part of an answer; raises as `result_from_proto`."""
    result = result_from_proto(message.result) if message.HasField("result") else None
    return Piece(message.text, tuple(message.tokens), result)


@dataclass(frozen=True, slots=True)
class Alignment:
    """The encoder-decoder attention, averaged over heads.

    Attributes:
        source_pieces: Texts of the source's tokens in UTF-8, end-of-sequence included; the target's are in `Score.tokens`.
        weights: A row for each target token with a weight for each source token; each row sums to 1.
    """

    source_pieces: tuple[bytes, ...]
    weights: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Score:
    """The likelihood of a target by a model.

    Attributes:
        log_prob: Sum of the target tokens' log-probabilities, end-of-sequence included.
        score: The same divided by their number to the power `length_penalty`.
        tokens: The target's tokens, end-of-sequence included.
        alignment: If it was asked for, else None.
        word_alignment: If it was asked for, links `i-j` of source word i and target word j, with spaces between; else None.
        source_tokens: Tokens of the source, end-of-sequence included.
        model: The model that scored.
        model_version: Version of its bundle.
        request_id: The request's id, as in the server's log.
    """

    log_prob: float
    score: float
    tokens: tuple[TokenLogProb, ...]
    alignment: Alignment | None
    word_alignment: str | None
    source_tokens: int
    model: str
    model_version: str
    request_id: str


def score_request(text: str, target: str, request_id: str | None, **fields: object) -> generation_pb2.ScoreRequest:
    """Return the message; without an id it gets one here. Raises `TypeError` for texts that are no strings, else as `fill`."""
    for name, value in (("text", text), ("target", target)):
        check_text(name, value, "; call score once for each pair")
    request_id = request_id or uuid.uuid4().hex
    values = {"text": text, "target": target, "request_id": request_id, **fields}
    return fill(generation_pb2.ScoreRequest(), values, request_id)


def score_from_proto(message: generation_pb2.ScoreResponse, request: generation_pb2.ScoreRequest) -> Score:
    """Convert an answer to a request; raises `InternalError` if the alignment has another size than it says."""
    return Score(
        log_prob=message.log_prob,
        score=message.score,
        tokens=tuple(map(_log_prob_from_proto, message.tokens)),
        alignment=_alignment_from_proto(message) if request.return_alignment else None,
        word_alignment=message.word_alignment if request.return_word_alignment else None,
        source_tokens=message.usage.source_tokens,
        model=message.model,
        model_version=message.model_version,
        request_id=message.request_id,
    )


def _alignment_from_proto(message: generation_pb2.ScoreResponse) -> Alignment:
    alignment = message.alignment
    rows, columns = alignment.num_target_tokens, alignment.num_source_tokens
    if len(alignment.weights) != rows * columns:
        problem = f"the answer's alignment has {len(alignment.weights)} weights for {rows} target and {columns} source tokens"
        raise InternalError(problem, message.request_id)
    weights = list(alignment.weights)
    return Alignment(
        tuple(alignment.source_pieces), tuple(tuple(weights[row * columns : (row + 1) * columns]) for row in range(rows))
    )
