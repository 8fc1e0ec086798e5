"""The Score RPC through a real gRPC server, with a scripted engine behind it."""

import asyncio
import math
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RetryInfo
from grpc_status import rpc_status

from dragoman.server.errors import Unavailable
from dragoman.v1.generation_pb2 import ScoreRequest

SOURCE, TARGET = "A dog runs.", "Ein Hund läuft."


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def test_answer_carries_scores_of_every_token(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            request = ScoreRequest(model="en-de", text=SOURCE, target=TARGET, request_id="mine", priority=-3)
            response = await world.stub.Score(request)
            [pair] = world.engine.pairs
            tokenizer = world.model.tokenizers.target
            assert pair.source_ids == [*tokenizer.encode(SOURCE), tokenizer.eos_id]
            assert pair.target_ids == [*tokenizer.encode(TARGET), tokenizer.eos_id], "as in training"
            assert (pair.priority, pair.deadline, pair.is_aligned, pair.alignment_layer) == (-3, None, False, None)
            assert (response.request_id, response.model, response.model_version) == ("mine", "en-de", "v7")
            assert [told.token for told in response.tokens] == pair.target_ids
            assert b"".join(told.piece for told in response.tokens) == f" {TARGET}".encode()
            assert [told.log_prob for told in response.tokens] == [-0.5 * i for i in range(len(pair.target_ids))]
            count = len(pair.target_ids)
            assert response.log_prob == pytest.approx(-0.5 * count * (count - 1) / 2)
            assert response.score == pytest.approx(response.log_prob / count)
            assert (response.usage.source_tokens, response.usage.generated_tokens) == (len(pair.source_ids), 0)
            assert not response.HasField("alignment") and response.word_alignment == ""

    asyncio.run(run())


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, -10.0, 10.0])
def test_score_is_the_sum_over_the_length_to_the_penalty(serve: Any, penalty: float) -> None:
    async def run() -> None:
        async with serve() as world:
            response = await world.stub.Score(ScoreRequest(text=SOURCE, target=TARGET, length_penalty=penalty))
            expected = response.log_prob / math.pow(len(response.tokens), penalty)
            assert response.score == pytest.approx(expected, rel=1e-12)

    asyncio.run(run())


def test_empty_target_is_end_of_sequence_alone(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            response = await world.stub.Score(ScoreRequest(text=SOURCE, return_word_alignment=True))
            assert world.engine.pairs[0].target_ids == [world.model.tokenizers.target.eos_id]
            [told] = response.tokens
            assert (told.token, told.piece) == (world.model.tokenizers.target.eos_id, b"")
            assert response.word_alignment == ""

    asyncio.run(run())


def test_alignment_is_told_row_by_row(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            response = await world.stub.Score(ScoreRequest(text=SOURCE, target=TARGET, return_alignment=True, alignment_layer=3))
            [pair] = world.engine.pairs
            assert (pair.is_aligned, pair.alignment_layer) == (True, 3)
            alignment = response.alignment
            assert (alignment.num_source_tokens, alignment.num_target_tokens) == (len(pair.source_ids), len(pair.target_ids))
            assert list(alignment.weights) == [float(i) for i in range(len(pair.source_ids) * len(pair.target_ids))]
            assert b"".join(alignment.source_pieces) == f" {SOURCE}".encode()
            assert response.word_alignment == ""

    asyncio.run(run())


def test_word_alignment_comes_without_the_matrix(serve: Any) -> None:
    """The scripted attention grows to the right, so the last word has most of it."""

    async def run() -> None:
        async with serve() as world:
            response = await world.stub.Score(ScoreRequest(text=SOURCE, target=TARGET, return_word_alignment=True))
            assert world.engine.pairs[0].is_aligned
            links = [tuple(map(int, link.split("-"))) for link in response.word_alignment.split()]
            assert sorted(j for _, j in links) == [0, 1, 2]
            assert all(0 <= i <= 2 for i, _ in links)
            assert not response.HasField("alignment")

    asyncio.run(run())


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"text": ""}, "text: is blank"),
        ({"text": " \n"}, "text: is blank"),
        ({"text": "x" * 63}, "text: 65 tokens, end-of-sequence included; max_source_tokens of model en-de is 64"),
        ({"target": "x" * 47}, "target: 49 tokens, end-of-sequence included; max_target_tokens of model en-de is 48"),
        ({"target": "x" * 100_000}, "target: more than "),
        ({"priority": 11}, "priority: 11 is not in -10 to 10"),
        ({"length_penalty": 10.5}, "length_penalty: 10.5 is not in -10 to 10"),
        ({"length_penalty": math.nan}, "length_penalty: nan is not in -10 to 10"),
        (
            {"alignment_layer": 4, "return_alignment": True},
            "alignment_layer: 4 is not in 0 to 3, the layers of model en-de that attend to a source",
        ),
        ({"alignment_layer": 0}, "alignment_layer: goes with return_alignment or return_word_alignment only"),
    ],
)
def test_what_cannot_be_scored_is_refused_by_field(serve: Any, fields: dict[str, Any], message: str) -> None:
    async def run() -> None:
        async with serve() as world:
            error = await failure(world.stub.Score(ScoreRequest(**{"text": SOURCE, "target": TARGET} | fields)))
            assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert error.details().startswith(message)
            assert world.engine.pairs == []
            assert world.records() == {("en-de", "INVALID_ARGUMENT"): 1}

    asyncio.run(run())


def test_a_target_may_fill_the_model(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            response = await world.stub.Score(ScoreRequest(text=SOURCE, target="x" * 46))
            assert len(response.tokens) == 48

    asyncio.run(run())


@pytest.mark.parametrize(
    ("reason", "code", "message"),
    [
        ("cancelled", "CANCELLED", "the request was cancelled"),
        ("deadline", "DEADLINE_EXCEEDED", "the deadline passed before the pair was scored"),
        ("queue_full", "RESOURCE_EXHAUSTED", "too many pairs are waiting to be scored"),
        ("draining", "UNAVAILABLE", "the model's engine is shutting down"),
        ("step_failed", "INTERNAL", "scoring failed; quote incident abc"),
    ],
)
def test_each_ending_has_its_status(serve: Any, reason: str, code: str, message: str) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.reason, world.engine.incident, world.engine.retry_after_seconds = reason, "abc", 0.25
            error = await failure(world.stub.Score(ScoreRequest(text=SOURCE, target=TARGET)))
            assert (error.code().name, error.details()) == (code, message)
            assert world.records() == {("en-de", code): 1}
            assert world.count("score_tokens_total", model="en-de") == 0
            if reason == "queue_full":
                info = RetryInfo()
                [detail] = [d for d in rpc_status.from_call(error).details if d.Is(RetryInfo.DESCRIPTOR)]
                detail.Unpack(info)
                assert info.retry_delay.ToMilliseconds() == 250

    asyncio.run(run())


def test_an_engine_that_is_gone_is_unavailable(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.error = Unavailable("the engine ended")
            error = await failure(world.stub.Score(ScoreRequest(text=SOURCE)))
            assert error.code() == grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_unknown_model_is_not_found(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            error = await failure(world.stub.Score(ScoreRequest(model="no", text=SOURCE)))
            assert (error.code(), error.details()) == (grpc.StatusCode.NOT_FOUND, "model: 'no' is not loaded; loaded: en-de")

    asyncio.run(run())


def test_a_caller_that_leaves_cancels_its_pair(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            call = world.stub.Score(ScoreRequest(text=SOURCE), timeout=30)
            await world.engine.arrived.wait()
            assert world.engine.pairs[0].deadline is not None
            call.cancel()
            await asyncio.wait_for(world.engine.left.wait(), 10)
            assert world.engine.cancelled == [world.engine.pairs[0].id]

    asyncio.run(run())


def test_a_scored_pair_is_counted_and_logged(serve: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            await world.stub.Score(ScoreRequest(text=SOURCE, target=TARGET))
            [pair] = world.engine.pairs
            assert world.records() == {("en-de", "scored"): 1}
            assert world.count("score_tokens_total", model="en-de") == len(pair.source_ids) + len(pair.target_ids)
            assert world.count("score_latency_seconds_count", model="en-de") == 1
            assert world.count("score_latency_seconds_sum", model="en-de") == pytest.approx(1.0)
            assert world.count("generation_tokens_total", model="en-de") == 0
            [entry] = [entry for entry in logged() if entry["event"] == "call"]
            assert (entry["method"], entry["code"], entry["source_tokens"]) == (
                "/dragoman.v1.Generation/Score", "OK", len(pair.source_ids),
            )  # fmt: skip
            assert not any(SOURCE in str(value) or TARGET in str(value) for value in entry.values())

    asyncio.run(run())
