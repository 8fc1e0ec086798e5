"""What a server answers: the same questions over gRPC, one at a time or all at once on one stream."""

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.families.reference import Answer, Question
from dragoman.v1 import generation_pb2 as pb
from dragoman.v1.generation_pb2_grpc import GenerationStub

TIMEOUT_SECONDS = 600.0
TOP = 5
"""Likeliest tokens that are told at each position, beside the one taken."""


def languages(question: Question) -> dict[str, str]:
    """Return the fields of a request that say a question's languages."""
    return {"source_language": question.source or "", "target_language": question.target or ""}


def request(model: str, question: Question, name: str, **settings: Any) -> pb.GenerateRequest:
    """Return a request that asks for log-probabilities too; `name` becomes its id."""
    fields: dict[str, Any] = languages(question) | settings
    return pb.GenerateRequest(model=model, text=question.text, request_id=name, top_log_probs=TOP, **fields)


def ask_alone(stub: GenerationStub, requests: Sequence[pb.GenerateRequest]) -> list[pb.GenerateResponse]:
    """Answer requests one after the other."""
    return [stub.Generate(request, timeout=TIMEOUT_SECONDS) for request in requests]


def ask_together(stub: GenerationStub, requests: Sequence[pb.GenerateRequest]) -> list[pb.GenerateResponse]:
    """Answer requests on one stream, as fast as it takes them; return the answers in the requests' order.

    Raises:
        RuntimeError: If one is refused.
    """
    found: Mapping[str, pb.GenerateResponse]
    found = {}
    for message in stub.GenerateBatch(iter(requests), timeout=TIMEOUT_SECONDS):
        if message.HasField("error"):
            raise RuntimeError(f"{message.request_id}: {message.error.message}")
        found[message.request_id] = message.response
    return [found[request.request_id] for request in requests]


def same_bits(one: pb.GenerateResponse, other: pb.GenerateResponse) -> bool:
    """Tell whether two answers to a question are the same: texts, tokens, log-probabilities and scores to the last bit."""
    return [answer.SerializeToString(deterministic=True) for answer in one.answers] == [
        answer.SerializeToString(deterministic=True) for answer in other.answers
    ]


def answers(response: pb.GenerateResponse, is_end_forced: bool = False) -> list[Answer]:
    """Return a response's hypotheses as `Reference` tells them.

    Args:
        response: Of the server.
        is_end_forced: Whether the model ends what reaches its limit, which counts as ended there.
    """
    return [
        Answer(tuple(answer.tokens), is_end_forced or answer.finish_reason == pb.FINISH_REASON_EOS, answer.score)
        for answer in response.answers
    ]
