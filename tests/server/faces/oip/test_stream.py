"""ModelStreamInfer on a real gRPC server, with a scripted engine."""

import asyncio
from typing import Any

import grpc
import pytest

from dragoman.inference.inference_pb2 import ModelInferRequest, ModelStreamInferResponse
from dragoman.inference.inference_pb2_grpc import GRPCInferenceServiceStub
from dragoman.v1.generation_pb2 import GenerateRequest
from tests.server.faces.grpc.conftest import eventually
from tests.system.harness.openinference_messages import asking, outputs, with_parameters


async def answers(world: Any, *requests: ModelInferRequest) -> list[ModelStreamInferResponse]:
    """Return all that is written on a stream of requests."""
    return [response async for response in GRPCInferenceServiceStub(world.channel).ModelStreamInfer(iter(requests))]


def is_final(response: ModelStreamInferResponse) -> bool:
    return bool(response.infer_response.parameters["triton_final_response"].bool_param)


def text_of(response: ModelStreamInferResponse) -> str:
    [text] = outputs(response.infer_response)["text_output"][1]
    return str(text)


def test_one_text_is_answered_in_pieces_the_last_of_which_says_the_rest(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            native = await world.stub.Generate(GenerateRequest(text="a"))
            pieces = await answers(world, with_parameters(asking("a", id="mine"), triton_enable_empty_final_response=True))
            assert len(pieces) == len(native.tokens) + 1
            assert [is_final(piece) for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            assert {piece.infer_response.id for piece in pieces} == {"mine"}
            assert {piece.infer_response.model_name for piece in pieces} == {"en-de"}
            assert "".join(map(text_of, pieces)) == native.text
            last = outputs(pieces[-1].infer_response)
            assert last["score"] == ([1], [native.answers[0].score])
            assert last["finish_reason"] == ([1], ["eos"])
            assert pieces[-1].infer_response.model_version == "v7"

    asyncio.run(run())


def test_whole_answers_come_where_pieces_are_not_wanted(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            [whole] = await answers(world, with_parameters(asking("a", shape=[1, 1]), stream=False))
            assert is_final(whole) and outputs(whole.infer_response)["text_output"][0] == [1, 1]
            [both] = await answers(world, with_parameters(asking("a"), num_beams=2, num_return_sequences=2))
            assert is_final(both) and outputs(both.infer_response)["text_output"][0] == [1, 2]
            [several] = await answers(world, asking("a", "b", "c", id="mine"))
            assert is_final(several) and outputs(several.infer_response)["text_output"][0] == [3]
            only = asking("a", outputs=[{"name": "score"}])
            [score] = await answers(world, only)
            assert is_final(score) and list(outputs(score.infer_response)) == ["score"]

    asyncio.run(run())


def test_a_request_that_fails_leaves_the_stream_open(serve: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            bad = with_parameters(asking("a", id="c"), num_beam=2)
            requests = [
                asking(" ", id="a"),
                asking("a", " ", id="b"),
                bad,
                asking("a", id="x" * 1000),
                with_parameters(asking("a", "b", id="d"), stream=True),
                with_parameters(asking("a", id="e"), stream=True, num_beams=2, num_return_sequences=2),
                with_parameters(asking("a", id="f"), stream=False),
            ]
            found = {response.infer_response.id: response for response in await answers(world, *requests)}
            assert set(found) == {"a", "b", "c", "", "d", "e", "f"}
            assert all(map(is_final, found.values()))
            assert found["a"].error_message == "INVALID_ARGUMENT: text: is blank"
            assert found["b"].error_message == "INVALID_ARGUMENT: text_input[1]: text: is blank"
            assert found["c"].error_message.startswith("INVALID_ARGUMENT: parameters: 'num_beam' is not known")
            assert found[""].error_message.startswith("INVALID_ARGUMENT: id: 1000 characters")
            assert found["d"].error_message == "INVALID_ARGUMENT: stream: goes with one text only, and there are 2"
            assert found["e"].error_message.startswith("INVALID_ARGUMENT: stream: goes with one answer only")
            assert not found["f"].error_message
            world.engine.has_places, world.engine.retry_after_seconds = False, 2.5
            [full] = await answers(world, asking("a", id="a"))
            assert full.error_message == "RESOURCE_EXHAUSTED: too many requests are waiting"
            assert full.infer_response.parameters["retry_after_seconds"].double_param == 2.5
            codes = [line["code"] for line in logged() if line["event"] == "item" and line["request_id"] in ("a", "c", "f")]
            assert sorted(codes) == ["INVALID_ARGUMENT", "INVALID_ARGUMENT", "OK", "RESOURCE_EXHAUSTED"]

    asyncio.run(run())


def test_an_id_comes_again_when_its_request_has_ended(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            stream = GRPCInferenceServiceStub(world.channel).ModelStreamInfer()
            whole = with_parameters(asking("a", id="mine"), stream=False)
            await stream.write(whole)
            await world.engine.arrived.wait()
            await stream.write(whole)
            assert (await stream.read()).error_message.startswith("INVALID_ARGUMENT: id: is that of another request")
            world.engine.gate.set()
            assert not (await stream.read()).error_message
            await stream.write(whole)
            assert not (await stream.read()).error_message
            await stream.done_writing()
            assert await stream.read() is grpc.aio.EOF

    asyncio.run(run())


@pytest.mark.parametrize("texts", [("a",), ("a", "b", "c")])
def test_a_caller_who_leaves_frees_what_it_had(serve: Any, texts: tuple[str, ...]) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            stream = GRPCInferenceServiceStub(world.channel).ModelStreamInfer()
            await stream.write(asking(*texts))
            await eventually(lambda: len(world.engine.requests) == len(texts))
            stream.cancel()
            await eventually(lambda: len(world.engine.cancelled) == len(texts))
            await eventually(lambda: world.server.num_running == 0)

    asyncio.run(run())


def test_a_stream_has_a_bounded_number_in_hand(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            requests = [with_parameters(asking("a", id=str(i)), stream=False) for i in range(40)]
            requests[20] = asking(*["a"] * 40, id="20")
            call = asyncio.ensure_future(answers(world, *requests))
            await eventually(lambda: world.engine.num_running == 16)
            world.engine.gate.set()
            assert {response.infer_response.id for response in await call} == set(map(str, range(40)))
            assert world.engine.max_running == 16

    asyncio.run(run())


def test_a_drain_answers_what_was_read_and_ends_the_stream(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            stream = GRPCInferenceServiceStub(world.channel).ModelStreamInfer()
            await stream.write(with_parameters(asking("a", id="mine"), stream=False))
            await world.engine.arrived.wait()
            drain = asyncio.ensure_future(world.server.drain(60))
            await eventually(lambda: not world.server.is_ready)
            world.engine.gate.set()
            assert (await stream.read()).infer_response.id == "mine"
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await stream.read()
            assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
            assert await drain

    asyncio.run(run())


def test_who_takes_no_answers_is_not_read_further(serve: Any) -> None:
    """Answers that wait to be taken are in hand as long as they do."""

    async def run() -> None:
        async with serve() as world:
            options: dict[str, Any] = {"stream": False, "top_log_probs": 20}
            stream = GRPCInferenceServiceStub(world.channel).ModelStreamInfer()
            for number in range(200):
                await stream.write(with_parameters(asking("a", id=str(number)), **options))
            await stream.done_writing()
            await eventually(lambda: len(world.engine.requests) >= 16)
            for _ in range(100):
                await asyncio.sleep(0)
            taken = [response async for response in stream]
            assert [response.error_message for response in taken] == [""] * 200
            assert {response.infer_response.id for response in taken} == set(map(str, range(200)))

    asyncio.run(run())
