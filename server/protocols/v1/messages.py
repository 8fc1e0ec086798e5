"""Conversion between dragoman.v1 messages and the service's requests, answers and errors."""

import asyncio
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import RequestInfo, RetryInfo
from msgspec.structs import asdict

from dragoman.server.errors import InvalidRequest, ServiceError
from dragoman.server.service.answers import AnswerShape, Generated, Piece, ScoresShape, TokenLogProb
from dragoman.server.service.requests import GenerateRequest, ScoreRequest, Term, check_num_suppressed
from dragoman.server.service.score import Scores
from dragoman.server.service.terms import check_counts
from dragoman.v1 import generation_pb2
from dragoman.v1.generation_pb2 import Error

# A status is sent twice in HTTP/2 headers, which proxies limit; it may quote the caller's text.
MAX_MESSAGE_BYTES = 1024


def to_message(error: ServiceError, request_id: str = "") -> Error:
    """Return an error as the contract's `Error`, which can be read as `google.rpc.Status`.

    Details: `google.rpc.RetryInfo`, rounded up to milliseconds, if a retry makes sense; `google.rpc.RequestInfo` if there is an id.
    """
    status = Error(code=Code.Value(error.code), message=_shorten(error.message))
    if error.retry_after_seconds is not None:
        milliseconds = max(1, math.ceil(round(error.retry_after_seconds * 1000, 6)))
        delay = Duration(seconds=milliseconds // 1000, nanos=milliseconds % 1000 * 1_000_000)
        status.details.append(_pack(RetryInfo(retry_delay=delay)))
        status.retry_after_seconds = milliseconds / 1000
    if request_id:
        status.details.append(_pack(RequestInfo(request_id=request_id)))
    return status


def _pack(message: RetryInfo | RequestInfo) -> AnyMessage:
    packed = AnyMessage()
    packed.Pack(message)
    return packed


def _shorten(message: str) -> str:
    encoded = message.encode(errors="backslashreplace")  # file names may have lone surrogates
    if len(encoded) <= MAX_MESSAGE_BYTES:
        return encoded.decode()
    return encoded[:MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."


# Fields beside the answer: two ids, model name and version, counts, times.
ANSWER_ENVELOPE_BYTES = 1024
# A 1-byte tag and 4 or 8 bytes.
FLOAT_BYTES, DOUBLE_BYTES = 5, 9
# A space and `i-j`, with six-digit numbers.
LINK_BYTES = 14


@dataclass(frozen=True, slots=True)
class MessageLimit:
    """Size limit of gRPC messages, with its setting's name; an `AnswerLimit`."""

    max_bytes: int
    name: str = "max_message_bytes"

    def answer_bytes(self, shape: AnswerShape) -> int:
        """Return an upper bound on the size of a `GenerateResponse` and its envelope."""
        plain = _field(shape.text_bytes) + _field(shape.num_tokens * _varint(shape.max_token))
        largest = _log_prob_bytes(shape.piece_bytes, shape.max_token)
        tops = shape.num_top * (_field(largest) - shape.piece_bytes) + shape.top_piece_bytes
        log_prob = _field(largest + tops) if shape.num_told else 0
        answer = _field(plain + DOUBLE_BYTES + 2 + shape.num_told * log_prob)  # 2: the finish reason
        return ANSWER_ENVELOPE_BYTES + plain + shape.num_answers * answer

    def scores_bytes(self, shape: ScoresShape) -> int:
        """Return an upper bound on the size of a `ScoreResponse`."""
        log_probs = shape.num_target * _field(_log_prob_bytes(0, shape.max_token)) + 3 * shape.num_target + shape.target_bytes
        links = shape.num_target * LINK_BYTES
        weights = _field(4 * shape.num_target * shape.num_source)
        return (
            ANSWER_ENVELOPE_BYTES + log_probs + links + _field(weights + shape.source_bytes + shape.num_source * _field(0) * 2 + 16)
        )


def _log_prob_bytes(piece_bytes: int, max_token: int) -> int:
    """Return the size of a `TokenLogProb` without `top`."""
    return 1 + _varint(max_token) + _field(piece_bytes) + FLOAT_BYTES


def _field(num_bytes: int) -> int:
    """Return the size of a length-delimited field, tag and length included."""
    return 1 + _varint(num_bytes) + num_bytes


def _varint(number: int) -> int:
    """Return the size of a varint."""
    return max(1, (number.bit_length() + 6) // 7)


FINISH_REASONS = {"eos": generation_pb2.FINISH_REASON_EOS, "length": generation_pb2.FINISH_REASON_LENGTH}
# Message fields around an answer: an id, twice, and lengths.
ENVELOPE_BYTES = 512
# Written in a few milliseconds, before yielding to the event loop.
TOKENS_PER_SLICE = 2048
WEIGHTS_PER_SLICE = 65_536


def to_generate_request(message: generation_pb2.GenerateRequest) -> GenerateRequest:
    """Return the request of a message, without unset fields; raise `InvalidRequest` for too many suppressed tokens or terms."""
    fields = {field.name: value for field, value in message.ListFields()}
    if "suppressed_tokens" in fields:
        check_num_suppressed(len(fields["suppressed_tokens"]))  # before they are copied
        fields["suppressed_tokens"] = tuple(fields["suppressed_tokens"])
    if "terms" in fields:
        check_counts(fields["terms"])
        fields["terms"] = tuple(Term(term.source, tuple(term.targets), term.case_sensitive) for term in fields["terms"])
    return GenerateRequest(**fields)


def to_score_request(message: generation_pb2.ScoreRequest) -> ScoreRequest:
    """Return the request of a message, without unset fields."""
    return ScoreRequest(**{field.name: value for field, value in message.ListFields()})


async def write_response(generated: Generated, max_message_bytes: int, response: generation_pb2.GenerateResponse) -> None:
    """Write an answer into `response`, yielding to the event loop; raise `InvalidRequest` if it is too large."""
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
    for number, segment in enumerate(generated.segments, start=1):
        response.segments.add(**asdict(segment))
        if number % TOKENS_PER_SLICE == 0:
            await asyncio.sleep(0)
    num_written = 0
    for answer in generated.answers:
        written = response.answers.add(
            text=answer.text, tokens=answer.tokens, finish_reason=FINISH_REASONS[answer.finish_reason], score=answer.score
        )
        written.unmet_terms.extend(answer.unmet_terms)
        if answer.log_probs:
            num_written = await _write_log_probs(written.log_probs, answer.log_probs, num_written)
    check_size(response, max_message_bytes)


async def to_stream_response(piece: Piece, max_message_bytes: int) -> generation_pb2.GenerateStreamResponse:
    """Return the message of a piece; raise `InvalidRequest` if the last one is too large."""
    message = generation_pb2.GenerateStreamResponse(text=piece.text, tokens=piece.tokens)
    if piece.result is not None:
        await write_response(piece.result, max_message_bytes, message.result)
        check_size(message, max_message_bytes)
    return message


async def to_score_response(scores: Scores, max_message_bytes: int) -> generation_pb2.ScoreResponse:
    """Return the message of a pair's scores, yielding to the event loop; raise `InvalidRequest` if it is too large."""
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
    """Raise `InvalidRequest` with advice if an answer is too large; gRPC itself would end the whole call, a batch included."""
    size = message.ByteSize() + ENVELOPE_BYTES
    if size > max_message_bytes:
        limit = f"max_message_bytes of the server is {max_message_bytes}"
        raise InvalidRequest("request", f"its answer takes {size} bytes; {limit}" + (f". {advice}" if advice else ""))


async def _write_log_probs(messages: Any, log_probs: Iterable[TokenLogProb], num_added: int = 0) -> int:
    """Add a message per token, yielding to the event loop; return the number added since the last yield."""
    add = messages.add
    for token, piece, log_prob, top in log_probs:
        add_top = add(token=token, piece=piece, log_prob=log_prob).top.add
        for top_token, top_piece, top_log_prob, _ in top:
            add_top(token=top_token, piece=top_piece, log_prob=top_log_prob)
        num_added += 1 + len(top)
        if num_added >= TOKENS_PER_SLICE:
            num_added = 0
            await asyncio.sleep(0)
    return num_added
