"""Running calls: the error of each ending of the engine, records, callers that leave, and the end of the server."""

import asyncio
import gc
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from dragoman.server.errors import InvalidRequest, NotReady, ServiceError, Unavailable
from dragoman.server.service.context import Call
from dragoman.server.service.requests import GenerateRequest, ScoreRequest
from dragoman.server.service.service import Service
from dragoman.server.telemetry.metrics import Metrics
from tests.server.scripted import LoadedModels

TEXT = "A dog runs."


class World:
    """A service with one model of a scripted engine, and what is counted."""

    def __init__(self, *models: Any, tracer: Any = None) -> None:
        self.registry = CollectorRegistry()
        metrics = Metrics(self.registry)
        for model in models:
            metrics.add_model(model.name, model.version, "fp32", "cpu", 8)
        self.service, self.engine = Service(LoadedModels(*models), metrics, tracer), models[0].engine

    def counted(self, name: str) -> dict[str, float]:
        """Return a counter's values that are not 0, by their last label."""
        samples = [sample for metric in self.registry.collect() for sample in metric.samples if sample.name == f"dragoman_{name}"]
        return {list(sample.labels.values())[-1]: sample.value for sample in samples if sample.value}

    async def error(self, method: str) -> ServiceError:
        """Return the error that a call ends with; it is counted once, and nothing stays behind."""
        request: Any = ScoreRequest(text=TEXT) if method == "score" else GenerateRequest(text=TEXT)
        with pytest.raises(ServiceError) as caught, self.service.calls.serving(call := Call.begin("toy/a")):
            if method == "stream":
                async with self.service.generation.stream(request, call) as pieces:
                    async for _ in pieces:
                        pass
            else:
                await getattr(self.service.generation, method)(request, call)
        assert self.counted("requests_failed_total") == {caught.value.code: 1} and self.service.num_running == 0
        return caught.value


@pytest.fixture
def world(make_model: Any, logged: Any) -> World:
    return World(make_model())


@pytest.mark.parametrize("method", ["generate", "stream", "score"])
@pytest.mark.parametrize(
    ("reason", "code", "message", "retry", "refusal"),
    [
        ("cancelled", "CANCELLED", "the request was cancelled", None, ""),
        ("deadline", "DEADLINE_EXCEEDED", "the deadline passed ", None, ""),
        ("deadline_unmet", "DEADLINE_EXCEEDED", "refused before any work: about 2.5 s are needed", None, "deadline_unmet"),
        ("queue_full", "RESOURCE_EXHAUSTED", "too many ", 0.25, "queue_full"),
        ("draining", "UNAVAILABLE", "the model's engine is shutting down", 1.0, ""),
        ("step_failed", "INTERNAL", "generation failed; quote incident cafe01", None, ""),
        ("lost", "UNAVAILABLE", "the engine that had the request ended", 0.25, ""),
    ],
)
async def test_each_ending_of_the_engine_has_its_error(
    world: World, logged: Any, method: str, reason: str, code: str, message: str, retry: float | None, refusal: str
) -> None:
    world.engine.reason, world.engine.incident = reason, "cafe01"
    world.engine.retry_after_seconds, world.engine.needed_seconds = 0.25, 2.5
    error = await world.error(method)
    if method == "score":
        message = {"deadline_unmet": "the deadline passed before", "step_failed": "scoring failed; quote"}.get(reason, message)
        refusal = refusal.replace("deadline_unmet", "")
    assert (error.code, error.retry_after_seconds) == (code, retry) and error.message.startswith(message)
    assert world.counted("requests_rejected_total") == ({refusal: 1} if refusal else {})
    [line] = [line for line in logged() if line["event"] == "call"]
    assert line["code"] == code and TEXT not in str(logged())


@pytest.mark.parametrize("method", ["generate", "stream", "score"])
async def test_errors_of_the_engines_connection_and_of_programs(world: World, logged: Any, method: str) -> None:
    """Internal text never reaches a caller; the log has it beside the incident."""
    for error, refusal in (
        (Unavailable("gone", retry_after_seconds=2.5), {}),
        (NotReady("x"), {"not_ready": 1}),
        (KeyError("a"), {}),
    ):
        fresh = World(*world.service.models.all())
        fresh.engine.error = error
        found = await fresh.error(method)
        assert fresh.counted("requests_rejected_total") == refusal
        if isinstance(error, ServiceError):
            assert (found.code, found.message, found.retry_after_seconds) == (error.code, error.message, error.retry_after_seconds)
    [line] = [line for line in logged() if line["event"] == "unexpected exception"]
    assert found.message == f"internal error; quote incident {line['incident']}" and "KeyError" in line["exception"]


async def test_a_full_queue_refuses_before_any_work_and_a_stream_needs_an_end(world: World, logged: Any) -> None:
    world.engine.has_places, world.engine.retry_after_seconds = False, 0.5
    error = await world.error("stream")
    assert (error.code, error.retry_after_seconds, world.engine.requests) == ("RESOURCE_EXHAUSTED", 0.5, [])
    silent = World(*world.service.models.all())
    silent.engine.has_places, silent.engine.reason = True, "silence"
    assert (await silent.error("stream")).code == "INTERNAL"


async def test_streamed_tokens_count_when_the_engine_is_lost(world: World, logged: Any) -> None:
    world.engine.reason = "lost"
    with pytest.raises(Unavailable), world.service.calls.serving(call := Call.begin("toy/a")):
        async with world.service.generation.stream(GenerateRequest(text=TEXT), call) as pieces:
            async for _ in pieces:
                pass
    assert call.generated_tokens == len(world.engine.answer)


async def test_an_answer_that_cannot_be_sent_is_no_success(world: World, logged: Any) -> None:
    with pytest.raises(InvalidRequest), world.service.calls.serving(call := Call.begin("toy/a")):
        await world.service.generation.generate(GenerateRequest(text=TEXT), call)
        raise InvalidRequest("request", "its answer is too long")
    assert (world.counted("request_success_total"), world.counted("requests_failed_total")) == ({}, {"INVALID_ARGUMENT": 1})


@pytest.mark.parametrize("end", ["read", "break", "raise", "cancel"])
async def test_a_stream_that_is_left_frees_its_slots_at_once(world: World, logged: Any, end: str) -> None:
    """Not when the garbage collector runs, which it does not in this test."""

    async def serve() -> None:
        async with world.service.generation.stream(GenerateRequest(text=TEXT), Call.begin("toy/a")) as pieces:
            async for piece in pieces:
                last = piece
                if end == "raise":
                    raise ConnectionError("the caller is gone")
                if end == "break":
                    break
                if end == "cancel":
                    await asyncio.Event().wait()
            assert end == "break" or last.result is not None

    gc.disable()
    try:
        task = asyncio.create_task(serve())
        await asyncio.wait_for(world.engine.arrived.wait(), 10)
        await asyncio.sleep(0)
        if end == "cancel":
            task.cancel()
        await asyncio.wait([task], timeout=10)
        assert world.engine.cancelled == ([] if end == "read" else [world.engine.requests[0].id])
        assert task.cancelled() or isinstance(task.exception(), ConnectionError if end == "raise" else type(None))
    finally:
        gc.enable()


async def test_the_end_of_the_server_waits_for_sent_answers_and_tells_the_others(world: World, logged: Any) -> None:
    calls, may_send, told = world.service.calls, asyncio.Event(), list[str]()

    async def send(is_sent_later: bool) -> None:
        with calls.serving(Call.begin("toy/a"), is_sent_later=is_sent_later):
            pass
        await may_send.wait()

    async def run(method: str) -> None:
        try:
            with calls.serving(Call.begin(method, is_awaited=method == "toy/a")):
                await asyncio.Event().wait()
        except Unavailable as error:
            for _ in range(20):  # a task that is still cancelled could not
                await asyncio.sleep(0)
            told.append(error.message)

    sending = [asyncio.create_task(send(is_sent_later)) for is_sent_later in (False, True)]
    await asyncio.sleep(0)
    assert world.service.num_running == 1, "the answer that is sent later"
    calls.end_all()
    assert not await calls.wait_idle(0) and not any(task.done() for task in sending)
    may_send.set()
    await asyncio.gather(*sending)
    assert await calls.wait_idle(0)
    running = [asyncio.create_task(run(method)) for method in ("toy/a", "toy/describe")]
    await asyncio.sleep(0)
    await world.service.end_calls()
    assert all(task.done() for task in running) and told == ["the server is shutting down"] * 2


async def test_all_tokens_of_a_prompt_are_counted(make_model: Any, logged: Any) -> None:
    """The last of them goes to the engine beside the others."""
    model = make_model("story", has_prompts=True, architecture="decoder", attention_layers=0)
    world, told = World(model), 0
    for text in ("", TEXT):
        with world.service.calls.serving(call := Call.begin("toy/a")):
            told += (await world.service.generation.generate(GenerateRequest(text=text), call)).source_tokens
    assert told == 2 + len(model.tokenizers.source.encode(TEXT))
    assert world.counted("prompt_tokens_total") == world.counted("request_prompt_tokens_sum") == {"story": told}
    with world.service.calls.serving(call := Call.begin("toy/a")):
        scores = await world.service.generation.score(ScoreRequest(text=TEXT, target=" It"), call)
    assert world.counted("score_tokens_total") == {"story": scores.source_tokens + len(scores.tokens)}


@pytest.mark.parametrize("method", ["generate", "score"])
@pytest.mark.parametrize("reason", ["step_failed", "deadline", "queue_full", "draining"])
async def test_a_failed_requests_span_has_the_engines_reason(
    make_model: Any, collector: Any, logged: Any, method: str, reason: str
) -> None:
    tracing = pytest.importorskip("dragoman.server.telemetry.tracing", reason="needs the extra `tracing`")
    tracer = tracing.Tracer(collector.endpoint, 1.0, "1.2.3")
    world = World(make_model(), tracer=tracer)
    world.engine.reason, world.engine.incident = reason, "4711" if reason == "step_failed" else ""
    error = await world.error(method)
    assert await asyncio.to_thread(tracer.close, 10)
    [span] = [span for span in collector.spans if span.name == "toy/a"]
    attributes = collector.attributes(span)
    assert (attributes["error.type"], attributes["dragoman.finish_reason"]) == (error.code, reason)
    assert attributes.get("dragoman.incident") == (world.engine.incident or None)
    assert [child.name for child in collector.children(span)] == ["queue" if method == "generate" else "score"]
