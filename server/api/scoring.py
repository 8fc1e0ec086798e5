"""The Score RPC's two ends: from a caller's pair to one the engine can trust, and from its scores to the answer.

Definitions. A target is tokenised as in training: its text, then end-of-sequence; an empty target is end-of-sequence alone. Each of
its T tokens has the log-probability (natural logarithm) that the model gives it after the source and the true tokens before it; it
is what greedy search tells of the same token. `log_prob` is their sum, `score` is log_prob / T^length_penalty, the score that beam
search gives an answer with these tokens which it did not have to cut short.

The alignment has a row for each target token and a column for each source token, end-of-sequence included in both: the weights of
the encoder-decoder attention in the step that says the row's token, averaged over heads, of one decoder layer or averaged over all.
`server/api/alignment.py` defines the links between words.
"""

import math
from typing import NoReturn

import numpy as np

from dragoman.server.api.alignment import word_alignment
from dragoman.server.api.answers import RETRY_SECONDS, token_log_probs
from dragoman.server.api.calls import Call
from dragoman.server.api.ports import Model
from dragoman.server.api.search_options import check_length_penalty
from dragoman.server.api.validation import Validator, check_deadline, check_priority
from dragoman.server.engine import messages
from dragoman.server.errors import Cancelled, DeadlineExceeded, InvalidRequest, QueueFull, StepFailed, Unavailable
from dragoman.v1 import generation_pb2


async def prepare_pair(
    request: generation_pb2.ScoreRequest, model: Model, validator: Validator, *, arrival: float, remaining_seconds: float | None
) -> messages.ScoreRequest:
    """Return the pair for the engine.

    Args:
        request: What the caller sent.
        model: The model it is for.
        validator: What tokenises.
        arrival: `time.monotonic()` when it came.
        remaining_seconds: Until its deadline, None if it has none.

    Raises:
        InvalidRequest: Naming the field and the limit.
        DeadlineExceeded: If the deadline has passed already.
    """
    deadline = check_deadline(remaining_seconds)
    priority = check_priority(request.priority)
    check_length_penalty(request)
    layer = _check_layer(request, model)
    source_ids, _ = await validator.tokenise_source(request.text, model)
    target_ids = await validator.tokenise_target(request.target, model)
    return messages.ScoreRequest(
        id=model.engine.next_id(),
        source_ids=source_ids,
        target_ids=target_ids,
        arrival=arrival,
        deadline=deadline,
        priority=priority,
        is_aligned=request.return_alignment or request.return_word_alignment,
        alignment_layer=layer,
    )


def raise_pair_ending(scored: messages.Scored) -> NoReturn:
    """Raise what an ending that is no score means to the caller."""
    match scored.reason:
        case "cancelled":
            raise Cancelled("the request was cancelled")
        case "deadline" | "deadline_unmet":
            raise DeadlineExceeded("the deadline passed before the pair was scored")
        case "queue_full":
            raise QueueFull("too many pairs are waiting to be scored", retry_after_seconds=scored.retry_after_seconds)
        case "draining":
            raise Unavailable("the model's engine is shutting down", retry_after_seconds=RETRY_SECONDS)
        case "step_failed":
            raise StepFailed(f"scoring failed; quote incident {scored.incident}")
        case _:
            raise AssertionError(f"{scored.reason} is an answer")


def to_score_response(
    call: Call, model: Model, request: generation_pb2.ScoreRequest, pair: messages.ScoreRequest, scored: messages.Scored
) -> generation_pb2.ScoreResponse:
    """Return the answer's message.

    Args:
        call: The request's record.
        model: What scored.
        request: What the caller sent.
        pair: What the engine was given.
        scored: What it answered.
    """
    log_prob = math.fsum(scored.log_probs)
    num_source, num_target = len(pair.source_ids), len(pair.target_ids)
    response = generation_pb2.ScoreResponse(
        request_id=call.request_id,
        model=model.name,
        model_version=model.version,
        log_prob=log_prob,
        score=log_prob / num_target ** check_length_penalty(request),
        tokens=token_log_probs(model.tokenizer, pair.target_ids, scored.log_probs),
        usage=generation_pb2.Usage(source_tokens=num_source),
    )
    if not pair.is_aligned:
        return response
    weights = np.frombuffer(scored.alignment, np.float32).reshape(num_target, num_source)
    source_pieces = [model.tokenizer.token_bytes(token) for token in pair.source_ids]
    if request.return_alignment:
        response.alignment.num_source_tokens = num_source
        response.alignment.num_target_tokens = num_target
        response.alignment.weights.extend(weights.ravel().tolist())
        response.alignment.source_pieces.extend(source_pieces)
    if request.return_word_alignment:
        target_pieces = [model.tokenizer.token_bytes(token) for token in pair.target_ids]
        response.word_alignment = word_alignment(weights, source_pieces, target_pieces)
    return response


def _check_layer(request: generation_pb2.ScoreRequest, model: Model) -> int | None:
    """Return the decoder layer that the alignment is taken from, None for the mean of all."""
    if not request.HasField("alignment_layer"):
        return None
    if not (request.return_alignment or request.return_word_alignment):
        raise InvalidRequest("alignment_layer", "goes with return_alignment or return_word_alignment only")
    limit = model.manifest.num_decoder_layers - 1
    if request.alignment_layer > limit:
        raise InvalidRequest(
            "alignment_layer", f"{request.alignment_layer} is not in 0 to {limit}, the decoder layers of model {model.name}"
        )
    return request.alignment_layer
