"""Answers of inference requests as output tensors."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgspec

from dragoman.inference import inference_pb2
from dragoman.server.errors import InvalidRequest, ServiceError
from dragoman.server.protocols.bulk import Items
from dragoman.server.protocols.openinference.requests import (
    LOG_PROBS,
    OUTPUTS,
    SEED,
    STREAM,
    TEXT,
    TEXT_INPUT,
    TOKENS,
    WARNINGS,
    Inference,
    Output,
    told,
)
from dragoman.server.protocols.openinference.tensors import DATATYPES, to_raw
from dragoman.server.protocols.v1.messages import TOKENS_PER_SLICE, check_size, to_message
from dragoman.server.service.answer_size import AnswerShape, ScoresShape
from dragoman.server.service.answers import Answer, Generated, Piece
from dragoman.server.service.context import Call
from dragoman.server.service.in_flight import Window
from dragoman.server.service.service import Core

FINAL = "triton_final_response"
RETRY_AFTER = "retry_after_seconds"


async def to_response(
    inference: Inference, answered: Sequence[Generated], request_id: str, max_message_bytes: int
) -> inference_pb2.ModelInferResponse:
    """Return the message of the answers to all texts of a request; a large one is made in slices of time.

    Raises:
        InvalidRequest: If texts have different numbers of answers, or the message is larger than it may be.
    """
    response = _begin(answered[0], request_id)
    num_answers = len(answered[0].answers)
    if any(len(generated.answers) != num_answers for generated in answered):
        raise InvalidRequest("num_return_sequences", "texts have different numbers of answers; say how many are wanted")
    for output in _wanted(inference, answered):
        width = num_answers if output.subject == "answer" else 1
        shape = [len(answered), width] if inference.has_rows or width > 1 else [len(answered)]
        _add(response, output, shape, [await _value(output, *subject) for subject in _subjects(output, answered)])
        check_size(response, max_message_bytes, "Send fewer texts, or ask for fewer answers, tokens or outputs")
    return response


async def to_piece_response(
    inference: Inference, piece: Piece, model: str, request_id: str, max_message_bytes: int
) -> inference_pb2.ModelInferResponse:
    """Return the message of what is new of an answer in pieces; the last one says all that there is to say of the whole, too.

    Raises:
        InvalidRequest: If it is larger than a message may be.
    """
    generated = piece.result
    response = inference_pb2.ModelInferResponse(id=request_id, model_name=model)
    shape = [1, 1] if inference.has_rows else [1]
    new = {TEXT: piece.text.encode(), TOKENS: msgspec.json.encode(list(piece.tokens))}
    if generated is not None:
        response = _begin(generated, request_id)
    wanted = [OUTPUTS[name] for name in inference.outputs or new] if generated is None else _wanted(inference, [generated])
    for output in wanted:
        if output.name in new:
            _add(response, output, shape, [new[output.name]])
        elif generated is not None:
            _add(response, output, shape, [await _value(output, generated, generated.best)])
    check_size(response, max_message_bytes)
    return response


def streamed(response: inference_pb2.ModelInferResponse, *, is_final: bool) -> inference_pb2.ModelStreamInferResponse:
    """Return what carries a response on a stream, and says whether it is its request's last."""
    response.parameters[FINAL].bool_param = is_final
    return inference_pb2.ModelStreamInferResponse(infer_response=response)


def to_failure(error: ServiceError, request_id: str) -> inference_pb2.ModelStreamInferResponse:
    """Return what says on a stream why a request failed."""
    status = to_message(error)
    failure = streamed(inference_pb2.ModelInferResponse(id=request_id), is_final=True)
    failure.error_message = f"{error.code}: {status.message}"
    if status.HasField("retry_after_seconds"):
        failure.infer_response.parameters[RETRY_AFTER].double_param = status.retry_after_seconds
    return failure


def _begin(generated: Generated, request_id: str) -> inference_pb2.ModelInferResponse:
    return inference_pb2.ModelInferResponse(id=request_id, model_name=generated.model, model_version=generated.model_version)


def _wanted(inference: Inference, answered: Sequence[Generated]) -> Iterable[Output]:
    """Yield the outputs that are wanted; where none are named, all that there is something to say in."""
    if inference.outputs:
        return (OUTPUTS[name] for name in inference.outputs)
    silent = set()
    if not any(request.return_log_probs or request.top_log_probs for request in inference.requests):
        silent.add(LOG_PROBS)
    if all(generated.seed is None for generated in answered):
        silent.add(SEED)
    if not any(generated.warnings for generated in answered):
        silent.add(WARNINGS)
    return (output for name, output in OUTPUTS.items() if name not in silent)


def _subjects(output: Output, answered: Sequence[Generated]) -> Iterable[tuple[Generated, Answer]]:
    if output.subject == "text":
        return ((generated, generated.best) for generated in answered)
    return ((generated, answer) for generated in answered for answer in generated.answers)


async def _value(output: Output, generated: Generated, answer: Answer) -> Any:
    """Return what an output says of an answer; of many tokens in slices of time, between which others have theirs."""
    if output.name != LOG_PROBS:
        return output.value(generated, answer)
    parts = []
    for number, token in enumerate(answer.log_probs):
        parts.append(msgspec.json.encode(told(token)))
        if number % TOKENS_PER_SLICE == 0:
            await asyncio.sleep(0)
    return b"[" + b",".join(parts) + b"]"


def _add(response: inference_pb2.ModelInferResponse, output: Output, shape: Sequence[int], elements: Sequence[object]) -> None:
    response.outputs.add(name=output.name, datatype=output.datatype, shape=shape)
    response.raw_output_contents.append(to_raw(DATATYPES[output.datatype], elements))


# Names, datatypes and shapes of all outputs, ids, and a model's name and version.
ENVELOPE_BYTES = 2048
# Of an answer: its score, its end, lengths, and what is said of its text.
ANSWER_BYTES = 128
# Of a token in JSON: names, quotes, digits of its log-probability.
TOLD_BYTES = 96
# A byte of a piece may be six characters in JSON.
ESCAPED_BYTES = 6


@dataclass(frozen=True, slots=True)
class ResponseLimit:
    """What a message can carry that answers several texts alike.

    Attributes:
        max_bytes: Of a message.
        num_texts: That it answers.
        name: Of the setting that says how large a message may be.
    """

    max_bytes: int
    num_texts: int = 1
    name: str = "max_message_bytes"

    def answer_bytes(self, shape: AnswerShape) -> int:
        """Return the bytes of the answers to all texts at the most."""
        digits = len(str(shape.max_token)) + 1
        top = shape.num_top * (TOLD_BYTES + digits) + ESCAPED_BYTES * shape.top_piece_bytes
        told = shape.num_told * (TOLD_BYTES + digits + ESCAPED_BYTES * shape.piece_bytes + top)
        answer = ANSWER_BYTES + shape.text_bytes + shape.num_tokens * digits + told
        return ENVELOPE_BYTES + self.num_texts * shape.num_answers * answer

    def scores_bytes(self, shape: ScoresShape) -> int:
        """Refuse: the protocol does not score."""
        raise NotImplementedError


Response: TypeAlias = inference_pb2.ModelInferResponse
# Says how many seconds are left until the caller's deadline; None if there is none.
Remaining: TypeAlias = Callable[[], float | None]


def seconds_left(inference: Inference, arrival: float, remaining: float | None) -> float | None:
    """Return the time until a message's deadline: its face's own, or its `timeout`; None if it has none.

    Args:
        inference: The message.
        arrival: When it came, by `time.monotonic()`.
        remaining: Seconds until the deadline that its face knows of; None if there is none.
    """
    if inference.timeout_seconds is None:
        return remaining
    ours = inference.timeout_seconds - (time.monotonic() - arrival)
    return ours if remaining is None else min(remaining, ours)


class Answering:
    """Answers the messages of one call."""

    def __init__(self, core: Core, items: Items, remaining: Remaining, max_message_bytes: int) -> None:
        """Answer none yet.

        Args:
            core: What answers.
            items: What accompanies the requests of the call.
            remaining: Says how much time the call has left.
            max_message_bytes: Largest message that is sent.
        """
        self._generation = core.generation
        self._items = items
        self._remaining = remaining
        self._max_message_bytes = max_message_bytes

    async def whole(self, inference: Inference, call: Call) -> Response:
        """Return the answers to all texts of a message.

        Raises:
            ServiceError: If one of them has none.
        """
        if len(inference) == 1:
            answered: Sequence[Generated] = [await self._generate(inference, 0, call, call.arrival)]
        else:
            assert call.window is not None
            call.is_counted = False  # its texts are
            answered = await self.each(inference, call.request_id, call.window)
        return await to_response(inference, answered, call.request_id, self._max_message_bytes)

    async def in_pieces(
        self, inference: Inference, request_id: str, call: Call, write: Callable[[Response], Awaitable[object]]
    ) -> Response:
        """Answer a message of one text in pieces, unless it is wanted whole; return what is left to be written, the last of them.

        Args:
            inference: The message.
            request_id: Its id.
            call: Its record.
            write: Sends a piece to the caller, when that takes it.

        Raises:
            ServiceError: If there is no answer.
        """
        [request] = inference.requests
        has_several = (request.num_return_sequences or 1) > 1
        if inference.is_streamed and has_several:
            raise InvalidRequest(STREAM, "goes with one answer only; num_return_sequences says that more are wanted")
        if inference.is_streamed is False or has_several:
            generated = await self._generate(inference, 0, call, call.arrival)
            return await to_response(inference, [generated], request_id, self._max_message_bytes)
        left, limit = seconds_left(inference, call.arrival, self._remaining()), ResponseLimit(self._max_message_bytes)
        async with self._generation.stream(request, call, left, limit) as pieces:
            async for piece in pieces:
                response = await to_piece_response(inference, piece, call.model, request_id, self._max_message_bytes)
                if piece.result is not None:
                    return response
                if response.outputs:
                    await write(response)
        raise AssertionError("the last piece has the whole answer")

    async def each(
        self, inference: Inference, request_id: str, window: Window, has_begun: asyncio.Event | None = None
    ) -> Sequence[Generated]:
        """Return the answers to a message of several texts; one that fails ends them all.

        No more run at once than the window has room for, nor than the caller's limits let in if nothing else of theirs runs.

        Args:
            inference: The message.
            request_id: Its id.
            window: Of its call.
            has_begun: Set when the last one has begun, or none will.

        Raises:
            ServiceError: Of the one that failed, with its number.
        """
        arrival, caller = time.monotonic(), self._items.whole.caller

        async def serve(number: int) -> Generated:
            try:
                with self._items.one(request_id, f"{request_id}#{number}", is_part=number > 0) as call:
                    return await self._generate(inference, number, call, arrival)
            except ServiceError as error:
                raise error.copy(f"{TEXT_INPUT}[{number}]: {error.message}") from None

        return await window.run_each(len(inference), serve, None if caller is None else caller.most_at_once, has_begun)

    async def _generate(self, inference: Inference, number: int, call: Call, arrival: float) -> Generated:
        limit, left = ResponseLimit(self._max_message_bytes, len(inference)), seconds_left(inference, arrival, self._remaining())
        return await self._generation.generate(inference.requests[number], call, left, limit)
