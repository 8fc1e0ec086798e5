"""Traces of the real process, at a collector on a real port: spans of calls, phases and items, their attributes, and no texts."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import requests
from grpc_health.v1.health_pb2 import HealthCheckRequest
from grpc_health.v1.health_pb2_grpc import HealthStub

from dragoman.client.sync import Client
from dragoman.v1.generation_pb2 import GenerateRequest, ListModelsRequest, ScoreRequest
from dragoman.v1.generation_pb2_grpc import GenerationStub
from tests.conftest import Collector
from tests.system.harness.server import Event, Server, serving, stopped, wait_until

pytestmark = pytest.mark.e2e

pytest.importorskip("opentelemetry.trace", reason="needs the extra `tracing`")

TEXT = "Two men are playing guitar on a busy street."
SECRET = "Das bleibt unter uns."
PHASES = ["queue", "prefill", "decode"]
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SERVICE = "dragoman.v1.Generation"
BEARER = {"authorization": "Bearer a-long-token"}


def parent(number: int, is_sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{number:032x}-{SPAN}-{is_sampled:02d}", "tracestate": "vendor=7"}


@pytest.fixture(scope="module")
def traces() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.stop()


@pytest.fixture(scope="module")
def server(translators: Path, traces: Collector) -> Iterator[Server]:
    flags = ("--tracing-endpoint", traces.endpoint, "--tracing-sample-ratio", "0", "--max-slots", "4")
    callers = '[callers.web]\ntoken = "a-long-token"\n'
    with serving(translators, *flags, callers=callers, environment={"OTEL_BSP_SCHEDULE_DELAY": "20"}) as started:
        yield started
        assert started.terminate() == 0
        assert not [text for text in (SECRET, "Nein.") if text in str(traces.spans) or text in str(started.events)]


def lines(server: Server, request_id: str) -> list[dict[str, Any]]:
    def found() -> list[dict[str, Any]]:
        return [line for line in server.logged(Event.CALL) if line.get("request_id", "").startswith(request_id)]

    wait_until(lambda: bool(found()), f"{request_id} is logged")
    return found()


def metadata(headers: dict[str, str], token: bool = True) -> tuple[tuple[str, str], ...]:
    return tuple((headers | (BEARER if token else {})).items())


def spans(traces: Collector, number: int, count: int) -> list[Any]:
    def found() -> list[Any]:
        return [span for span in list(traces.spans) if int(span.trace_id.hex(), 16) == number]

    wait_until(lambda: len(found()) >= count, f"{count} spans of trace {number} have arrived")
    return sorted(found(), key=lambda span: (span.start_time_unix_nano, -span.end_time_unix_nano))


def check_phases(collector: Collector, span: Any) -> None:
    """Check that phases fill the span from its start, one after the other, and end before it does."""
    phases = collector.children(span)
    assert [phase.name for phase in phases] == PHASES
    starts = [phase.start_time_unix_nano for phase in phases]
    ends = [phase.end_time_unix_nano for phase in phases]
    assert starts == [span.start_time_unix_nano, *ends[:-1]]
    assert all(start <= end for start, end in zip(starts, ends, strict=True)) and ends[1] > starts[1] and ends[2] > starts[2]
    (first_token,) = phases[2].events
    assert starts[2] <= first_token.time_unix_nano <= ends[2] <= span.end_time_unix_nano


def test_a_call_is_a_span_below_its_callers_with_its_attributes(server: Server, traces: Collector, channel: grpc.Channel) -> None:
    number, stub = int(TRACE, 16), GenerationStub(channel)
    request = GenerateRequest(model="alpha", text=SECRET, request_id="mine", num_beams=3, max_new_tokens=9)
    answer = stub.Generate(request, metadata=metadata(parent(number)))
    span, *_ = spans(traces, number, 4)
    assert (span.name, span.parent_span_id.hex(), span.trace_state) == (f"{SERVICE}/Generate", SPAN, "vendor=7")
    assert (span.kind, span.status.code) == (span.SPAN_KIND_SERVER, 0)
    check_phases(traces, span)
    assert traces.attributes(span) == {
        "rpc.system": "grpc",
        "rpc.service": SERVICE,
        "rpc.method": "Generate",
        "rpc.grpc.status_code": 0,
        "dragoman.request_id": "mine",
        "dragoman.model.version": answer.model_version,
        "dragoman.num_beams": 3,
        "dragoman.priority": 0,
        "dragoman.source_language": "en",
        "dragoman.target_language": "de",
        "gen_ai.request.model": "alpha",
        "gen_ai.request.max_tokens": 9,
        "gen_ai.request.choice.count": 1,
        "gen_ai.usage.input_tokens": answer.usage.source_tokens,
        "gen_ai.usage.output_tokens": answer.usage.generated_tokens,
        "gen_ai.response.finish_reasons": ["length"],
    }
    [line] = lines(server, "mine")
    assert (line["trace_id"], line["span_id"]) == (TRACE, span.span_id.hex())


def test_samples_streams_scores_and_items_have_spans_of_their_own(server: Server, traces: Collector, channel: grpc.Channel) -> None:
    stub = GenerationStub(channel)
    options: dict[str, Any] = {"do_sample": True, "temperature": 0.5, "top_k": 7, "num_return_sequences": 3, "seed": 2**64 - 1}
    sampled = GenerateRequest(model="alpha", text=SECRET, **options)
    list(stub.GenerateStream(sampled, metadata=metadata(parent(1))))
    span, *_ = spans(traces, 1, 4)
    attributes = traces.attributes(span)
    assert (attributes["gen_ai.request.temperature"], attributes["gen_ai.request.top_k"]) == (0.5, 7)
    assert (attributes["gen_ai.request.choice.count"], attributes["gen_ai.response.finish_reasons"]) == (3, ["length"] * 3)
    check_phases(traces, span)
    stub.Score(ScoreRequest(model="alpha", text=SECRET, target="Nein."), metadata=metadata(parent(2)))
    span, child = spans(traces, 2, 2)
    assert (span.name, child.name) == (f"{SERVICE}/Score", "score") and child.end_time_unix_nano <= span.end_time_unix_nano
    texts = {"a": SECRET, "b": "", "c": SECRET}
    requests_ = [GenerateRequest(model="alpha", text=text, request_id=name) for name, text in texts.items()]
    list(stub.GenerateBatch(iter(requests_), metadata=metadata(parent(3))))
    stream = next(span for span in spans(traces, 3, 10) if span.name == f"{SERVICE}/GenerateBatch")
    items = {traces.attributes(item)["dragoman.request_id"]: item for item in traces.children(stream)}
    assert traces.attributes(stream)["dragoman.batch.num_requests"] == 3
    phases = {name: (item.name, len(traces.children(item))) for name, item in items.items()}
    assert phases == {"a": ("request", 3), "b": ("request", 0), "c": ("request", 3)}
    assert traces.attributes(items["b"])["dragoman.rejected_reason"] == "invalid"
    logged = {line["request_id"]: line["span_id"] for line in server.logged(Event.ITEM) if line["trace_id"] == f"{3:032x}"}
    assert logged == {name: item.span_id.hex() for name, item in items.items()}


def test_failures_are_spans_with_their_status_and_cause(server: Server, traces: Collector, channel: grpc.Channel) -> None:
    stub = GenerationStub(channel)
    cases = [
        (GenerateRequest(model="alpha", text=""), True, None, "INVALID_ARGUMENT", "invalid", "alpha"),
        (GenerateRequest(model=SECRET, text=SECRET), True, None, "NOT_FOUND", "unknown_model", None),
        (GenerateRequest(model="alpha", text=SECRET), False, None, "UNAUTHENTICATED", "unauthenticated", None),
        (GenerateRequest(model="alpha", text=SECRET, request_id=f"{SECRET}\n"), True, None, "INVALID_ARGUMENT", "invalid", None),
        (GenerateRequest(model="alpha", text=SECRET), True, 0.3, "DEADLINE_EXCEEDED", None, "alpha"),
    ]
    with stopped(*server.engines("alpha")):
        for i, (request, has_token, timeout, code, cause, model) in enumerate(cases):
            with pytest.raises(grpc.RpcError) as caught:
                stub.Generate(request, metadata=metadata(parent(100 + i), has_token), timeout=timeout)
            assert caught.value.code().name == code  # type: ignore[attr-defined]
            span, *children = spans(traces, 100 + i, 1)
            attributes = traces.attributes(span)
            assert (attributes["error.type"], attributes.get("dragoman.rejected_reason")) == (code, cause)
            assert attributes.get("gen_ai.request.model") == model and not [child for child in children if child.name == "decode"]
            is_error = code == "DEADLINE_EXCEEDED"
            assert span.status.code == (span.status.STATUS_CODE_ERROR if is_error else span.status.STATUS_CODE_UNSET)
        call = stub.Generate.future(GenerateRequest(model="alpha", text=SECRET), metadata=metadata(parent(200)))
        server.wait_for_metric(1, "dragoman_caller_requests_running")
        call.cancel()
        span, *_ = spans(traces, 200, 1)
        attributes = traces.attributes(span)
        assert (attributes["rpc.grpc.status_code"], attributes["error.type"]) == (1, "CANCELLED")
        assert span.status.code == span.status.STATUS_CODE_UNSET


def test_http_calls_are_named_by_method_and_route(server: Server, traces: Collector) -> None:
    def post(path: str, message: Any, number: int) -> int:
        headers = parent(number) | {"Authorization": "Bearer a-long-token"}
        return requests.post(server.http_address + path, json=message, headers=headers, timeout=60).status_code

    assert post("/v1/generate", {"model": "alpha", "text": SECRET, "requestId": "web", "numBeams": 4}, 300) == 200
    span, *_ = spans(traces, 300, 4)
    attributes = traces.attributes(span)
    assert span.name == "POST /v1/generate" and [phase.name for phase in traces.children(span)] == PHASES
    assert (attributes["http.request.method"], attributes["http.route"]) == ("POST", "/v1/generate")
    assert (attributes["dragoman.request_id"], attributes["dragoman.num_beams"]) == ("web", 4)
    assert not {"rpc.system", "rpc.service", "rpc.method"} & attributes.keys()
    path = "/v2/models/alpha/generate"
    assert [post(path, {"text_input": texts}, 301 + i) for i, texts in enumerate(([SECRET, SECRET], ""))] == [200, 400]
    answered, refused = spans(traces, 301, 9)[0], spans(traces, 302, 1)[0]
    assert answered.name == refused.name == "POST /v2/models/{model}/generate"
    assert [child.name for child in traces.children(answered)] == ["request", "request"]
    assert traces.attributes(refused)["error.type"] == "INVALID_ARGUMENT"


def test_callers_decide_on_their_traces_and_the_ratio_on_new_ones(server: Server, traces: Collector, channel: grpc.Channel) -> None:
    """Here new traces are never sampled. Health is not traced at all."""
    stub, before = GenerationStub(channel), len(traces.spans)
    traces_of = {400: {}, 401: parent(401, is_sampled=False), 402: parent(402), 403: {"traceparent": "nonsense"}}
    for number, headers in traces_of.items():
        stub.ListModels(ListModelsRequest(), metadata=metadata(headers | {"x-request-id": f"sampled-{number}"}))
    HealthStub(channel).Check(HealthCheckRequest(), metadata=metadata(parent(404)))
    [span] = spans(traces, 402, 1)
    logged = {number: lines(server, f"sampled-{number}")[0] for number in traces_of}
    assert "trace_id" not in logged[400] and "span_id" not in logged[403]
    assert (logged[401]["trace_id"], logged[401]["span_id"]) == (f"{401:032x}", SPAN)
    assert (logged[402]["trace_id"], logged[402]["span_id"]) == (f"{402:032x}", span.span_id.hex())
    assert len(traces.spans) == before + 1


def test_a_collector_that_hangs_holds_up_neither_answers_nor_the_end(translators: Path, collector: Any) -> None:
    collector.gate.clear()
    flags, delay = ("--tracing-endpoint", collector.endpoint), {"OTEL_BSP_SCHEDULE_DELAY": "50"}
    with serving(translators, *flags, environment=delay) as server, Client(server.address) as client:
        first = client.generate(TEXT, model="alpha").text
        assert collector.arrived.wait(30)
        assert {client.generate(TEXT, model="alpha").text for _ in range(20)} == {first}
    assert [event["level"] for event in server.events if event["event"].startswith("the collector takes no spans")] == ["warning"]
    assert server.events[-1]["event"] == Event.STOPPED
