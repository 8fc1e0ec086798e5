"""What is turned away before any work is counted by its cause; what fails later is not."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from dragoman.server.engine.messages import ANYBODY
from dragoman.server.errors import NotReady, Unavailable
from dragoman.v1.generation_pb2 import GenerateRequest, ScoreRequest


def rejections(world: Any) -> dict[tuple[str, str], float]:
    return {
        (sample.labels["model"], sample.labels["reason"]): sample.value
        for metric in world.registry.collect()
        for sample in metric.samples
        if sample.name == "dragoman_requests_rejected_total" and sample.value
    }


async def refused(call: Any) -> str:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    code: str = caught.value.code().name
    return code


@pytest.mark.parametrize(("reason", "cause"), [("queue_full", "queue_full"), ("deadline_unmet", "deadline_unmet")])
def test_the_engines_refusals_have_their_causes(serve: Any, reason: str, cause: str) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.reason = reason
            await refused(world.stub.Generate(GenerateRequest(text="a")))
            assert rejections(world) == {("en-de", cause): 1}

    asyncio.run(run())


def test_a_full_queue_that_the_front_end_knows_of_counts_as_one_that_the_engine_found(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.has_places = False
            await refused(world.stub.Generate(GenerateRequest(text="a")))
            await refused(world.stub.GenerateStream(GenerateRequest(text="a")).read())
            assert rejections(world) == {("en-de", "queue_full"): 2}
            assert world.engine.shares == [ANYBODY, ANYBODY], "whose it is has been told"

    asyncio.run(run())


def test_the_limit_behind_a_refusal_is_named(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.reason, world.engine.limit = "queue_full", "max_waiting"
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await world.stub.Generate(GenerateRequest(text="a"))
            assert caught.value.code().name == "RESOURCE_EXHAUSTED"
            assert "max_waiting: " in caught.value.details()

    asyncio.run(run())


def test_callers_mistakes_have_their_causes(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            await refused(world.stub.Generate(GenerateRequest(text="a", max_new_tokens=10_000)))
            await refused(world.stub.Score(ScoreRequest(text="")))
            await refused(world.stub.Generate(GenerateRequest(text="a", model="none")))
            assert rejections(world) == {("en-de", "invalid"): 2, ("", "unknown_model"): 1}

    asyncio.run(run())


def test_a_model_that_is_not_ready_refuses_and_one_that_dies_does_not(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.error = Unavailable("the engine ended", retry_after_seconds=1.0)
            await refused(world.stub.Generate(GenerateRequest(text="a")))
            assert rejections(world) == {}
            world.engine.error = NotReady("not ready", retry_after_seconds=1.0)
            await refused(world.stub.Generate(GenerateRequest(text="a")))
            assert rejections(world) == {("en-de", "not_ready"): 1}

    asyncio.run(run())


@pytest.mark.parametrize("reason", ["deadline", "cancelled", "step_failed", "draining"])
def test_what_fails_after_it_was_taken_is_no_refusal(serve: Any, reason: str) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.reason = reason
            await refused(world.stub.Generate(GenerateRequest(text="a")))
            assert rejections(world) == {}

    asyncio.run(run())


def test_requests_of_a_batch_are_counted_each_by_its_cause(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            requests = [
                GenerateRequest(text="a", request_id="1"),
                GenerateRequest(text="a", request_id="2", max_new_tokens=10_000),
                GenerateRequest(text="a", request_id="2"),
            ]
            assert len([response async for response in world.stub.GenerateBatch(iter(requests))]) == 3
            # A request whose id was used before is refused before it has a model.
            assert rejections(world) == {("en-de", "invalid"): 1, ("", "invalid"): 1}

    asyncio.run(run())


def test_draining_and_unknown_tokens_are_causes(serve: Any, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("alice:s3cret\n")

    async def run() -> None:
        async with serve(auth_tokens_file=tokens) as world:
            assert await refused(world.stub.Generate(GenerateRequest(text="a"))) == "UNAUTHENTICATED"
            metadata = (("authorization", "Bearer s3cret"),)
            world.engine.hold()
            running = asyncio.ensure_future(world.stub.Generate(GenerateRequest(text="a"), metadata=metadata))
            await asyncio.wait_for(world.engine.arrived.wait(), 10)
            draining = asyncio.create_task(world.server.drain(30))
            await asyncio.sleep(0)
            assert await refused(world.stub.Generate(GenerateRequest(text="a"), metadata=metadata)) == "UNAVAILABLE"
            world.engine.gate.set()
            await running
            assert await draining
            assert rejections(world) == {("", "unauthenticated"): 1, ("", "draining"): 1}

    asyncio.run(run())
