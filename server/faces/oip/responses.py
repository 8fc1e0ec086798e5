"""Answers as the messages of the protocol."""

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from dragoman.inference import inference_pb2
from dragoman.server.core.answers import Answer, Generated, Piece
from dragoman.server.errors import InvalidRequest, ServiceError
from dragoman.server.faces.oip.datatypes import DATATYPES, to_raw
from dragoman.server.faces.oip.inference import Inference
from dragoman.server.faces.oip.outputs import LOG_PROBS, OUTPUTS, SEED, TEXT, TOKENS, WARNINGS, Output, told
from dragoman.server.faces.v1.conversion import TOKENS_PER_SLICE, check_size
from dragoman.server.faces.v1.status import to_message

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
