"""Between the messages of `dragoman.v1` and what the core takes and gives; the fields of requests have the same names."""

import asyncio
from collections.abc import Iterable
from typing import Any

from google.protobuf.message import Message

from dragoman.server.core.answers import Generated, Piece, TokenLogProb
from dragoman.server.core.requests import GenerateRequest, ScoreRequest
from dragoman.server.core.scoring import PairScores
from dragoman.server.core.search_options import check_num_suppressed
from dragoman.server.errors import InvalidRequest
from dragoman.v1 import generation_pb2

FINISH_REASONS = {"eos": generation_pb2.FINISH_REASON_EOS, "length": generation_pb2.FINISH_REASON_LENGTH}
# What a message that carries an answer may have around it: an id, twice, and lengths.
ENVELOPE_BYTES = 512
# What takes a few milliseconds to write.
TOKENS_PER_SLICE = 2048
WEIGHTS_PER_SLICE = 65_536


def to_generate_request(message: generation_pb2.GenerateRequest) -> GenerateRequest:
    """Return the request; what the message does not say is absent.

    Raises:
        InvalidRequest: If it has more tokens to suppress than are allowed.
    """
    given = {field.name: value for field, value in message.ListFields()}
    if "suppressed_tokens" in given:
        check_num_suppressed(len(given["suppressed_tokens"]))  # before anything is made of them
        given["suppressed_tokens"] = tuple(given["suppressed_tokens"])
    return GenerateRequest(**given)


def to_score_request(message: generation_pb2.ScoreRequest) -> ScoreRequest:
    """Return the request; what the message does not say is absent."""
    return ScoreRequest(**{field.name: value for field, value in message.ListFields()})


async def write_response(generated: Generated, max_message_bytes: int, response: generation_pb2.GenerateResponse) -> None:
    """Write an answer into its message; a large one in slices of time, between which others have theirs.

    Raises:
        InvalidRequest: If it is larger than a message may be.
    """
    best, timings = generated.best, generated.timings
    response.request_id = generated.request_id
    response.model = generated.model
    response.model_version = generated.model_version
    response.text = best.text
    response.tokens.extend(best.tokens)
    response.finish_reason = FINISH_REASONS[best.finish_reason]
    response.is_truncated = generated.is_truncated
    usage, times = response.usage, response.timings
    usage.source_tokens, usage.generated_tokens = generated.source_tokens, generated.generated_tokens
    times.queue_seconds, times.prefill_seconds = timings.queue_seconds, timings.prefill_seconds
    times.decode_seconds, times.total_seconds = timings.decode_seconds, timings.total_seconds
    times.time_to_first_token_seconds = timings.time_to_first_token_seconds
    if generated.seed is not None:
        response.seed = generated.seed
    if generated.shortlist_tokens:
        response.shortlist_tokens = generated.shortlist_tokens
    response.warnings.extend(generated.warnings)
    num_written = 0
    for answer in generated.answers:
        written = response.answers.add(
            text=answer.text, tokens=answer.tokens, finish_reason=FINISH_REASONS[answer.finish_reason], score=answer.score
        )
        if answer.log_probs:
            num_written = await _write_log_probs(written.log_probs, answer.log_probs, num_written)
    check_size(response, max_message_bytes)


async def to_stream_response(piece: Piece, max_message_bytes: int) -> generation_pb2.GenerateStreamResponse:
    """Return the message of a piece of an answer.

    Raises:
        InvalidRequest: If it is the last one and larger than a message may be.
    """
    message = generation_pb2.GenerateStreamResponse(text=piece.text, tokens=piece.tokens)
    if piece.result is not None:
        await write_response(piece.result, max_message_bytes, message.result)
        check_size(message, max_message_bytes)
    return message


async def to_score_response(scores: PairScores, max_message_bytes: int) -> generation_pb2.ScoreResponse:
    """Return the message of a pair's scores; a large one is made in slices of time.

    Raises:
        InvalidRequest: If it is larger than a message may be.
    """
    response = generation_pb2.ScoreResponse(
        request_id=scores.request_id,
        model=scores.model,
        model_version=scores.model_version,
        log_prob=scores.log_prob,
        score=scores.score,
        word_alignment=scores.word_alignment,
        usage=generation_pb2.Usage(source_tokens=scores.source_tokens),
    )
    await _write_log_probs(response.tokens, scores.tokens)
    if (alignment := scores.alignment) is not None:
        response.alignment.num_target_tokens, response.alignment.num_source_tokens = alignment.weights.shape
        weights = alignment.weights.ravel()
        for start in range(0, weights.size, WEIGHTS_PER_SLICE):
            response.alignment.weights.extend(weights[start : start + WEIGHTS_PER_SLICE].tolist())
            await asyncio.sleep(0)
        response.alignment.source_pieces.extend(alignment.source_pieces)
    check_size(response, max_message_bytes)
    return response


def check_size(message: Message, max_message_bytes: int, advice: str = "Ask for fewer answers, tokens or details") -> None:
    """Do nothing if an answer can be sent. gRPC itself would end the call, a whole batch with it, as if the server were overloaded.

    Raises:
        InvalidRequest: If it is larger than a message may be, with what to do about it.
    """
    size = message.ByteSize() + ENVELOPE_BYTES
    if size > max_message_bytes:
        limit = f"max_message_bytes of the server is {max_message_bytes}"
        raise InvalidRequest("request", f"its answer takes {size} bytes; {limit}" + (f". {advice}" if advice else ""))


async def _write_log_probs(messages: Any, told: Iterable[TokenLogProb], num_added: int = 0) -> int:
    """Add a message for each token; neighbours have their turn after every so many. Return how many there were since the last."""
    add = messages.add
    for token, piece, log_prob, top in told:
        add_top = add(token=token, piece=piece, log_prob=log_prob).top.add
        for top_token, top_piece, top_log_prob, _ in top:
            add_top(token=top_token, piece=top_piece, log_prob=top_log_prob)
        num_added += 1 + len(top)
        if num_added >= TOKENS_PER_SLICE:
            num_added = 0
            await asyncio.sleep(0)
    return num_added
