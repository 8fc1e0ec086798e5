"""What a collector gets of calls on a real port."""

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from dragoman.model.generation import Language, Languages
from dragoman.v1.generation_pb2 import GenerateRequest, ListModelsRequest, ScoreRequest

tracing = pytest.importorskip("dragoman.server.telemetry.tracing", reason="needs the extra `tracing`")

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = (("traceparent", f"00-{TRACE}-{SPAN}-01"), ("tracestate", "vendor=7"))
UNSAMPLED = (("traceparent", f"00-{TRACE}-{SPAN}-00"),)
SECRET = "Das bleibt unter uns."
GENERATE = "dragoman.v1.Generation/Generate"

Run = Callable[..., Any]


@pytest.fixture
def run(serve: Any, collector: Any) -> Iterator[Run]:
    """Serve, traced, while a coroutine calls; then every span has arrived."""

    def running(call: Callable[[Any], Any], *models: Any, ratio: float = 1.0, **settings: Any) -> None:
        tracer = tracing.Tracer(collector.endpoint, ratio, "1.2.3")

        async def serving() -> None:
            async with serve(*models, tracer=tracer, **settings) as world:
                await call(world)
                async with asyncio.timeout(60):
                    while world.server.num_running:
                        await asyncio.sleep(0.005)

        try:
            asyncio.run(serving())
        finally:
            assert tracer.close(10)

    yield running


def line(logged: Any, event: str = "call") -> dict[str, Any]:
    (found,) = [line for line in logged() if line["event"] == event]
    return found


def nanoseconds(seconds: float) -> int:
    return round(seconds * 1e9)


def test_a_call_is_a_span_below_its_callers(run: Run, collector: Any, logged: Any) -> None:
    async def call(world: Any) -> None:
        request = GenerateRequest(text=SECRET, request_id="mine", num_beams=4, max_new_tokens=9)
        await world.stub.Generate(request, metadata=SAMPLED)

    run(call, ratio=0)
    (span,) = collector.named(GENERATE)
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, SPAN, "vendor=7")
    assert (span.kind, span.status.code) == (span.SPAN_KIND_SERVER, 0)
    record = line(logged)
    assert (record["trace_id"], record["span_id"]) == (TRACE, span.span_id.hex())
    assert collector.attributes(span) == {
        "rpc.system": "grpc",
        "rpc.service": "dragoman.v1.Generation",
        "rpc.method": "Generate",
        "rpc.grpc.status_code": 0,
        "dragoman.request_id": "mine",
        "dragoman.model.version": "v7",
        "dragoman.num_beams": 4,
        "dragoman.priority": 0,
        "gen_ai.request.model": "en-de",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.choice.count": 1,
        "gen_ai.usage.input_tokens": record["source_tokens"],
        "gen_ai.usage.output_tokens": record["generated_tokens"],
        "gen_ai.response.finish_reasons": ["eos"],
    }


def test_languages_are_told_as_the_model_calls_them(run: Run, collector: Any, make_model: Any) -> None:
    languages = Languages(source=[Language(code="eng_Latn", names=["en"])], target=[Language(code="deu_Latn", names=["de"])])

    async def call(world: Any) -> None:
        await world.stub.Generate(GenerateRequest(text=SECRET, source_language="EN", target_language="de-AT"))
        await world.stub.Score(ScoreRequest(text=SECRET, target=SECRET))

    run(call, make_model(languages=languages))
    for name in (GENERATE, "dragoman.v1.Generation/Score"):
        (span,) = collector.named(name)
        attributes = collector.attributes(span)
        assert (attributes["dragoman.source_language"], attributes["dragoman.target_language"]) == ("eng_Latn", "deu_Latn")


@pytest.mark.parametrize("method", ["Generate", "GenerateStream"])
def test_phases_follow_each_other_without_a_gap(run: Run, collector: Any, method: str) -> None:
    async def call(world: Any) -> None:
        response = getattr(world.stub, method)(GenerateRequest(text=SECRET))
        await response if method == "Generate" else [_ async for _ in response]

    run(call)
    (span,) = collector.named(f"dragoman.v1.Generation/{method}")
    queue, prefill, decode = phases = collector.children(span)
    assert [phase.name for phase in phases] == ["queue", "prefill", "decode"]
    start = span.start_time_unix_nano
    bounds = [(phase.start_time_unix_nano - start, phase.end_time_unix_nano - start) for phase in phases]
    # To a microsecond: the engine of this test adds to seconds, and sums round.
    assert [tuple(round(bound / 1000) for bound in pair) for pair in bounds] == [
        (0, 250_000),
        (250_000, 375_000),
        (375_000, 1_000_000),
    ]
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    (event,) = decode.events
    assert (event.name, round((event.time_unix_nano - start) / 1000)) == ("first_token", 500_000)
    assert {phase.trace_id for phase in phases} == {span.trace_id}


def test_a_stream_is_a_span_until_it_ends(run: Run, collector: Any) -> None:
    async def call(world: Any) -> None:
        world.engine.hold()
        stream = world.stub.GenerateStream(GenerateRequest(text=SECRET))
        await stream.read()
        await asyncio.sleep(0.2)
        world.engine.gate.set()
        while await stream.read() is not grpc.aio.EOF:
            pass

    run(call)
    (span,) = collector.named("dragoman.v1.Generation/GenerateStream")
    assert span.end_time_unix_nano - span.start_time_unix_nano >= nanoseconds(0.2)


def test_sampling_is_ours_for_new_traces_and_the_callers_for_its_own(run: Run, collector: Any, logged: Any) -> None:
    async def call(world: Any) -> None:
        await world.stub.ListModels(ListModelsRequest())
        await world.stub.ListModels(ListModelsRequest(), metadata=UNSAMPLED)
        await world.stub.ListModels(ListModelsRequest(), metadata=SAMPLED)

    run(call, ratio=0)
    assert [span.trace_id.hex() for span in collector.spans] == [TRACE]
    without, unsampled, sampled = [line for line in logged() if line["event"] == "call"]
    assert not {"trace_id", "span_id"} & without.keys()
    assert (unsampled["trace_id"], unsampled["span_id"]) == (TRACE, SPAN)
    assert (sampled["trace_id"], sampled["span_id"]) == (TRACE, collector.spans[0].span_id.hex())

    collector.spans.clear()
    run(call, ratio=1)
    new, continued = collector.spans
    assert not new.parent_span_id
    assert new.trace_id.hex() not in (TRACE, "0" * 32)
    assert continued.trace_id.hex() == TRACE


def test_without_tracing_the_callers_trace_is_on_the_log_lines(serve: Any, logged: Any) -> None:
    async def run() -> None:
        async with serve() as world:
            await world.stub.Generate(GenerateRequest(text=SECRET), metadata=SAMPLED)
            await world.stub.Generate(GenerateRequest(text=SECRET), metadata=(("traceparent", "nonsense"),))

    asyncio.run(run())
    known, unknown = [line for line in logged() if line["event"] == "call"]
    assert (known["trace_id"], known["span_id"]) == (TRACE, SPAN)
    assert not {"trace_id", "span_id"} & unknown.keys()


@pytest.mark.parametrize(
    ("reason", "code", "is_error", "phases"),
    [
        ("step_failed", grpc.StatusCode.INTERNAL, True, ["queue"]),
        ("deadline", grpc.StatusCode.DEADLINE_EXCEEDED, True, ["queue"]),
        ("queue_full", grpc.StatusCode.RESOURCE_EXHAUSTED, False, ["queue"]),
        ("draining", grpc.StatusCode.UNAVAILABLE, True, ["queue"]),
    ],
)
def test_a_failed_call_says_how(
    run: Run, collector: Any, reason: str, code: grpc.StatusCode, is_error: bool, phases: list[str]
) -> None:
    async def call(world: Any) -> None:
        world.engine.reason, world.engine.incident = reason, "4711" if reason == "step_failed" else ""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await world.stub.Generate(GenerateRequest(text=SECRET))
        assert caught.value.code() == code

    run(call)
    (span,) = collector.named(GENERATE)
    attributes = collector.attributes(span)
    assert (attributes["rpc.grpc.status_code"], attributes["error.type"]) == (code.value[0], code.name)
    assert attributes["dragoman.finish_reason"] == reason
    assert attributes.get("dragoman.incident") == ("4711" if reason == "step_failed" else None)
    assert span.status.code == (span.status.STATUS_CODE_ERROR if is_error else span.status.STATUS_CODE_UNSET)
    assert [child.name for child in collector.children(span)] == phases


def test_a_refused_call_says_why(run: Run, collector: Any) -> None:
    async def call(world: Any) -> None:
        for request in (GenerateRequest(text=""), GenerateRequest(text=SECRET, model=SECRET), GenerateRequest(text=SECRET)):
            world.engine.has_places = request.model == SECRET or not request.text
            with pytest.raises(grpc.aio.AioRpcError):
                await world.stub.Generate(request)

    run(call)
    spans = [collector.attributes(span) for span in collector.named(GENERATE)]
    assert [span["dragoman.rejected_reason"] for span in spans] == ["invalid", "unknown_model", "queue_full"]
    assert [span.get("gen_ai.request.model") for span in spans] == ["en-de", None, "en-de"]
    assert not any(collector.children(span) for span in collector.named(GENERATE))


def test_a_caller_without_a_token_is_traced_as_refused(run: Run, collector: Any, tmp_path: Any) -> None:
    tokens = tmp_path / "tokens"
    tokens.write_text("a-long-enough-token-for-anyone\n")

    async def call(world: Any) -> None:
        with pytest.raises(grpc.aio.AioRpcError):
            await world.stub.Generate(GenerateRequest(text=SECRET))

    run(call, auth_tokens_file=tokens)
    attributes = collector.attributes(collector.named(GENERATE)[0])
    assert (attributes["error.type"], attributes["dragoman.rejected_reason"]) == ("UNAUTHENTICATED", "unauthenticated")


def test_a_cancelled_call_ends_its_span(run: Run, collector: Any) -> None:
    async def call(world: Any) -> None:
        world.engine.hold()
        answer = world.stub.Generate(GenerateRequest(text=SECRET))
        await world.engine.arrived.wait()
        answer.cancel()
        await world.engine.left.wait()

    run(call)
    (span,) = collector.named(GENERATE)
    attributes = collector.attributes(span)
    assert (attributes["rpc.grpc.status_code"], attributes["error.type"]) == (1, "CANCELLED")
    assert span.status.code == span.status.STATUS_CODE_UNSET


def test_each_request_of_a_batch_is_a_span_below_the_streams(run: Run, collector: Any, logged: Any) -> None:
    async def call(world: Any) -> None:
        requests = [GenerateRequest(text=text, request_id=name) for name, text in (("a", SECRET), ("b", ""), ("c", SECRET))]
        [_ async for _ in world.stub.GenerateBatch(requests, metadata=SAMPLED)]

    run(call)
    (stream,) = collector.named("dragoman.v1.Generation/GenerateBatch")
    assert collector.attributes(stream)["dragoman.batch.num_requests"] == 3
    items = {collector.attributes(item)["dragoman.request_id"]: item for item in collector.children(stream)}
    assert {name: item.name for name, item in items.items()} == dict.fromkeys("abc", "request")
    assert {name: len(collector.children(item)) for name, item in items.items()} == {"a": 3, "b": 0, "c": 3}
    assert collector.attributes(items["b"])["dragoman.rejected_reason"] == "invalid"
    lines = {line["request_id"]: line for line in logged() if line["event"] == "item"}
    assert {name: line["span_id"] for name, line in lines.items()} == {name: item.span_id.hex() for name, item in items.items()}
    assert {line["trace_id"] for line in lines.values()} == {TRACE}


def test_a_batch_has_a_bounded_number_of_spans(run: Run, collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "MAX_ITEMS", 2)

    async def call(world: Any) -> None:
        requests = [GenerateRequest(text=SECRET, request_id=str(index)) for index in range(5)]
        assert len([answer async for answer in world.stub.GenerateBatch(requests)]) == 5

    run(call)
    (stream,) = collector.named("dragoman.v1.Generation/GenerateBatch")
    assert collector.attributes(stream)["dragoman.batch.num_requests"] == 5
    assert len(collector.children(stream)) == 2


def test_a_scored_pair_is_traced(run: Run, collector: Any) -> None:
    async def call(world: Any) -> None:
        await world.stub.Score(ScoreRequest(text=SECRET, target="Nein."))
        world.engine.reason = "queue_full"
        with pytest.raises(grpc.aio.AioRpcError):
            await world.stub.Score(ScoreRequest(text=SECRET, target="Nein."))

    run(call)
    scored, refused = collector.named("dragoman.v1.Generation/Score")
    (child,) = collector.children(scored)
    assert child.name == "score"
    assert round((child.end_time_unix_nano - child.start_time_unix_nano) / 1000) == 1_000_000
    assert collector.attributes(scored)["dragoman.model.version"] == "v7"
    assert collector.attributes(refused)["dragoman.finish_reason"] == "queue_full"


def test_sampled_requests_say_how_tokens_are_drawn(run: Run, collector: Any) -> None:
    async def call(world: Any) -> None:
        request = GenerateRequest(text=SECRET, do_sample=True, temperature=0.5, top_k=7, num_return_sequences=3, seed=2**64 - 1)
        await world.stub.Generate(request)

    run(call)
    attributes = collector.attributes(collector.named(GENERATE)[0])
    assert (attributes["gen_ai.request.temperature"], attributes["gen_ai.request.top_k"]) == (0.5, 7)
    assert attributes["gen_ai.request.choice.count"] == 3
    assert attributes["gen_ai.response.finish_reasons"] == ["eos"] * 3


def test_no_span_holds_a_text(run: Run, collector: Any) -> None:
    texts: list[str] = []

    async def call(world: Any) -> None:
        for model in ("", SECRET):
            with pytest.raises(grpc.aio.AioRpcError):
                await world.stub.Generate(GenerateRequest(text="" if not model else SECRET, model=model))
        texts.append((await world.stub.Generate(GenerateRequest(text=SECRET))).text)
        await world.stub.Score(ScoreRequest(text=SECRET, target="Nein."))
        [_ async for _ in world.stub.GenerateBatch([GenerateRequest(text=SECRET, request_id="a")])]
        with pytest.raises(grpc.aio.AioRpcError):
            await world.stub.Generate(GenerateRequest(text=SECRET, request_id=f"{SECRET}\n"))

    run(call)
    assert len(collector.spans) >= 9
    everything = str(collector.spans) + str([collector.attributes(span) for span in collector.spans])
    assert not [text for text in (SECRET, "Nein.", *texts) if text in everything]


def test_health_is_not_traced(run: Run, collector: Any) -> None:
    async def call(world: Any) -> None:
        await HealthStub(world.channel).Check(HealthCheckRequest(), metadata=SAMPLED)

    run(call)
    assert collector.spans == []
