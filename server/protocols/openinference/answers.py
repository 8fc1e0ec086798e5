"""Answers to inference requests over gRPC and HTTP; each text is a separate request to the engine."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from dragoman.inference import inference_pb2
from dragoman.server.errors import InvalidRequest, ServiceError
from dragoman.server.protocols.bulk import ItemRecords
from dragoman.server.protocols.openinference.requests import (
    LOG_PROBS,
    OUTPUTS,
    SEED,
    SEGMENTS,
    STREAM,
    TEXT,
    TEXT_INPUT,
    TOKENS,
    UNMET_TERMS,
    WARNINGS,
    Inference,
    Output,
    log_prob_json,
)
from dragoman.server.protocols.openinference.tensors import DATATYPES, to_raw
from dragoman.server.protocols.v1.messages import TOKENS_PER_SLICE, check_size, to_message
from dragoman.server.service.answers import Answer, AnswerShape, Generated, Piece, ScoresShape
from dragoman.server.service.context import Call
from dragoman.server.service.in_flight import Window
from dragoman.server.service.service import Service

FINAL = "triton_final_response"
RETRY_AFTER = "retry_after_seconds"

Response: TypeAlias = inference_pb2.ModelInferResponse


class Answering:
    """Answers the messages of one call; `remaining` returns the seconds until the call's deadline, None for none."""

    def __init__(self, service: Service, items: ItemRecords, remaining: Callable[[], float | None], max_message_bytes: int) -> None:
        self._generation = service.generation
        self._items = items
        self._remaining = remaining
        self._max_message_bytes = max_message_bytes

    async def whole(self, inference: Inference, call: Call) -> Response:
        """Return the answers to all texts of a message; raise `ServiceError` if one fails."""
        if len(inference) == 1:
            answered: Sequence[Generated] = [await self._generate(inference, 0, call, call.arrival)]
        else:
            assert call.window is not None
            call.is_counted = False  # its texts are counted
            answered = await self.each(inference, call.request_id, call.window)
        return await to_response(inference, answered, call.request_id, self._max_message_bytes)

    async def in_pieces(
        self, inference: Inference, request_id: str, call: Call, write: Callable[[Response], Awaitable[object]]
    ) -> Response:
        """Write one text's answer in pieces, unless wanted whole; return the last response, unwritten, or raise `ServiceError`."""
        [request] = inference.requests
        has_several = (request.num_return_sequences or 1) > 1
        if inference.is_streamed and has_several:
            raise InvalidRequest(STREAM, "goes with one answer only; num_return_sequences says that more are wanted")
        if inference.is_streamed is False or has_several:
            generated = await self._generate(inference, 0, call, call.arrival)
            return await to_response(inference, [generated], request_id, self._max_message_bytes)
        left, limit = _seconds_left(inference, call.arrival, self._remaining()), ResponseLimit(self._max_message_bytes)
        async with self._generation.stream(request, call, left, limit) as pieces:
            async for piece in pieces:
                response = await _to_piece_response(inference, piece, call.model, request_id, self._max_message_bytes)
                if piece.result is not None:
                    return response
                if response.outputs:
                    await write(response)
        raise AssertionError("the last piece has the whole answer")

    async def each(
        self, inference: Inference, request_id: str, window: Window, has_begun: asyncio.Event | None = None
    ) -> Sequence[Generated]:
        """Return the answers to a message of several texts; the first failure cancels the others.

        Concurrency is bounded by the window and the caller's limits. `has_begun` is set once the last text has begun, or none will.
        Raise `ServiceError` with the index of the text that failed.
        """
        arrival = time.monotonic()

        def serve(number: int, call: Call) -> Awaitable[Generated]:
            return self._generate(inference, number, call, arrival)

        def named(number: int, message: str) -> str:
            return f"{TEXT_INPUT}[{number}]: {message}"

        return await self._items.each(len(inference), request_id, window, serve, named, has_begun)

    async def _generate(self, inference: Inference, number: int, call: Call, arrival: float) -> Generated:
        limit, left = ResponseLimit(self._max_message_bytes, len(inference)), _seconds_left(inference, arrival, self._remaining())
        return await self._generation.generate(inference.requests[number], call, left, limit)


def _seconds_left(inference: Inference, arrival: float, remaining: float | None) -> float | None:
    """Return the seconds until the earlier of the call's deadline and the message's `timeout`; None for neither."""
    if inference.timeout_seconds is None:
        return remaining
    seconds = inference.timeout_seconds - (time.monotonic() - arrival)
    return seconds if remaining is None else min(remaining, seconds)


async def to_response(inference: Inference, answered: Sequence[Generated], request_id: str, max_message_bytes: int) -> Response:
    """Return the response to all texts, built in time slices; raise `InvalidRequest` if too large or answer counts differ."""
    response = _begin(answered[0], request_id)
    num_answers = len(answered[0].answers)
    if any(len(generated.answers) != num_answers for generated in answered):
        raise InvalidRequest("num_return_sequences", "texts have different numbers of answers; say how many are wanted")
    for output in _wanted(inference, answered):
        width = num_answers if output.subject == "answer" else 1
        shape = [len(answered), width] if inference.has_rows or width > 1 else [len(answered)]
        elements = [await _value(output, each, answer) for each in answered for answer in each.answers[:width]]
        _add(response, output, shape, elements)
        check_size(response, max_message_bytes, "Send fewer texts, or ask for fewer answers, tokens or outputs")
    return response


async def _to_piece_response(inference: Inference, piece: Piece, model: str, request_id: str, max_message_bytes: int) -> Response:
    """Return a piece's response; the last has all outputs."""
    generated = piece.result
    response = Response(id=request_id, model_name=model) if generated is None else _begin(generated, request_id)
    shape = [1, 1] if inference.has_rows else [1]
    new = {TEXT: piece.text.encode(), TOKENS: msgspec.json.encode(list(piece.tokens))}
    wanted = [OUTPUTS[name] for name in inference.outputs or new] if generated is None else _wanted(inference, [generated])
    for output in wanted:
        if output.name in new:
            _add(response, output, shape, [new[output.name]])
        elif generated is not None:
            _add(response, output, shape, [await _value(output, generated, generated.best)])
    check_size(response, max_message_bytes)
    return response


def streamed(response: Response, *, is_final: bool) -> inference_pb2.ModelStreamInferResponse:
    """Return a response as a stream message, with its final flag."""
    response.parameters[FINAL].bool_param = is_final
    return inference_pb2.ModelStreamInferResponse(infer_response=response)


def to_failure(error: ServiceError, request_id: str) -> inference_pb2.ModelStreamInferResponse:
    """Return a request's error as a stream message."""
    status = to_message(error)
    failure = streamed(Response(id=request_id), is_final=True)
    failure.error_message = f"{error.code}: {status.message}"
    if status.HasField("retry_after_seconds"):
        failure.infer_response.parameters[RETRY_AFTER].double_param = status.retry_after_seconds
    return failure


def _begin(generated: Generated, request_id: str) -> Response:
    return Response(id=request_id, model_name=generated.model, model_version=generated.model_version)


def _wanted(inference: Inference, answered: Sequence[Generated]) -> Iterable[Output]:
    """Return the wanted outputs; if none are named, all that are not void."""
    if inference.outputs:
        return (OUTPUTS[name] for name in inference.outputs)
    void = set()
    if not any(request.return_log_probs or request.top_log_probs for request in inference.requests):
        void.add(LOG_PROBS)
    if all(generated.seed is None for generated in answered):
        void.add(SEED)
    if not any(generated.warnings for generated in answered):
        void.add(WARNINGS)
    if not any(generated.segments for generated in answered):
        void.add(SEGMENTS)
    if not any(answer.unmet_terms for generated in answered for answer in generated.answers):
        void.add(UNMET_TERMS)
    return (output for name, output in OUTPUTS.items() if name not in void)


async def _value(output: Output, generated: Generated, answer: Answer) -> Any:
    """Return an output's element for an answer, yielding to the event loop during log-probabilities."""
    if output.name != LOG_PROBS:
        return output.value(generated, answer)
    parts = []
    for number, token in enumerate(answer.log_probs):
        parts.append(msgspec.json.encode(log_prob_json(token)))
        if number % TOKENS_PER_SLICE == 0:
            await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"


def _add(response: Response, output: Output, shape: Sequence[int], elements: Sequence[object]) -> None:
    response.outputs.add(name=output.name, datatype=output.datatype, shape=shape)
    response.raw_output_contents.append(to_raw(DATATYPES[output.datatype], elements))


@dataclass(frozen=True, slots=True)
class ResponseLimit:
    """Size limit of a `ModelInferResponse` to `num_texts` texts; an `AnswerLimit`."""

    max_bytes: int
    num_texts: int = 1
    name: str = "max_message_bytes"  # of the setting

    def answer_bytes(self, shape: AnswerShape) -> int:
        """Return an upper bound on the size of the answers to all texts."""
        digits = len(str(shape.max_token)) + 1
        token = 96 + digits  # a log-probability in JSON: names, quotes, digits
        top = shape.num_top * token + 6 * shape.top_piece_bytes  # a byte of a piece may be six characters in JSON
        log_probs = shape.num_told * (token + 6 * shape.piece_bytes + top)
        answer = 128 + shape.text_bytes + shape.num_tokens * digits + log_probs
        # 2048: names, datatypes and shapes of all outputs, ids, model name and version.
        return 2048 + self.num_texts * shape.num_answers * answer

    def scores_bytes(self, shape: ScoresShape) -> int:
        """Raise `NotImplementedError`: the protocol has no scoring."""
        raise NotImplementedError
