import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RequestInfo, RetryInfo
from prometheus_client import CollectorRegistry

from dragoman.model.text.byte_ids import ByteTokenizer
from dragoman.model.text.tokenizers import Tokenizers
from dragoman.server.core.calls import Call
from dragoman.server.core.core import Core
from dragoman.server.errors import Unavailable
from dragoman.server.faces.grpc.batch import Batch
from dragoman.server.faces.grpc.hand import Allowance
from dragoman.server.faces.grpc.interceptors import current_call
from dragoman.server.faces.grpc.reading import Turns
from dragoman.server.faces.grpc.streams import REQUESTS_PER_SLOT, requests_per_stream
from dragoman.server.telemetry.metrics import Metrics
from dragoman.v1.generation_pb2 import GenerateBatchResponse, GenerateRequest, GenerateResponse, GetModelRequest

TEXT = "A dog runs."
SLOTS = 8
LIMIT = SLOTS * REQUESTS_PER_SLOT


def ask(request_id: str, **fields: Any) -> GenerateRequest:
    return GenerateRequest(**{"text": TEXT, "request_id": request_id} | fields)


async def answers(world: Any, *requests: GenerateRequest, **options: Any) -> list[GenerateBatchResponse]:
    return [response async for response in world.stub.GenerateBatch(iter(requests), **options)]


def codes(responses: list[GenerateBatchResponse]) -> list[tuple[str, str]]:
    """Ids and codes, in the order of the ids."""
    number = {code.value[0]: code.name for code in grpc.StatusCode}
    found = [(r.request_id, number[r.error.code] if r.WhichOneof("outcome") == "error" else "OK") for r in responses]
    return sorted(found)


async def eventually(condition: Any) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def test_each_request_is_answered_as_by_generate(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            asked = [ask(f"r{i}", num_beams=2, num_return_sequences=2, top_log_probs=2) for i in range(50)]
            responses = await answers(world, *asked)
            assert sorted(response.request_id for response in responses) == sorted(request.request_id for request in asked)
            alone = await world.stub.Generate(asked[0])
            [same] = [response.response for response in responses if response.request_id == "r0"]
            for response in (same, alone):
                response.ClearField("timings")
            assert same == alone
            assert world.records() == {("en-de", "eos"): 51}

    asyncio.run(run())


def test_requests_run_at_the_same_time_and_are_answered_as_they_finish(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            gates = {f"r{i}": asyncio.Event() for i in range(6)}
            generate = world.engine.generate

            async def hold(request: Any) -> Any:
                await gates[order.pop(0)].wait()
                return await generate(request)

            order = list(gates)
            world.engine.generate = hold
            call = world.stub.GenerateBatch(iter([ask(name) for name in gates]))
            for name in reversed(gates):
                await eventually(lambda: not order)
                gates[name].set()
                assert (await call.read()).request_id == name
            assert await call.read() is grpc.aio.EOF

    asyncio.run(run())


def test_stream_without_requests_ends_well(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            assert await answers(world) == []
            assert world.records() == {}

    asyncio.run(run())


def test_bad_request_fails_alone(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            responses = await answers(
                world,
                ask("good"),
                ask("blank", text=" "),
                ask("lost", model="nobody"),
                ask(""),
                ask("bad\nid"),
                ask("twice"),
                ask("option", num_beams=99),
                ask("twice"),
                ask("last"),
            )
            assert codes(responses) == [
                ("", "INVALID_ARGUMENT"),
                ("", "INVALID_ARGUMENT"),
                ("blank", "INVALID_ARGUMENT"),
                ("good", "OK"),
                ("last", "OK"),
                ("lost", "NOT_FOUND"),
                ("option", "INVALID_ARGUMENT"),
                ("twice", "INVALID_ARGUMENT"),
                ("twice", "OK"),
            ]
            assert sorted(response.index for response in responses) == list(range(9))
            messages = {response.index: response.error.message for response in responses if response.HasField("error")}
            assert messages == {
                1: "text: is blank",
                2: "model: 'nobody' is not loaded; loaded: en-de",
                3: "request_id: is missing; each request of a batch needs one",
                4: "request_id: only printable ASCII characters are allowed",
                6: "num_beams: 99 is not in 1 to 8, max_slots_per_request of model en-de",
                7: "request_id: was used on this stream before",
            }
            assert world.records() == {
                ("en-de", "eos"): 3,
                ("en-de", "INVALID_ARGUMENT"): 2,
                ("", "INVALID_ARGUMENT"): 3,
                ("", "NOT_FOUND"): 1,
            }

    asyncio.run(run())


def test_id_that_failed_is_used_up_too_and_is_free_on_another_stream(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            assert codes(await answers(world, ask("a", text=""), ask("a"))) == [("a", "INVALID_ARGUMENT")] * 2
            assert codes(await answers(world, ask("a"))) == [("a", "OK")]

    asyncio.run(run())


def test_message_that_cannot_be_parsed_fails_alone(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            method = world.channel.stream_stream(
                "/dragoman.v1.Generation/GenerateBatch", response_deserializer=GenerateBatchResponse.FromString
            )
            raw = [ask("a").SerializeToString(), b"\x12\x02\xc3\x28", ask("b").SerializeToString()]
            responses = [response async for response in method(iter(raw))]
            assert codes(responses) == [("", "INVALID_ARGUMENT"), ("a", "OK"), ("b", "OK")]
            [error] = [response.error for response in responses if response.HasField("error")]
            assert error.message == "request: cannot be parsed; is every string UTF-8?"

    asyncio.run(run())


def test_error_has_the_details_that_generate_gives(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.reason, world.engine.retry_after_seconds = "queue_full", 1.25
            [response] = await answers(world, ask("mine"))
            assert response.request_id == "mine"
            retry, info = RetryInfo(), RequestInfo()
            assert response.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert response.error.details[0].Unpack(retry) and response.error.details[1].Unpack(info)
            assert (retry.retry_delay.ToMilliseconds(), info.request_id) == (1250, "mine")

    asyncio.run(run())


def test_unexpected_exception_gives_an_incident_and_no_internals(serve: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.error = KeyError("secret internals")
            responses = await answers(world, ask("a"), ask("b"))
            assert codes(responses) == [("a", "INTERNAL"), ("b", "INTERNAL")]
            lines = {line["request_id"]: line["incident"] for line in logged() if line["event"] == "unexpected exception"}
            assert {r.request_id: r.error.message for r in responses} == {
                name: f"internal error; quote incident {incident}" for name, incident in lines.items()
            }

    asyncio.run(run())


def test_each_request_has_its_record_and_the_stream_has_one(serve: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            responses = await answers(world, ask("a"), ask("b", text=" "), ask("c\n"), metadata=(("x-request-id", "stream"),))
            await eventually(lambda: world.server.num_running == 0)
            items = [line for line in logged() if line["event"] == "item"]
            [call] = [line for line in logged() if line["event"] == "call"]
            assert {(line.get("request_id"), line["code"], line.get("model")) for line in items} == {
                ("a", "OK", "en-de"),
                ("b", "INVALID_ARGUMENT", "en-de"),
                (None, "INVALID_ARGUMENT", None),
            }
            assert {line["batch_id"] for line in items} == {call["request_id"]} == {"stream"}
            assert {line["method"] for line in (call, *items)} == {"/dragoman.v1.Generation/GenerateBatch"}
            [usage] = [response.response.usage for response in responses if response.HasField("response")]
            assert (call["code"], call["source_tokens"], call["generated_tokens"]) == (
                "OK",
                usage.source_tokens,
                usage.generated_tokens,
            )
            assert TEXT not in str(logged())

    asyncio.run(run())


def test_cancelled_stream_cancels_everything_on_it(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            call = world.stub.GenerateBatch()
            for i in range(5):
                await call.write(ask(f"r{i}"))
            await eventually(lambda: len(world.engine.requests) == 5)
            call.cancel()
            await eventually(lambda: world.server.num_running == 0)
            assert sorted(world.engine.cancelled) == [1, 2, 3, 4, 5]
            assert world.records() == {("en-de", "CANCELLED"): 5, ("", "CANCELLED"): 1}

    asyncio.run(run())


def test_disconnected_client_cancels_everything_on_the_stream(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{world.server.port}") as channel:
                call = type(world.stub)(channel).GenerateBatch(iter([ask("a"), ask("b")]))
                await eventually(lambda: len(world.engine.requests) == 2)
            await eventually(lambda: sorted(world.engine.cancelled) == [1, 2])
            assert call.done()

    asyncio.run(run())


def test_deadline_of_the_stream_is_that_of_its_requests(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                await answers(world, ask("a"), ask("b"), timeout=0.3)
            assert all(0 < request.deadline - request.arrival < 0.4 for request in world.engine.requests)
            await eventually(lambda: world.server.num_running == 0)
            assert sorted(world.engine.cancelled) == [1, 2]
            assert world.records() == {("en-de", "DEADLINE_EXCEEDED"): 2, ("", "DEADLINE_EXCEEDED"): 1}

    asyncio.run(run())


def test_deadline_that_one_request_cannot_meet_fails_it_alone(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.reason, world.engine.needed_seconds = "deadline_unmet", 50.0
            [response] = await answers(world, ask("a"), timeout=40)
            assert response.error.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
            assert "about 50 s are needed" in response.error.message

    asyncio.run(run())


def test_requests_in_hand_are_bounded(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            call = world.stub.GenerateBatch(iter([ask(f"r{i}") for i in range(5 * LIMIT)]))
            await eventually(lambda: len(world.engine.requests) == LIMIT)
            for _ in range(20):
                await world.stub.GetModel(GetModelRequest(model="en-de"))
            assert len(world.engine.requests) == LIMIT
            world.engine.gate.set()
            assert len([response async for response in call]) == 5 * LIMIT
            assert world.engine.max_running <= LIMIT

    asyncio.run(run())


class Reader:
    """A caller's end of a stream, as the server sees it: takes an answer only when told to."""

    def __init__(self) -> None:
        self.taken: list[GenerateBatchResponse] = []
        self.may_take = asyncio.Semaphore(0)
        self.num_writing = 0

    def time_remaining(self) -> None:
        return None

    async def write(self, response: bytes) -> None:
        self.num_writing += 1
        assert self.num_writing == 1, "gRPC takes one message at a time"
        await self.may_take.acquire()
        self.taken.append(GenerateBatchResponse.FromString(response))
        self.num_writing -= 1


def make_batch(reader: Any, max_slots: int, calls: list[str] | None = None) -> Batch:
    """Make a batch, within a running task, whose requests are answered at once."""

    async def generate(request: GenerateRequest, context: Any, response: GenerateResponse) -> None:
        if calls is not None:
            calls.append(current_call.get().request_id)
        response.request_id = request.request_id

    current_call.set(Call.begin("/dragoman.v1.Generation/GenerateBatch"))
    tokenizers = Tokenizers.shared(ByteTokenizer())
    loaded = [SimpleNamespace(max_slots=count, tokenizers=tokenizers) for count in (1, max_slots)]
    models: Any = SimpleNamespace(all=lambda: loaded)
    core = Core(models, Metrics(CollectorRegistry(), [1.0]))
    return Batch(generate, core, reader, Allowance().open(requests_per_stream(core)), Turns())


async def settle() -> None:
    """Let everything happen that can."""
    for _ in range(200):
        await asyncio.sleep(0)


def test_slow_reader_holds_the_sender_back(logged: Any) -> None:
    async def run() -> None:
        reader, num_read = Reader(), 0

        async def requests() -> Any:
            nonlocal num_read
            for i in range(100):
                num_read += 1
                yield ask(f"r{i}")

        calls: list[str] = []
        serving = asyncio.create_task(make_batch(reader, 3, calls).serve(requests()))
        for num_taken in range(20):
            await settle()
            assert (len(reader.taken), num_read, len(calls)) == (num_taken, 6 + num_taken, 6 + num_taken)
            reader.may_take.release()
        for _ in range(80):
            reader.may_take.release()
        await serving
        assert sorted(response.request_id for response in reader.taken) == sorted(calls) == sorted(f"r{i}" for i in range(100))

    asyncio.run(run())


def test_answer_that_cannot_be_written_ends_the_stream(logged: Any) -> None:
    async def run() -> None:
        class Gone(Reader):
            async def write(self, response: bytes) -> None:
                raise grpc.aio.InternalError("gone")

        async def requests() -> Any:
            yield ask("a")
            await asyncio.Event().wait()

        with pytest.raises(grpc.aio.InternalError, match="gone"):
            await make_batch(Gone(), 1).serve(requests())

    asyncio.run(run())


def test_drain_answers_what_was_read_and_says_that_the_rest_was_not(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            call = world.stub.GenerateBatch()
            for name in ("a", "b"):
                await call.write(ask(name))
            await eventually(lambda: len(world.engine.requests) == 2)
            draining = asyncio.create_task(world.server.drain(10))
            await eventually(lambda: not world.server.is_ready)
            world.engine.gate.set()
            assert codes([await call.read(), await call.read()]) == [("a", "OK"), ("b", "OK")]
            with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE"):
                await call.read()
            assert await draining
            assert (await call.code(), await call.details()) == (grpc.StatusCode.UNAVAILABLE, "the server is shutting down")
            assert world.records() == {("en-de", "eos"): 2, ("", "UNAVAILABLE"): 1}

    asyncio.run(run())


def test_stream_whose_caller_has_sent_everything_survives_the_drain(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            call = world.stub.GenerateBatch()
            for name in ("a", "b"):
                await call.write(ask(name))
            await call.done_writing()
            await eventually(lambda: len(world.engine.requests) == 2)
            await world.stub.GetModel(GetModelRequest(model="en-de"))  # behind the end of the stream
            draining = asyncio.create_task(world.server.drain(10))
            await eventually(lambda: not world.server.is_ready)
            world.engine.gate.set()
            assert codes([await call.read(), await call.read()]) == [("a", "OK"), ("b", "OK")]
            assert await call.read() is grpc.aio.EOF
            assert await draining

    asyncio.run(run())


def test_idle_stream_does_not_hold_the_drain_up(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            call = world.stub.GenerateBatch()
            await call.write(ask("a"))
            assert codes([await call.read()]) == [("a", "OK")]
            assert await world.server.drain(10)
            assert await call.code() is grpc.StatusCode.UNAVAILABLE

    asyncio.run(run())


def test_server_that_stops_ends_what_runs_with_unavailable(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            call = world.stub.GenerateBatch()
            await call.write(ask("a"))
            await eventually(lambda: len(world.engine.requests) == 1)
            await world.server.stop()
            assert await call.code() is grpc.StatusCode.UNAVAILABLE
            assert world.engine.cancelled == [1]
            assert world.records() == {("en-de", "UNAVAILABLE"): 1, ("", "UNAVAILABLE"): 1}

    asyncio.run(run())


def test_engine_that_dies_fails_its_requests_not_the_stream(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        dead = make_model("en-fr")
        dead.engine.error = Unavailable("the engine of model 'en-fr' is restarting", retry_after_seconds=0.5)
        async with serve(make_model("en-de"), dead) as world:
            responses = await answers(world, ask("a", model="en-fr"), ask("b", model="en-de"))
            assert codes(responses) == [("a", "UNAVAILABLE"), ("b", "OK")]

    asyncio.run(run())


def test_stream_needs_a_token_like_any_call(serve: Any, tmp_path: Any) -> None:
    (tmp_path / "tokens").write_text("someone:secret\n")

    async def run() -> None:
        async with serve(auth_tokens_file=tmp_path / "tokens") as world:
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await answers(world, ask("a"))
            responses = await answers(world, ask("a"), metadata=(("authorization", "Bearer secret"),))
            assert codes(responses) == [("a", "OK")]
            assert world.records() == {("en-de", "eos"): 1, ("", "UNAUTHENTICATED"): 1}

    asyncio.run(run())


@pytest.mark.parametrize("request_id", ["x" * 4_194_244, "x" * 129, "é" * 100, "a\nb", "\x1b[2J"])
def test_unfit_id_is_refused_and_never_sent_back(serve: Any, logged: Any, request_id: str) -> None:
    """One of 4 MB, sent back, was an answer that gRPC does not send: it ended the stream, and three good requests with it."""

    async def run() -> None:
        async with serve() as world:
            responses = await answers(world, ask("a"), ask("b"), ask(request_id), ask("c"))
            assert codes(responses) == [("", "INVALID_ARGUMENT"), ("a", "OK"), ("b", "OK"), ("c", "OK")]
            [refused] = [response for response in responses if response.HasField("error")]
            assert refused.index == 2 and refused.error.message.startswith("request_id: ")
            assert refused.ByteSize() < 200
            assert "x" * 129 not in str(logged()) and "\x1b" not in str(logged())

    asyncio.run(run())


def test_large_answers_that_nobody_takes_hold_the_stream_back(logged: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        reader, num_begun = Reader(), 0

        async def generate(request: GenerateRequest, context: Any, response: GenerateResponse) -> None:
            nonlocal num_begun
            num_begun += 1
            response.text = "x" * 100_000

        async def requests() -> Any:
            for i in range(40):
                yield ask(f"r{i}")
                await settle()  # each is answered before the next comes

        batch = make_batch(reader, 64)
        monkeypatch.setattr(batch, "_generate", generate)
        serving = asyncio.create_task(batch.serve(requests()))
        for num_taken in range(5):
            for _ in range(20):
                await settle()
            assert num_begun == 3 + num_taken
            reader.may_take.release()
        for _ in range(40):
            reader.may_take.release()
        await serving
        assert len(reader.taken) == 40

    asyncio.run(run())


def test_streams_share_what_they_have_in_hand(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            calls = [world.stub.GenerateBatch(iter([ask(f"r{i}") for i in range(2 * LIMIT)])) for _ in range(2)]
            await eventually(lambda: len(world.engine.requests) == 2 * LIMIT)
            for call in calls:
                call.cancel()
            await eventually(lambda: world.server.num_running == 0)
            again = world.stub.GenerateBatch(iter([ask(f"r{i}") for i in range(2 * LIMIT)]))
            await eventually(lambda: len(world.engine.requests) == 3 * LIMIT)
            world.engine.gate.set()
            assert len([response async for response in again]) == 2 * LIMIT

    asyncio.run(run())
