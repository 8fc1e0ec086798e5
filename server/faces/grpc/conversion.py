"""Between the messages of `dragoman.v1` and what the core takes and gives; the fields of requests have the same names."""

from collections.abc import Iterator, Sequence

from google.protobuf.message import Message

from dragoman.server.core.answers import Generated, Piece, TokenLogProb
from dragoman.server.core.requests import GenerateRequest, ScoreRequest
from dragoman.server.core.scoring import PairScores
from dragoman.server.errors import InvalidRequest
from dragoman.v1 import generation_pb2

FINISH_REASONS = {"eos": generation_pb2.FINISH_REASON_EOS, "length": generation_pb2.FINISH_REASON_LENGTH}
# What a message that carries an answer may have around it: an id, twice, and lengths.
ENVELOPE_BYTES = 512


def to_generate_request(message: generation_pb2.GenerateRequest) -> GenerateRequest:
    """Return the request; what the message does not say is absent."""
    given = {field.name: value for field, value in message.ListFields()}
    if "suppressed_tokens" in given:
        given["suppressed_tokens"] = tuple(given["suppressed_tokens"])
    return GenerateRequest(**given)


def to_score_request(message: generation_pb2.ScoreRequest) -> ScoreRequest:
    """Return the request; what the message does not say is absent."""
    return ScoreRequest(**{field.name: value for field, value in message.ListFields()})


def to_response(generated: Generated, max_message_bytes: int) -> generation_pb2.GenerateResponse:
    """Return the message of an answer.

    Raises:
        InvalidRequest: If it is larger than a message may be.
    """
    best, timings = generated.best, generated.timings
    response = generation_pb2.GenerateResponse(
        request_id=generated.request_id,
        model=generated.model,
        model_version=generated.model_version,
        text=best.text,
        tokens=best.tokens,
        finish_reason=FINISH_REASONS[best.finish_reason],
        is_truncated=generated.is_truncated,
        usage=generation_pb2.Usage(source_tokens=generated.source_tokens, generated_tokens=generated.generated_tokens),
        timings=generation_pb2.Timings(
            queue_seconds=timings.queue_seconds,
            prefill_seconds=timings.prefill_seconds,
            decode_seconds=timings.decode_seconds,
            time_to_first_token_seconds=timings.time_to_first_token_seconds,
            total_seconds=timings.total_seconds,
        ),
        answers=[
            generation_pb2.Answer(
                text=answer.text,
                tokens=answer.tokens,
                finish_reason=FINISH_REASONS[answer.finish_reason],
                score=answer.score,
                log_probs=_log_probs(answer.log_probs),
            )
            for answer in generated.answers
        ],
        seed=generated.seed,
    )
    check_size(response, max_message_bytes)
    return response


def to_stream_response(piece: Piece, max_message_bytes: int) -> generation_pb2.GenerateStreamResponse:
    """Return the message of a piece of an answer.

    Raises:
        InvalidRequest: If it is the last one and larger than a message may be.
    """
    if piece.result is None:
        return generation_pb2.GenerateStreamResponse(text=piece.text, tokens=piece.tokens)
    result = to_response(piece.result, max_message_bytes)
    last = generation_pb2.GenerateStreamResponse(text=piece.text, tokens=piece.tokens, result=result)
    check_size(last, max_message_bytes)
    return last


def to_score_response(scores: PairScores, max_message_bytes: int) -> generation_pb2.ScoreResponse:
    """Return the message of a pair's scores.

    Raises:
        InvalidRequest: If it is larger than a message may be.
    """
    response = generation_pb2.ScoreResponse(
        request_id=scores.request_id,
        model=scores.model,
        model_version=scores.model_version,
        log_prob=scores.log_prob,
        score=scores.score,
        tokens=_log_probs(scores.tokens),
        word_alignment=scores.word_alignment,
        usage=generation_pb2.Usage(source_tokens=scores.source_tokens),
    )
    if (alignment := scores.alignment) is not None:
        response.alignment.num_target_tokens, response.alignment.num_source_tokens = alignment.weights.shape
        response.alignment.weights.extend(alignment.weights.ravel().tolist())
        response.alignment.source_pieces.extend(alignment.source_pieces)
    check_size(response, max_message_bytes)
    return response


def check_size(message: Message, max_message_bytes: int) -> None:
    """Do nothing if an answer can be sent. gRPC itself would end the call, a whole batch with it, as if the server were overloaded.

    Raises:
        InvalidRequest: If it is larger than a message may be.
    """
    size = message.ByteSize() + ENVELOPE_BYTES
    if size > max_message_bytes:
        limit = f"max_message_bytes of the server is {max_message_bytes}"
        raise InvalidRequest("request", f"its answer takes {size} bytes; {limit}. Ask for fewer answers, tokens or details")


def _log_probs(told: Sequence[TokenLogProb]) -> Iterator[generation_pb2.TokenLogProb]:
    for token, piece, log_prob, top in told:
        message = generation_pb2.TokenLogProb(token=token, piece=piece, log_prob=log_prob)
        if top:
            message.top.extend(_log_probs(top))
        yield message
