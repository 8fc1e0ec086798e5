"""Answers larger than a message may be: each fails alone, with a status that no client retries."""

import asyncio
from typing import Any

import grpc
import pytest

from dragoman.v1.generation_pb2 import GenerateRequest, ScoreRequest

TEXT = "A dog runs."
LARGE: dict[str, Any] = {"do_sample": True, "num_return_sequences": 4, "top_log_probs": 20}


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value


def test_an_answer_that_is_too_large_is_refused_with_the_limit(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_message_bytes=2048) as world:
            for error in (
                await failure(world.stub.Generate(GenerateRequest(text=TEXT, **LARGE))),
                await failure(world.stub.GenerateStream(GenerateRequest(text=TEXT, **LARGE))),
                await failure(world.stub.Score(ScoreRequest(text=TEXT * 4, target=TEXT * 3, return_alignment=True))),
            ):
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert "max_message_bytes of the server is 2048" in (error.details() or "")
            assert world.records() == {("en-de", "INVALID_ARGUMENT"): 3}
            assert (await world.stub.Generate(GenerateRequest(text=TEXT))).text

    asyncio.run(run())


def test_in_a_batch_it_fails_alone(serve: Any) -> None:
    async def run() -> None:
        async with serve(max_message_bytes=2048) as world:
            requests = [GenerateRequest(text=TEXT, request_id="l" * 128, **LARGE), GenerateRequest(text=TEXT, request_id="small")]
            found = {answer.request_id[0]: answer async for answer in world.stub.GenerateBatch(iter(requests))}
            assert found["l"].error.code == grpc.StatusCode.INVALID_ARGUMENT.value[0]
            assert found["s"].response.text

    asyncio.run(run())


def test_whatever_passes_can_be_sent(serve: Any) -> None:
    """Whether the answer's size is just below the limit or just above it, the call ends as we say and not as gRPC does."""

    async def run() -> None:
        codes = set()
        for limit in range(1024, 40_000, 1_511):
            async with serve(max_message_bytes=limit) as world:
                request = GenerateRequest(text=TEXT, request_id="i" * 128, top_log_probs=10)
                [answer] = [answer async for answer in world.stub.GenerateBatch(iter([request]))]
                codes.add(answer.error.code)
        assert codes == {0, grpc.StatusCode.INVALID_ARGUMENT.value[0]}

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (LARGE, "top_log_probs: 20 with num_return_sequences of 4 and max_new_tokens of 32 may take"),
        (
            {"return_log_probs": True, "max_new_tokens": 48},
            "return_log_probs: with num_return_sequences of 1 and max_new_tokens of 48 may take",
        ),
        ({"num_beams": 8, "num_return_sequences": 8}, "num_return_sequences: 8 with max_new_tokens of 32 may"),
    ],
)
def test_what_may_be_too_large_is_refused_before_any_work(serve: Any, fields: dict[str, Any], reason: str) -> None:
    async def run() -> None:
        async with serve(max_message_bytes=2048) as world:
            for method in (world.stub.Generate, world.stub.GenerateStream):
                error = await failure(method(GenerateRequest(text=TEXT, **fields)))
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
                assert (error.details() or "").startswith(reason)
            error = await failure(world.stub.Score(ScoreRequest(text=TEXT * 4, target=TEXT * 3, return_alignment=True)))
            assert (error.details() or "").startswith("return_alignment: the scores of ")
            assert world.engine.requests == [] and world.engine.pairs == []
            assert (await world.stub.Score(ScoreRequest(text=TEXT, target=TEXT))).tokens

    asyncio.run(run())
