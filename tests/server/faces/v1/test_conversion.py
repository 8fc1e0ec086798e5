import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from dragoman.server.core import requests
from dragoman.server.core.answers import Answer, Generated, Timings
from dragoman.server.errors import InvalidRequest
from dragoman.server.faces.v1.conversion import to_generate_request, to_score_request, write_response
from dragoman.v1.generation_pb2 import GenerateRequest, GenerateResponse, ScoreRequest

VALUES: dict[str, Any] = {"text": "a", "suppressed_tokens": (3, 1)}


@pytest.mark.parametrize(
    ("message", "request_type", "convert"),
    [
        (GenerateRequest, requests.GenerateRequest, to_generate_request),
        (ScoreRequest, requests.ScoreRequest, to_score_request),
    ],
)
def test_every_field_of_the_protocol_reaches_the_core(message: Any, request_type: Any, convert: Any) -> None:
    names = [field.name for field in msgspec.structs.fields(request_type)]
    assert names == [field.name for field in message.DESCRIPTOR.fields]
    for field in message.DESCRIPTOR.fields:
        value = VALUES.get(field.name, {field.CPPTYPE_STRING: "s", field.CPPTYPE_BOOL: True}.get(field.cpp_type, 2))
        assert convert(message(**{field.name: value})) == request_type(**{field.name: value}), field.name


@pytest.mark.parametrize(
    ("message", "request_type", "convert"),
    [
        (GenerateRequest, requests.GenerateRequest, to_generate_request),
        (ScoreRequest, requests.ScoreRequest, to_score_request),
    ],
)
def test_what_is_absent_is_absent_and_what_is_zero_is_zero(message: Any, request_type: Any, convert: Any) -> None:
    assert convert(message()) == request_type()
    for field in message.DESCRIPTOR.fields:
        default = getattr(request_type(), field.name)
        assert (default is None) is field.has_presence, field.name
        if field.has_presence:
            assert getattr(convert(message(**{field.name: 0})), field.name) == 0


def test_only_samples_have_a_seed_and_zero_is_one() -> None:
    answers = [Answer("a", [1], "eos", -1.0)]
    timings = Timings(0.0, 0.0, 0.0, 0.0, 0.0)
    for seed in (None, 0, 2**64 - 1):
        response = GenerateResponse()
        asyncio.run(write_response(Generated("r", "m", "v", answers, False, 1, 2, timings, seed), 2**20, response))
        assert (response.seed if response.HasField("seed") else None) == seed


class Endless(list[int]):
    """Four million tokens, of which nothing but their number may be asked."""

    def __len__(self) -> int:
        return 4_100_000

    def __iter__(self) -> Any:
        raise AssertionError("looked at")


def test_tokens_to_suppress_are_counted_before_anything_is_made_of_them() -> None:
    message: Any = SimpleNamespace(ListFields=lambda: [(SimpleNamespace(name="suppressed_tokens"), Endless())])
    with pytest.raises(InvalidRequest, match=r"^suppressed_tokens: 4100000 tokens; at most 256 are allowed$"):
        to_generate_request(message)
