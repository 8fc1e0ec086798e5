import asyncio
import gc
import json
import time
import weakref
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RequestInfo
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub
from grpc_status import rpc_status
from prometheus_client import CollectorRegistry

from dragoman.server.core.calls import Call
from dragoman.server.core.records import Records
from dragoman.server.core.running import RunningCalls
from dragoman.server.faces.grpc.interceptors import MAX_KEPT_HANDLERS, CallInterceptor, cancellation_code
from dragoman.server.telemetry.metrics import Metrics
from dragoman.v1.generation_pb2 import GenerateRequest, ListModelsRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub

SECRET = "Das bleibt unter uns."


class OneMessage:
    """A context of gRPC's from which a message can be read."""

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    async def read(self) -> Any:
        return object()


def access_lines(logged: Any) -> list[dict[str, Any]]:
    return [line for line in logged() if line["event"] == "call"]


async def finish(world: Any) -> None:
    async with asyncio.timeout(60):
        while world.server.num_running:
            await asyncio.sleep(0.005)


def test_access_line_says_what_happened_but_not_the_text(serve: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            response = await world.stub.Generate(GenerateRequest(text=SECRET, request_id="mine"))
            [_ async for _ in world.stub.GenerateStream(GenerateRequest(text=SECRET))]
            await world.stub.ListModels(ListModelsRequest())
            await finish(world)
            unary, stream, listing = access_lines(logged)
            assert unary["request_id"] == "mine"
            assert (unary["method"], unary["model"]) == ("/dragoman.v1.Generation/Generate", "en-de")
            assert (unary["code"], unary["level"]) == ("OK", "info")
            assert unary["seconds"] >= 0
            assert unary["source_tokens"] == response.usage.source_tokens
            assert unary["generated_tokens"] == stream["generated_tokens"] == response.usage.generated_tokens
            assert unary["timestamp"].endswith("Z")
            assert listing["method"].endswith("/ListModels")
            assert "model" not in listing
            text = str(logged())
            assert SECRET not in text
            assert response.text not in text

    asyncio.run(run())


def test_request_id_comes_from_message_then_metadata_then_us(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            metadata = (("x-request-id", "theirs"),)
            both = await world.stub.Generate(GenerateRequest(text="a", request_id="mine"), metadata=metadata)
            header = await world.stub.Generate(GenerateRequest(text="a"), metadata=metadata)
            made = [(await world.stub.Generate(GenerateRequest(text="a"))).request_id for _ in range(2)]
            assert (both.request_id, header.request_id) == ("mine", "theirs")
            assert all(made)
            assert made[0] != made[1]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("request_id", "metadata", "message"),
    [
        ("a\nb", (), "request_id: only printable ASCII characters are allowed"),
        ("x" * 129, (), "request_id: 129 characters; at most 128 are allowed"),
        ("", (("x-request-id", "x" * 129),), "x-request-id: 129 characters; at most 128 are allowed"),
    ],
)
def test_unfit_request_id_is_refused_and_not_logged(serve: Any, logged: Any, request_id: str, metadata: Any, message: str) -> None:
    async def run() -> None:
        async with serve() as world:
            with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT") as caught:
                await world.stub.Generate(GenerateRequest(text="a", request_id=request_id), metadata=metadata)
            assert caught.value.details() == message
            await finish(world)
            [line] = access_lines(logged)
            assert "request_id" not in line
            assert world.records() == {("", "INVALID_ARGUMENT"): 1}

    asyncio.run(run())


def test_error_tells_the_caller_the_id_that_the_log_has(serve: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            call = world.stub.Generate(GenerateRequest(text=" "))
            with pytest.raises(grpc.aio.AioRpcError):
                await call
            [detail] = (await rpc_status.aio.from_call(call)).details
            info = RequestInfo()
            assert detail.Unpack(info)
            await finish(world)
            [line] = access_lines(logged)
            assert line["request_id"] == info.request_id
            assert line["code"] == "INVALID_ARGUMENT"

    asyncio.run(run())


@pytest.mark.parametrize("name", ["Generate", "GenerateStream"])
def test_message_that_is_not_utf8_is_an_invalid_argument(serve: Any, name: str) -> None:
    async def run() -> None:
        async with serve() as world:
            # Field 2, two bytes long, that are no UTF-8.
            raw = b"\x12\x02\xc3\x28"
            if name == "Generate":
                call = world.channel.unary_unary(f"/dragoman.v1.Generation/{name}")(raw)
            else:
                call = world.channel.unary_stream(f"/dragoman.v1.Generation/{name}")(raw)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await (call if name == "Generate" else call.read())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details() == "request: cannot be parsed; is every string UTF-8?"
            await finish(world)
            assert world.records() == {("", "INVALID_ARGUMENT"): 1}

    asyncio.run(run())


def test_unknown_method_is_unimplemented(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED"):
                await world.channel.unary_unary("/dragoman.v1.Generation/Summarise")(b"")

    asyncio.run(run())


def test_health_is_not_logged(serve: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            await HealthStub(world.channel).Check(HealthCheckRequest())
            assert access_lines(logged) == []

    asyncio.run(run())


def test_ids_of_requests_at_the_same_time_do_not_mix(serve: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            calls = [world.stub.Generate(GenerateRequest(text="a", request_id=f"r{i}")) for i in range(20)]
            async with asyncio.timeout(60):
                while len(world.engine.requests) < 20:
                    await asyncio.sleep(0.005)
            assert world.server.num_running == 20
            world.engine.gate.set()
            answers = [(await call).request_id for call in calls]
            await finish(world)
            assert answers == [f"r{i}" for i in range(20)]
            assert sorted(line["request_id"] for line in access_lines(logged)) == sorted(answers)

    asyncio.run(run())


def test_refusal_is_trailers_only_so_that_grpc_itself_may_retry(serve: Any, logged: Any) -> None:
    """Retries that a service configuration asks gRPC for end with the first message or header that comes."""
    policy = {
        "maxAttempts": 3,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.01s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["RESOURCE_EXHAUSTED"],
    }
    configuration = json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]})

    async def run() -> None:
        async with serve() as world:
            world.engine.has_places = False
            options = [("grpc.service_config", configuration)]
            async with grpc.aio.insecure_channel(f"127.0.0.1:{world.server.port}", options=options) as channel:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await GenerationStub(channel).Generate(GenerateRequest(text="a", request_id="mine"))
            await finish(world)
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert [line["code"] for line in access_lines(logged)] == ["RESOURCE_EXHAUSTED"] * 3

    asyncio.run(run())


def test_method_names_that_callers_make_up_are_not_kept(logged: Any) -> None:
    async def refuse(request: Any, context: Any) -> str:
        return "refused"

    async def run() -> None:
        interceptor = CallInterceptor(RunningCalls(Records(Metrics(CollectorRegistry(), [1.0]))))
        refusal = grpc.unary_unary_rpc_method_handler(refuse)

        async def find(_: Any) -> Any:
            return refusal

        async def handler(method: str) -> Any:
            return await interceptor.intercept_service(find, SimpleNamespace(method=method, invocation_metadata=()))

        first = await handler("/a.B/0")
        assert await handler("/a.B/0") is first, "one handler serves all RPCs of a method"
        others = [await handler(f"/a.B/{i}") for i in range(1, MAX_KEPT_HANDLERS + 1)]
        forgotten = weakref.ref(first.stream_unary)
        del first
        gc.collect()
        assert forgotten() is None
        for other in others:
            await other.stream_unary(None, OneMessage())
        await asyncio.sleep(0)
        methods = [line["method"] for line in access_lines(logged)]
        assert methods == [f"/a.B/{i}" for i in range(1, MAX_KEPT_HANDLERS + 1)]

    asyncio.run(run())


def test_answer_on_its_way_is_not_cut_off_by_the_shutdown(logged: Any) -> None:
    async def run() -> None:
        calls = RunningCalls(Records(Metrics(CollectorRegistry(), [1.0])))
        is_answered, may_send = asyncio.Event(), asyncio.Event()

        async def answer(request: Any, context: Any) -> str:
            return "answer"

        async def find(_: Any) -> Any:
            return grpc.unary_unary_rpc_method_handler(answer)

        async def serve_as_grpc_does() -> Any:
            details = SimpleNamespace(method="/dragoman.v1.Generation/Generate", invocation_metadata=())
            handler = await CallInterceptor(calls).intercept_service(find, details)
            response = await handler.stream_unary(None, OneMessage())
            is_answered.set()
            await may_send.wait()
            return response

        task = asyncio.create_task(serve_as_grpc_does())
        await is_answered.wait()
        calls.end_all()
        assert not await calls.wait_idle(0.01)
        may_send.set()
        assert await task == "answer"
        assert await calls.wait_idle(10)

    asyncio.run(run())


@pytest.mark.parametrize("name", ["Generate", "GenerateStream", "Score"])
@pytest.mark.parametrize("end", ["CANCELLED", "DEADLINE_EXCEEDED"])
def test_a_call_that_ends_before_its_message_has_come_is_counted(
    serve: Any, logged: Any, name: str, end: str, monkeypatch: Any
) -> None:
    """A busy server gets to a message when its caller has given up: gRPC then calls no handler that is made for one message."""

    async def run() -> None:
        async with serve() as world:
            is_late, has_come, begin = end == "DEADLINE_EXCEEDED", asyncio.Event(), Call.begin

            def begin_and_tell(*arguments: Any, **keywords: Any) -> Call:
                has_come.set()
                return begin(*arguments, **keywords)

            monkeypatch.setattr(Call, "begin", begin_and_tell)
            call = world.channel.stream_stream(f"/dragoman.v1.Generation/{name}")(timeout=0.1 if is_late else None)
            if not is_late:
                await asyncio.wait_for(has_come.wait(), 60)
                call.cancel()
            assert (await call.code()).name == end
            async with asyncio.timeout(60):
                while not world.records():
                    await asyncio.sleep(0.005)
            assert world.records() == {("", end): 1}
            assert [line["code"] for line in access_lines(logged)] == [end]

    asyncio.run(run())


@pytest.mark.parametrize(
    ("timeout", "remaining", "code"),
    [
        (None, None, "CANCELLED"),
        (0.2, 0.0, "DEADLINE_EXCEEDED"),
        (0.2, 0.04, "DEADLINE_EXCEEDED"),
        (0.2, 0.1, "CANCELLED"),
        (0.02, 0.015, "CANCELLED"),
        (61.0, 0.6, "DEADLINE_EXCEEDED"),
        (61.0, 5.0, "CANCELLED"),
    ],
)
def test_a_caller_gives_up_a_little_before_its_deadline_is_over_here(
    timeout: float | None, remaining: float | None, code: str
) -> None:
    """A timeout of 60.1 seconds is written as 61: the caller's end of the call comes before ours."""
    context: Any = SimpleNamespace(time_remaining=lambda: remaining)
    elapsed = 0.0 if timeout is None or remaining is None else timeout - remaining
    assert cancellation_code(context, time.monotonic() - elapsed) == code


@pytest.mark.parametrize(
    "method", ["dragoman.v1.Generation/Generate", "dragoman.v1.Generation/GenerateStream", "grpc.health.v1.Health/Check"]
)
def test_a_call_that_closes_its_side_without_a_message_is_refused(serve: Any, method: str) -> None:
    """It had never ended: gRPC waits for a message and tells nobody."""

    async def run() -> None:
        async with serve() as world:
            call = world.channel.stream_stream(f"/{method}")(iter(()))
            with pytest.raises(grpc.aio.AioRpcError, match="request: is missing") as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT

    asyncio.run(run())
