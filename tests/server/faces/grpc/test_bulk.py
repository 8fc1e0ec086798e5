"""GenerateBulk: what differs from GenerateBatch, which `test_batch.py` is about."""

import asyncio
from collections.abc import Iterable
from typing import Any

import grpc
import pytest

from dragoman.server.faces.grpc.batch import MAX_TOGETHER_BYTES
from dragoman.server.faces.grpc.several import MAX_REQUESTS
from dragoman.server.faces.grpc.streams import REQUESTS_PER_SLOT
from dragoman.v1.generation_pb2 import GenerateBatchResponse, GenerateBulkRequest, GenerateBulkResponse, GenerateRequest

TEXT = "A dog runs."
LIMIT = 8 * REQUESTS_PER_SLOT


def ask(request_id: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"text": TEXT, "request_id": request_id} | fields)


def several(*requests: GenerateRequest) -> GenerateBulkRequest:
    return GenerateBulkRequest(requests=requests)


async def bulk(world: Any, *messages: GenerateBulkRequest) -> list[GenerateBulkResponse]:
    return [response async for response in world.stub.GenerateBulk(iter(messages))]


async def raw_bulk(world: Any, messages: Iterable[bytes]) -> list[GenerateBatchResponse]:
    """Send bytes as they are."""
    call = world.channel.stream_stream(
        "/dragoman.v1.Generation/GenerateBulk", response_deserializer=GenerateBulkResponse.FromString
    )
    return apart([response async for response in call(iter(messages))])


def apart(responses: list[GenerateBulkResponse]) -> list[GenerateBatchResponse]:
    return sorted((answer for response in responses for answer in response.answers), key=lambda answer: answer.index)


def outcomes(answers: list[GenerateBatchResponse]) -> list[tuple[int, str, str]]:
    number = {code.value[0]: code.name for code in grpc.StatusCode}
    return [(a.index, a.request_id, number[a.error.code] if a.WhichOneof("outcome") == "error" else "OK") for a in answers]


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def test_each_request_of_every_message_is_answered_as_by_generate(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            asked = [ask(f"r{i}", num_beams=2, num_return_sequences=2, top_log_probs=2) for i in range(50)]
            answers = apart(await bulk(world, several(*asked[:1]), several(), several(*asked[1:40]), several(*asked[40:])))
            assert outcomes(answers) == [(i, f"r{i}", "OK") for i in range(50)]
            alone, same = await world.stub.Generate(asked[7]), answers[7].response
            for response in (same, alone):
                response.ClearField("timings")
            assert same == alone
            assert world.records() == {("en-de", "eos"): 51}

    asyncio.run(run())


def test_nothing_asked_is_nothing_answered(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            assert await bulk(world) == await bulk(world, several(), several()) == []

    asyncio.run(run())


def test_what_is_finished_together_comes_together_and_waits_for_no_straggler(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            straggler, others = asyncio.Event(), asyncio.Event()
            generate = world.engine.generate

            async def hold(request: Any) -> Any:
                await (straggler if request.priority else others).wait()
                return await generate(request)

            world.engine.generate = hold
            call = world.stub.GenerateBulk(iter([several(ask("slow", priority=1), *(ask(f"r{i}") for i in range(10)))]))
            await eventually(lambda: len(others._waiters) == 10)  # type: ignore[attr-defined]
            others.set()
            first = await call.read()
            assert {answer.request_id for answer in first.answers} == {f"r{i}" for i in range(10)}
            straggler.set()
            assert [answer.request_id for answer in (await call.read()).answers] == ["slow"]

    asyncio.run(run())


def test_bad_requests_fail_alone(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            unreadable = b"\x12\x02\xff\xfe" + GenerateRequest(request_id="x").SerializeToString()
            parts = [ask("a").SerializeToString(), unreadable, ask("b", text=" ").SerializeToString(), ask("a").SerializeToString()]
            parts += [ask("").SerializeToString(), ask("c").SerializeToString()]
            message = b"".join(b"\x0a" + bytes([len(part)]) + part for part in parts)
            found = outcomes(await raw_bulk(world, [message]))
            invalid = "INVALID_ARGUMENT"
            assert found == [
                (0, "a", "OK"),
                (1, "", invalid),
                (2, "b", invalid),
                (3, "a", invalid),
                (4, "", invalid),
                (5, "c", "OK"),
            ]

    asyncio.run(run())


@pytest.mark.parametrize("broken", [b"\x0a\x05abc", b"\x0a\x00" * 1_000_000, b"\x0a\x00" * (MAX_REQUESTS + 1)])
def test_a_message_that_is_none_or_has_too_many_counts_as_one_request(serve: Any, broken: bytes) -> None:
    async def run() -> None:
        async with serve() as world:
            good = [several(ask("a")).SerializeToString(), broken, several(ask("b")).SerializeToString()]
            answers = await raw_bulk(world, good)
            assert outcomes(answers) == [(0, "a", "OK"), (1, "", "INVALID_ARGUMENT"), (2, "b", "OK")]
            assert world.engine.max_running <= 2

    asyncio.run(run())


def test_requests_in_hand_are_bounded_within_a_message_too(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            call = world.stub.GenerateBulk(iter([several(*(ask(f"r{i}") for i in range(5 * LIMIT)))]))
            await eventually(lambda: world.engine.num_running == LIMIT)
            world.engine.gate.set()
            answers = apart([response async for response in call])
            assert len(answers) == 5 * LIMIT and world.engine.max_running <= LIMIT

    asyncio.run(run())


def test_answers_that_are_large_together_come_in_several_messages(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        async with serve(make_model()) as world:
            asked = [ask(f"r{i}", num_beams=8, num_return_sequences=8, top_log_probs=20) for i in range(2 * LIMIT)]
            responses = await bulk(world, several(*asked))
            assert len(apart(responses)) == 2 * LIMIT
            for response in responses:
                assert len(response.answers) == 1 or sum(answer.ByteSize() for answer in response.answers) <= MAX_TOGETHER_BYTES
            assert sum(response.ByteSize() for response in responses) > MAX_TOGETHER_BYTES

    asyncio.run(run())


def test_every_request_has_its_line_and_the_stream_its_own(serve: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            await bulk(world, several(ask("a"), ask("b", text=" ")))

    asyncio.run(run())
    lines = [line for line in logged() if line.get("method") == "/dragoman.v1.Generation/GenerateBulk"]
    assert sorted((line["event"], line["code"]) for line in lines) == [("call", "OK"), ("item", "INVALID_ARGUMENT"), ("item", "OK")]


def test_caller_that_leaves_has_its_requests_cancelled(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            call = world.stub.GenerateBulk(iter([several(*(ask(f"r{i}") for i in range(4)))]))
            await eventually(lambda: world.engine.num_running == 4)
            call.cancel()
            await eventually(lambda: world.engine.num_running == 0 and world.server.num_running == 0)

    asyncio.run(run())
