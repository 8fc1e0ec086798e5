import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.core.calls import Call
from dragoman.server.core.core import Core
from dragoman.server.core.requests import GenerateRequest, ScoreRequest
from dragoman.server.errors import InvalidRequest, ServiceError, Unavailable, UnexpectedFault
from dragoman.server.telemetry.metrics import Metrics
from tests.server.scripted import LoadedModels

TEXT = "A dog runs."


def make_core(*models: Any) -> tuple[Core, CollectorRegistry]:
    registry = CollectorRegistry()
    metrics = Metrics(registry, [1.0])
    for model in models:
        metrics.add_model(model.name, model.version, "fp32", "cpu", 8)
    return Core(LoadedModels(*models), metrics), registry


def outcome(logged: Any) -> list[str]:
    return [line["code"] for line in logged() if line["event"] == "call"]


def test_what_is_raised_inside_comes_out_as_one_service_error(logged: Any) -> None:
    async def run() -> None:
        core, _ = make_core()
        for raised, told in (
            (InvalidRequest("text", "is odd"), "text: is odd"),
            (KeyError("secret"), "internal error; quote incident "),
        ):
            with pytest.raises(ServiceError) as caught, core.calls.serving(Call.begin("toy/a")):
                raise raised
            assert caught.value.message.startswith(told)
        assert isinstance(caught.value, UnexpectedFault)
        assert outcome(logged) == ["INVALID_ARGUMENT", "INTERNAL"]
        assert core.num_running == 0

    asyncio.run(run())


@pytest.mark.parametrize("way", ["cancel", "close"])
def test_a_caller_that_leaves_is_recorded_as_such_and_goes_through(logged: Any, way: str) -> None:
    """A face may be a coroutine, which is cancelled, or a generator, which is closed."""

    async def run() -> None:
        core, _ = make_core()

        async def face() -> AsyncIterator[int]:
            with core.calls.serving(Call.begin("toy/a")):
                yield 1
                await asyncio.Event().wait()

        pieces: Any = face()
        await anext(pieces)
        if way == "close":
            await pieces.aclose()
        else:
            task = asyncio.create_task(anext(pieces))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert outcome(logged) == ["CANCELLED"]
        assert core.num_running == 0

    asyncio.run(run())


def test_calls_end_with_their_with_unless_their_answer_is_sent_later(logged: Any) -> None:
    async def run() -> None:
        core, _ = make_core()
        may_send = asyncio.Event()

        async def serve(is_sent_later: bool) -> None:
            with core.calls.serving(Call.begin("toy/a"), is_sent_later=is_sent_later):
                pass
            await may_send.wait()

        tasks = [asyncio.create_task(serve(is_sent_later)) for is_sent_later in (False, True)]
        await asyncio.sleep(0)
        assert core.num_running == 1
        core.calls.end_all()
        await asyncio.sleep(0)
        assert not any(task.done() for task in tasks), "they have their answers"
        assert not await core.calls.wait_idle(0)
        may_send.set()
        await asyncio.gather(*tasks)
        assert await core.calls.wait_idle(0)

    asyncio.run(run())


def test_a_call_that_the_server_ends_may_still_tell_its_caller(logged: Any) -> None:
    async def run() -> list[str]:
        core, told = make_core()[0], []

        async def serve() -> None:
            try:
                with core.calls.serving(Call.begin("toy/a")):
                    await asyncio.Event().wait()
            except Unavailable as error:
                await asyncio.sleep(0)  # which a task that is still cancelled could not
                told.append(error.message)

        task = asyncio.create_task(serve())
        await asyncio.sleep(0)
        await core.end_calls()
        await task
        return told

    assert asyncio.run(run()) == ["the server is shutting down"]
    assert outcome(logged) == ["UNAVAILABLE"]


def test_everybody_has_been_told_when_the_calls_are_ended(logged: Any) -> None:
    async def run() -> list[str]:
        core, told = make_core()[0], []

        async def serve(method: str) -> None:
            try:
                with core.calls.serving(Call.begin(method, is_awaited=method == "toy/a")):
                    await asyncio.Event().wait()
            except Unavailable:
                for _ in range(20):  # a face may need some turns for it
                    await asyncio.sleep(0)
                told.append(method)

        tasks = [asyncio.create_task(serve(method)) for method in ("toy/a", "toy/describe")]
        await asyncio.sleep(0)
        await core.end_calls()
        assert all(task.done() for task in tasks)
        return told

    assert set(asyncio.run(run())) == {"toy/a", "toy/describe"}


def test_an_answer_that_could_not_be_given_is_no_success(make_model: Any, logged: Any) -> None:
    async def run() -> None:
        core, registry = make_core(make_model())
        with pytest.raises(InvalidRequest), core.calls.serving(call := Call.begin("toy/a")):
            await core.generation.generate(GenerateRequest(text=TEXT), call)
            raise InvalidRequest("request", "its answer is too long for this face")
        found = {sample.name: sample.value for metric in registry.collect() for sample in metric.samples if sample.value}
        assert "dragoman_request_success_total" not in found
        assert found["dragoman_requests_failed_total"] == 1

    asyncio.run(run())


@pytest.mark.parametrize("way", ["break", "raise", "cancel"])
def test_a_stream_that_is_left_frees_its_slots_at_once(make_model: Any, logged: Any, way: str) -> None:
    """Not when the garbage collector comes by, which it does not in this test."""

    async def run() -> None:
        model = make_model()
        core, _ = make_core(model)
        model.engine.hold()

        async def serve() -> None:
            async with core.generation.stream(GenerateRequest(text=TEXT), Call.begin("toy/a")) as pieces:
                async for _ in pieces:
                    if way == "raise":
                        raise ConnectionError("the caller is gone")
                    if way == "break":
                        break
                    await asyncio.Event().wait()

        task = asyncio.create_task(serve())
        await asyncio.wait_for(model.engine.arrived.wait(), 10)
        await asyncio.sleep(0)
        if way == "cancel":
            task.cancel()
        kept, _ = await asyncio.wait([task], timeout=10)
        assert model.engine.cancelled == [model.engine.requests[0].id]
        assert [type(each.exception()) for each in kept if not each.cancelled()] == {
            "break": [type(None)], "raise": [ConnectionError], "cancel": []
        }[way]  # fmt: skip

    gc.disable()
    try:
        asyncio.run(run())
    finally:
        gc.enable()


def test_a_stream_that_is_read_to_its_end_cancels_nothing(make_model: Any, logged: Any) -> None:
    async def run() -> None:
        model = make_model()
        core, _ = make_core(model)
        async with core.generation.stream(GenerateRequest(text=TEXT), Call.begin("toy/a")) as pieces:
            results = [piece.result async for piece in pieces]
        assert results[-1] is not None and results[:-1] == [None] * (len(results) - 1)
        assert model.engine.cancelled == []

    asyncio.run(run())


def test_an_empty_name_among_several_models_asks_to_choose(make_model: Any, logged: Any) -> None:
    async def run() -> None:
        core, _ = make_core(make_model("en-fr"), make_model("en-de"))
        for request in (GenerateRequest(text=TEXT), GenerateRequest(text=" ")):
            with pytest.raises(ServiceError) as caught:
                await core.generation.generate(request, Call.begin("toy/a"))
            assert (caught.value.code, caught.value.message) == ("NOT_FOUND", "model: is missing; choose one of en-de, en-fr")

    asyncio.run(run())


def test_all_tokens_of_a_prompt_are_counted_as_its_caller_is_told_of_them(make_model: Any, logged: Any) -> None:
    """The last of them goes to the engine beside the others."""

    async def run() -> None:
        model = make_model("story", has_prompts=True, architecture="decoder", attention_layers=0)
        core, registry = make_core(model)
        told = 0
        for text in ("", TEXT):
            with core.calls.serving(call := Call.begin("toy/a")):
                told += (await core.generation.generate(GenerateRequest(model="story", text=text), call)).source_tokens
        assert told == 2 + len(model.tokenizers.source.encode(TEXT))
        for name in ("prompt_tokens_total", "request_prompt_tokens_sum"):
            assert registry.get_sample_value(f"dragoman_{name}", {"model": "story"}) == told
        with core.calls.serving(call := Call.begin("toy/a")):
            scores = await core.generation.score(ScoreRequest(model="story", text=TEXT, target=" It"), call)
        num_tokens = scores.source_tokens + len(scores.tokens)
        assert registry.get_sample_value("dragoman_score_tokens_total", {"model": "story"}) == num_tokens

    asyncio.run(run())
