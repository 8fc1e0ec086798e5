import asyncio
from typing import Any

import grpc
import pytest
from google.rpc.error_details_pb2 import RequestInfo, RetryInfo
from grpc_status import rpc_status

from dragoman.server.errors import Unavailable
from dragoman.v1.generation_pb2 import (
    FINISH_REASON_EOS,
    FINISH_REASON_LENGTH,
    GenerateRequest,
    GenerateStreamResponse,
    GetModelRequest,
    ListModelsRequest,
)

TEXT = "A dog runs."


async def failure(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        if hasattr(call, "__aiter__"):
            async for _ in call:
                pass
        else:
            await call
    return caught.value


async def eventually(condition: Any) -> None:
    """Give the server's side of a finished call the time to end."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.005)


def test_answer_carries_text_tokens_usage_and_timings(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            response = await world.stub.Generate(GenerateRequest(model="en-de", text=TEXT, request_id="mine"))
            [request] = world.engine.requests
            assert response.text == "Fußball 🐕 日本"
            assert list(response.tokens) == world.engine.answer
            assert (response.request_id, response.model, response.model_version) == ("mine", "en-de", "v7")
            assert response.finish_reason == FINISH_REASON_EOS
            assert not response.is_truncated
            assert response.usage.source_tokens == len(request.source_ids)
            assert response.usage.generated_tokens == len(world.engine.answer) + 1
            assert request.source_ids == [*world.model.tokenizers.source.encode(TEXT), world.model.tokenizers.target.eos_id]
            assert (request.max_new_tokens, request.deadline, request.is_streamed) == (32, None, False)
            timings = response.timings
            assert (timings.queue_seconds, timings.prefill_seconds) == (pytest.approx(0.25), 0.125)
            assert timings.time_to_first_token_seconds == pytest.approx(0.5)
            assert timings.decode_seconds == pytest.approx(0.5)
            assert timings.total_seconds > 0

    asyncio.run(run())


def test_length_is_an_answer(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.reason = "length"
            response = await world.stub.Generate(GenerateRequest(text=TEXT, max_new_tokens=5))
            assert response.finish_reason == FINISH_REASON_LENGTH
            assert world.engine.requests[0].max_new_tokens == 5
            assert world.records() == {("en-de", "length"): 1}

    asyncio.run(run())


def test_all_answers_are_told_the_best_one_twice(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            response = await world.stub.Generate(GenerateRequest(text=TEXT, num_beams=4, num_return_sequences=3))
            tokens = [list(answer.tokens) for answer in response.answers]
            assert tokens == [world.engine.answer[: len(world.engine.answer) - i] for i in range(3)]
            assert [answer.text for answer in response.answers] == [world.model.tokenizers.target.decode(row) for row in tokens]
            assert (response.text, list(response.tokens)) == (response.answers[0].text, tokens[0])
            assert [answer.score for answer in response.answers] == [-1.0, -2.0, -3.0]
            assert {answer.finish_reason for answer in response.answers} == {FINISH_REASON_EOS}
            assert response.usage.generated_tokens == sum(len(row) + 1 for row in tokens)
            assert not any(answer.log_probs for answer in response.answers)
            assert not response.HasField("seed")

    asyncio.run(run())


def test_greedy_answer_is_the_only_one_and_has_its_score(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            response = await world.stub.Generate(GenerateRequest(text=TEXT))
            [answer] = response.answers
            assert (answer.text, list(answer.tokens), answer.score) == (response.text, list(response.tokens), -1.0)

    asyncio.run(run())


@pytest.mark.parametrize("reason", ["eos", "length"])
def test_log_probabilities_are_of_the_generated_tokens(serve: Any, reason: str) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.reason = reason
            tokenizer = world.model.tokenizers.target
            request = GenerateRequest(text=TEXT, forced_prefix="Ein Hund", return_log_probs=True)
            [answer] = (await world.stub.Generate(request)).answers
            end = [tokenizer.eos_id] if reason == "eos" else []
            assert [told.token for told in answer.log_probs] == world.engine.answer + end
            assert [told.piece for told in answer.log_probs] == [tokenizer.token_bytes(i) for i in world.engine.answer + end]
            assert [told.log_prob for told in answer.log_probs] == [-0.5 * i for i in range(len(answer.log_probs))]
            assert not any(told.top for told in answer.log_probs)
            assert reason == "length" or answer.log_probs[-1].piece == b""

    asyncio.run(run())


def test_likeliest_tokens_of_each_position_are_told(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            [answer] = (await world.stub.Generate(GenerateRequest(text=TEXT, top_log_probs=3))).answers
            assert len(answer.log_probs) == len(world.engine.answer) + 1
            for told in answer.log_probs:
                assert [(top.token, top.log_prob) for top in told.top] == [(10, 0.0), (11, -0.25), (12, -0.5)]
                assert [top.piece for top in told.top] == [world.model.tokenizers.target.token_bytes(i) for i in (10, 11, 12)]

    asyncio.run(run())


def test_seed_is_told_whoever_chose_it(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            given = await world.stub.Generate(GenerateRequest(text=TEXT, do_sample=True, seed=2**64 - 1))
            drawn = await world.stub.Generate(GenerateRequest(text=TEXT, do_sample=True))
            assert given.seed == world.engine.requests[0].search.sampling.seed == 2**64 - 1
            assert drawn.HasField("seed")
            assert drawn.seed == world.engine.requests[1].search.sampling.seed

    asyncio.run(run())


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_bad_option_is_an_invalid_argument(serve: Any, method: str) -> None:
    async def run() -> None:
        async with serve() as world:
            error = await failure(getattr(world.stub, method)(GenerateRequest(text=TEXT, num_beams=9)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details() == "num_beams: 9 is not in 1 to 8, max_slots_per_request of model en-de"
            assert world.engine.requests == []

    asyncio.run(run())


def test_forced_prefix_is_streamed_and_part_of_the_text(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            request = GenerateRequest(text=TEXT, forced_prefix="Ein Hund", num_beams=2)
            pieces = [piece async for piece in world.stub.GenerateStream(request)]
            whole = await world.stub.Generate(request)
            assert whole.text.startswith("Ein Hund")
            assert "".join(piece.text for piece in pieces) == whole.text == pieces[-1].result.text
            assert [token for piece in pieces for token in piece.tokens] == list(whole.tokens)
            assert pieces[-1].result.answers == whole.answers

    asyncio.run(run())


def test_deadline_that_cannot_be_met_says_how_long_it_would_take(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.reason, world.engine.needed_seconds = "deadline_unmet", 2.5
            call = world.stub.Generate(GenerateRequest(text=TEXT, request_id="mine"), timeout=100)
            error = await failure(call)
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            needed = "about 2.5 s are needed, more than the deadline leaves"
            assert error.details() == f"refused before any work: {needed}"
            [detail] = (await rpc_status.aio.from_call(call)).details
            assert detail.Is(RequestInfo.DESCRIPTOR)

    asyncio.run(run())


@pytest.mark.parametrize("num_in_last_message", [0, 3])
def test_streamed_pieces_add_up_to_the_answer(serve: Any, make_model: Any, num_in_last_message: int) -> None:
    async def run() -> None:
        model = make_model()
        # Each of the four bytes of this dog, and each of three of the kanji, is a token of its own.
        model.engine.answer = [i for text in ("🐕", "語", "Männer") for i in bytes_as_tokens(model.tokenizers.target, text)]
        model.engine.num_in_last_message = num_in_last_message
        async with serve(model) as world:
            pieces = [piece async for piece in world.stub.GenerateStream(GenerateRequest(text=TEXT))]
            whole = await world.stub.Generate(GenerateRequest(text=TEXT))
            assert whole.text == "🐕語Männer"
            assert "".join(piece.text for piece in pieces) == whole.text == pieces[-1].result.text
            assert all("\ufffd" not in piece.text for piece in pieces)
            assert [token for piece in pieces for token in piece.tokens] == list(whole.tokens)
            assert [piece.HasField("result") for piece in pieces] == [False] * (len(pieces) - 1) + [True]
            assert len(pieces) == len(model.engine.answer) - num_in_last_message + 1
            assert world.engine.requests[0].is_streamed
            assert world.engine.cancelled == []

    asyncio.run(run())


def bytes_as_tokens(tokenizer: Any, text: str) -> list[int]:
    """Return the ids that stand for one byte each."""
    single = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size) if len(tokenizer.token_bytes(i)) == 1}
    return [single[bytes([byte])] for byte in text.encode()]


def test_character_that_is_never_completed_is_replaced_in_stream_and_result_alike(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        model = make_model()
        model.engine.answer = bytes_as_tokens(model.tokenizers.target, "a🐕")[:3]
        async with serve(model) as world:
            pieces = [piece async for piece in world.stub.GenerateStream(GenerateRequest(text=TEXT))]
            assert "".join(piece.text for piece in pieces) == pieces[-1].result.text == "a\ufffd"

    asyncio.run(run())


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
@pytest.mark.parametrize(
    ("reason", "code", "text"),
    [
        ("cancelled", "CANCELLED", "cancelled"),
        ("deadline", "DEADLINE_EXCEEDED", "deadline"),
        ("deadline_unmet", "DEADLINE_EXCEEDED", "before any work"),
        ("queue_full", "RESOURCE_EXHAUSTED", "waiting"),
        ("step_failed", "INTERNAL", "cafe01"),
        ("draining", "UNAVAILABLE", "shutting down"),
    ],
)
def test_ending_without_an_answer_becomes_one_error(serve: Any, method: str, reason: str, code: str, text: str) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.reason, world.engine.incident = reason, "cafe01"
            error = await failure(getattr(world.stub, method)(GenerateRequest(text=TEXT)))
            assert error.code().name == code
            assert text in (error.details() or "")
            await eventually(lambda: world.server.num_running == 0)
            assert world.records() == {("en-de", code): 1}

    asyncio.run(run())


@pytest.mark.parametrize(("seconds", "milliseconds"), [(0.0, 1), (0.07, 70), (0.0701, 71), (1.25, 1250), (61.0, 61000)])
def test_full_queue_says_when_to_retry(serve: Any, seconds: float, milliseconds: int) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.reason, world.engine.retry_after_seconds = "queue_full", seconds
            call = world.stub.Generate(GenerateRequest(text=TEXT, request_id="mine"))
            await failure(call)
            status = await rpc_status.aio.from_call(call)
            retry, info = RetryInfo(), RequestInfo()
            assert status.details[0].Unpack(retry)
            assert retry.retry_delay.ToMilliseconds() == milliseconds
            assert status.details[1].Unpack(info)
            assert info.request_id == "mine"

    asyncio.run(run())


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_a_queue_known_to_be_full_refuses_before_any_work(serve: Any, method: str) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.has_places, world.engine.retry_after_seconds = False, 0.5
            error = await failure(getattr(world.stub, method)(GenerateRequest(text=TEXT)))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert not world.engine.requests
            await eventually(lambda: world.server.num_running == 0)
            assert world.records() == {("en-de", "RESOURCE_EXHAUSTED"): 1}

    asyncio.run(run())


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_unavailable_engine_is_reported_with_a_retry_time(serve: Any, method: str) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.error = Unavailable("the engine of model 'en-de' is restarting", retry_after_seconds=0.5)
            error = await failure(getattr(world.stub, method)(GenerateRequest(text=TEXT)))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert "restarting" in (error.details() or "")
            await eventually(lambda: world.server.num_running == 0)
            assert world.records() == {("en-de", "UNAVAILABLE"): 1}

    asyncio.run(run())


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_cancelled_call_is_cancelled_in_the_engine(serve: Any, method: str) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            call = getattr(world.stub, method)(GenerateRequest(text=TEXT))
            if method == "GenerateStream":
                assert isinstance(await call.read(), GenerateStreamResponse)
            await world.engine.arrived.wait()
            call.cancel()
            await asyncio.wait_for(world.engine.left.wait(), 10)
            assert world.engine.cancelled == [world.engine.requests[0].id]
            await eventually(lambda: world.server.num_running == 0)
            assert world.records() == {("en-de", "CANCELLED"): 1}

    asyncio.run(run())


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_disconnected_client_is_cancelled_in_the_engine(serve: Any, method: str) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            async with grpc.aio.insecure_channel(f"127.0.0.1:{world.server.port}") as channel:
                stub = type(world.stub)(channel)
                call = getattr(stub, method)(GenerateRequest(text=TEXT))
                if method == "GenerateStream":
                    await call.read()
                await world.engine.arrived.wait()
            await asyncio.wait_for(world.engine.left.wait(), 10)
            assert world.engine.cancelled == [world.engine.requests[0].id]

    asyncio.run(run())


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_passed_deadline_is_cancelled_in_the_engine_and_counted_as_such(serve: Any, method: str) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.hold()
            error = await failure(getattr(world.stub, method)(GenerateRequest(text=TEXT), timeout=0.3))
            assert error.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            [request] = world.engine.requests
            assert request.deadline is not None
            assert 0 < request.deadline - request.arrival < 0.4
            await asyncio.wait_for(world.engine.left.wait(), 10)
            assert world.engine.cancelled == [request.id]
            await eventually(lambda: world.server.num_running == 0)
            assert world.records() == {("en-de", "DEADLINE_EXCEEDED"): 1}

    asyncio.run(run())


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_unexpected_exception_gives_an_incident_and_no_internals(serve: Any, logged: Any, method: str) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.error = KeyError("secret internals")
            error = await failure(getattr(world.stub, method)(GenerateRequest(text=TEXT, request_id="mine")))
            assert error.code() is grpc.StatusCode.INTERNAL
            details = error.details() or ""
            assert "secret" not in details
            [line] = [line for line in logged() if line["event"] == "unexpected exception"]
            assert details == f"internal error; quote incident {line['incident']}"
            assert "secret internals" in line["exception"]
            assert line["request_id"] == "mine"
            await eventually(lambda: world.server.num_running == 0)
            assert world.records() == {("en-de", "INTERNAL"): 1}

    asyncio.run(run())


def test_stream_without_an_ending_is_an_error(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            world.engine.reason = "silence"
            error = await failure(world.stub.GenerateStream(GenerateRequest(text=TEXT)))
            assert error.code() is grpc.StatusCode.INTERNAL

    asyncio.run(run())


def test_every_request_is_counted_once(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            await world.stub.Generate(GenerateRequest(text=TEXT))
            [_ async for _ in world.stub.GenerateStream(GenerateRequest(text=TEXT))]
            await failure(world.stub.Generate(GenerateRequest(text=" ")))
            await failure(world.stub.Generate(GenerateRequest(model="nobody", text=TEXT)))
            await failure(world.stub.GetModel(GetModelRequest(model="nobody")))
            await eventually(lambda: world.server.num_running == 0)
            assert world.records() == {("en-de", "eos"): 2, ("en-de", "INVALID_ARGUMENT"): 1, ("", "NOT_FOUND"): 1}
            num_tokens = 2 * (len(world.engine.answer) + 1)
            assert world.count("generation_tokens_total", model="en-de") == num_tokens
            assert world.count("e2e_request_latency_seconds_count", model="en-de") == 2

    asyncio.run(run())


def test_unknown_model_lists_the_loaded_ones(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        async with serve(make_model("en-fr"), make_model("en-de")) as world:
            for name in ("nobody", ""):
                error = await failure(world.stub.Generate(GenerateRequest(model=name, text=TEXT)))
                assert error.code() is grpc.StatusCode.NOT_FOUND
                hint = "is missing; choose one of" if not name else "'nobody' is not loaded; loaded:"
                assert error.details() == f"model: {hint} en-de, en-fr"

    asyncio.run(run())


def test_absurd_model_name_is_refused_not_quoted(serve: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            error = await failure(world.stub.Generate(GenerateRequest(model="x" * 100_000, text=TEXT)))
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert error.details() == "model: 100000 characters; at most 128 are allowed"

    asyncio.run(run())


def test_a_model_tells_the_bits_of_weights_and_caches(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        bits = {"precision": "int8", "weight_bits": 7, "cache_precision": "int8"}
        async with serve(make_model("a"), make_model("b", **bits)) as world:
            plain, coarse = (await world.stub.ListModels(ListModelsRequest())).models
            assert (plain.weight_bits, plain.cache_precision) == (0, "fp32"), "bits are told of int8 alone"
            assert (coarse.weight_bits, coarse.cache_precision) == (7, "int8")

    asyncio.run(run())


def test_a_model_tells_its_architecture(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        async with serve(make_model("a"), make_model("b", architecture="decoder", has_prompts=True)) as world:
            told = (await world.stub.ListModels(ListModelsRequest())).models
            assert [model.architecture for model in told] == ["transformer", "decoder"]

    asyncio.run(run())


def test_models_are_described_sorted_by_name(serve: Any, make_model: Any) -> None:
    async def run() -> None:
        french = make_model("en-fr", max_source_tokens=99, domain="captions of photographs")
        french.engine.is_ready = False
        async with serve(french, make_model("en-de")) as world:
            listed = (await world.stub.ListModels(ListModelsRequest())).models
            assert [(model.name, model.is_ready, model.max_source_tokens) for model in listed] == [
                ("en-de", True, 64),
                ("en-fr", False, 99),
            ]
            one = await world.stub.GetModel(GetModelRequest(model="en-fr"))
            assert one == listed[1]
            assert (one.version, one.precision, one.device, one.max_slots, one.max_slots_per_request) == ("v7", "fp32", "cpu", 8, 8)
            assert (one.max_target_tokens, one.default_max_new_tokens) == (48, 32)
            assert (one.domain, listed[0].domain) == ("captions of photographs", "")
            assert one.source_vocab_size == one.target_vocab_size == french.tokenizers.target.vocab_size
            assert world.records() == {}

    asyncio.run(run())
