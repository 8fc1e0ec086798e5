"""What a collector gets of calls over HTTP."""

import asyncio
from typing import Any

import pytest

tracing = pytest.importorskip("dragoman.server.telemetry.tracing", reason="needs the extra `tracing`")

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-01", "tracestate": "vendor=7"}
UNSAMPLED = {"traceparent": f"00-{TRACE}-{SPAN}-00"}
SECRET = "Das bleibt unter uns."
RPC = ("rpc.system", "rpc.service", "rpc.method")


def trace(serve_http: Any, collector: Any, *calls: tuple[str, Any, dict[str, str]]) -> list[int]:
    """Have calls answered whose callers alone decide whether they are traced; return their statuses when all spans have arrived."""
    tracer = tracing.Tracer(collector.endpoint, 0.0, "1.2.3")

    async def asking() -> list[int]:
        async with serve_http(tracer=tracer) as world:
            return [(await world.ask(path, message, headers=headers))[0] for path, message, headers in calls]

    try:
        return asyncio.run(asking())
    finally:
        assert tracer.close(10)


def test_a_call_is_a_span_below_its_callers_named_by_method_and_route(serve_http: Any, collector: Any, logged: Any) -> None:
    message = {"text": SECRET, "requestId": "mine", "numBeams": 4}
    calls = [("/v1/generate", message, SAMPLED), ("/v1/generate", message, UNSAMPLED)]
    assert trace(serve_http, collector, *calls) == [200, 200]
    (span,) = collector.named("POST /v1/generate")
    assert (span.trace_id.hex(), span.parent_span_id.hex(), span.trace_state) == (TRACE, SPAN, "vendor=7")
    assert [phase.name for phase in collector.children(span)] == ["queue", "prefill", "decode"]
    told = collector.attributes(span)
    assert (told["http.request.method"], told["http.route"]) == ("POST", "/v1/generate")
    assert (told["dragoman.request_id"], told["dragoman.num_beams"], told["gen_ai.request.model"]) == ("mine", 4, "en-de")
    assert not told.keys() & set(RPC) and SECRET not in str(told)
    traced = next(line for line in logged() if line["event"] == "call")
    assert (traced["trace_id"], traced["span_id"]) == (TRACE, span.span_id.hex())


def test_a_route_has_no_name_of_a_model_and_its_texts_have_spans_below(serve_http: Any, collector: Any) -> None:
    path = "/v2/models/en-de/generate"
    calls = [(path, {"text_input": [SECRET, SECRET]}, SAMPLED), (path, {"text_input": ""}, SAMPLED)]
    assert trace(serve_http, collector, *calls) == [200, 400]
    answered, refused = collector.named("POST /v2/models/{model}/generate")
    assert [child.name for child in collector.children(answered)] == ["request", "request"]
    told = collector.attributes(refused)
    assert (told["http.route"], told["error.type"]) == ("/v2/models/{model}/generate", "INVALID_ARGUMENT")
