"""From what the engine reports to what the caller gets: the answer's messages, or the error that an ending stands for."""

import time
from collections.abc import Iterator, Sequence
from typing import NoReturn

from google.protobuf.message import Message

from dragoman.model.tokenizer import Tokenizer
from dragoman.server.api.calls import Call
from dragoman.server.api.ports import Model
from dragoman.server.api.validation import Prepared
from dragoman.server.engine import messages
from dragoman.server.errors import Cancelled, DeadlineExceeded, DeadlineUnmet, InvalidRequest, QueueFull, StepFailed, Unavailable
from dragoman.v1 import generation_pb2

FINISH_REASONS: dict[messages.FinishReason, generation_pb2.FinishReason] = {
    "eos": generation_pb2.FINISH_REASON_EOS,
    "length": generation_pb2.FINISH_REASON_LENGTH,
}
RETRY_SECONDS = 1.0
# What a message that carries an answer may have around it: an id, twice, and lengths.
ENVELOPE_BYTES = 512


def check_size(message: Message, max_message_bytes: int) -> None:
    """Do nothing if an answer can be sent. gRPC itself would end the call, a whole batch with it, as if the server were overloaded.

    Raises:
        InvalidRequest: If it is larger than a message may be.
    """
    size = message.ByteSize() + ENVELOPE_BYTES
    if size > max_message_bytes:
        limit = f"max_message_bytes of the server is {max_message_bytes}"
        raise InvalidRequest("request", f"its answer takes {size} bytes; {limit}. Ask for fewer answers, tokens or details")


def raise_ending(finished: messages.Finished) -> NoReturn:
    """Raise what an ending that is no answer means to the caller."""
    match finished.reason:
        case "cancelled":
            raise Cancelled("the request was cancelled")
        case "deadline":
            raise DeadlineExceeded(f"the deadline passed after {finished.num_generated} tokens")
        case "deadline_unmet":
            needed = f"about {finished.needed_seconds:.3g} s are needed"
            raise DeadlineUnmet(f"refused before any work: {needed}, more than the deadline leaves")
        case "queue_full":
            raise QueueFull("too many requests are waiting", retry_after_seconds=finished.retry_after_seconds)
        case "draining":
            raise Unavailable("the model's engine is shutting down", retry_after_seconds=RETRY_SECONDS)
        case "step_failed":
            raise StepFailed(f"generation failed; quote incident {finished.incident}")
        case _:
            raise AssertionError(f"{finished.reason} is an answer")


def to_response(
    call: Call, model: Model, prepared: Prepared, finished: messages.Finished, text: str
) -> generation_pb2.GenerateResponse:
    """Return the message of an answer.

    Args:
        call: The request's record.
        model: What answered.
        prepared: The request.
        finished: How it ended.
        text: Text of the first answer.
    """
    request = prepared.request
    admitted = request.arrival if finished.admitted is None else finished.admitted
    first_token = finished.ended if finished.first_token is None else finished.first_token
    best = finished.answers[0]
    texts = [text, *(model.tokenizer.decode(answer.token_ids) for answer in finished.answers[1:])]
    response = generation_pb2.GenerateResponse(
        request_id=call.request_id,
        model=model.name,
        model_version=model.version,
        text=text,
        tokens=best.token_ids,
        finish_reason=FINISH_REASONS[best.reason],
        is_truncated=prepared.is_truncated,
        usage=generation_pb2.Usage(source_tokens=len(request.source_ids), generated_tokens=finished.num_generated),
        timings=generation_pb2.Timings(
            queue_seconds=admitted - request.arrival,
            prefill_seconds=finished.prefill_seconds,
            decode_seconds=finished.ended - first_token,
            time_to_first_token_seconds=first_token - request.arrival,
            total_seconds=time.monotonic() - request.arrival,
        ),
        answers=[_to_answer(model, prepared, *pair) for pair in zip(finished.answers, texts, strict=True)],
    )
    if request.search.sampling is not None:
        response.seed = request.search.sampling.seed
    return response


def _to_answer(model: Model, prepared: Prepared, answer: messages.Answer, text: str) -> generation_pb2.Answer:
    """Return the message of one answer, with log-probabilities if they are wanted."""
    message = generation_pb2.Answer(
        text=text, tokens=answer.token_ids, finish_reason=FINISH_REASONS[answer.reason], score=answer.score
    )
    if prepared.has_log_probs:
        generated = answer.token_ids[len(prepared.request.search.forced_prefix) :]
        if answer.reason == "eos":
            generated = [*generated, model.manifest.eos_id]
        message.log_probs.extend(token_log_probs(model.tokenizer, generated, answer.log_probs))
    if prepared.request.search.num_top_log_probs:
        for told, ids, log_probs in zip(message.log_probs, answer.top_ids, answer.top_log_probs, strict=True):
            told.top.extend(token_log_probs(model.tokenizer, ids, log_probs))
    return message


def token_log_probs(tokenizer: Tokenizer, ids: Sequence[int], log_probs: Sequence[float]) -> Iterator[generation_pb2.TokenLogProb]:
    """Yield the message of each token and its log-probability."""
    for token, log_prob in zip(ids, log_probs, strict=True):
        yield generation_pb2.TokenLogProb(token=token, piece=tokenizer.token_bytes(token), log_prob=log_prob)
