"""Traces of the real process, at a collector on a real port."""

from pathlib import Path
from typing import Any

import pytest

from dragoman.client.request import Request
from dragoman.client.search import Search
from dragoman.client.sync import Client

pytestmark = pytest.mark.e2e

trace = pytest.importorskip("opentelemetry.trace", reason="needs the extra `tracing`")

TEXT = "Two men are playing guitar on a busy street."
PHASES = ["queue", "prefill", "decode"]


def caller(number: int) -> Any:
    """Make a sampled span of another service the active one."""
    context = trace.SpanContext(number, number, False, trace.TraceFlags(trace.TraceFlags.SAMPLED))
    return trace.use_span(trace.NonRecordingSpan(context))


def check_phases(collector: Any, span: Any) -> None:
    """See that phases fill the span from its start, one after the other, and end before it does."""
    phases = collector.children(span)
    assert [phase.name for phase in phases] == PHASES
    starts = [phase.start_time_unix_nano for phase in phases]
    ends = [phase.end_time_unix_nano for phase in phases]
    assert starts == [span.start_time_unix_nano, *ends[:-1]]
    assert all(start <= end for start, end in zip(starts, ends, strict=True))
    assert ends[1] > starts[1]
    assert ends[2] > starts[2]
    (first_token,) = phases[2].events
    assert starts[2] <= first_token.time_unix_nano <= ends[2] <= span.end_time_unix_nano


def test_a_trace_goes_from_the_client_through_the_engine(serve: Any, bundles: Path, collector: Any) -> None:
    flags = ("--tracing-endpoint", collector.endpoint, "--tracing-sample-ratio", "0")
    with serve(bundles, *flags) as server:
        with Client(server.address) as client:
            client.generate(TEXT, model="en-de", request_id="not-traced")
            with caller(1):
                result = client.generate(TEXT, model="en-de", search=Search(num_beams=4), request_id="traced")
                list(client.stream(TEXT, model="en-fr"))
                client.score(TEXT, "Zwei Männer spielen Gitarre.", model="en-de")
            with caller(2):
                list(client.generate_batch([Request(TEXT, model="en-de") for _ in range(20)]))
        assert server.terminate() == 0
    assert {int(span.trace_id.hex(), 16) for span in collector.spans} == {1, 2}
    (unary,) = collector.named("dragoman.v1.Generation/Generate")
    (stream,) = collector.named("dragoman.v1.Generation/GenerateStream")
    (batch,) = collector.named("dragoman.v1.Generation/GenerateBulk")
    (score,) = collector.named("dragoman.v1.Generation/Score")
    assert {int(span.parent_span_id.hex(), 16) for span in (unary, stream, score)} == {1}
    items = collector.children(batch)
    assert len(items) == 20
    for span in (unary, stream, *items):
        check_phases(collector, span)
    (scoring,) = collector.children(score)
    assert scoring.end_time_unix_nano <= score.end_time_unix_nano
    attributes = collector.attributes(unary)
    assert (attributes["dragoman.num_beams"], attributes["gen_ai.usage.output_tokens"]) == (4, result.usage.generated_tokens)
    lines = {event["request_id"]: event for event in server.events if event["event"] == "call"}
    assert lines["traced"]["trace_id"] == f"{1:032x}"
    assert lines["traced"]["span_id"] == unary.span_id.hex()
    assert "trace_id" not in lines["not-traced"]
    assert not [text for text in (TEXT, result.text, "Gitarre") if text in str(collector.spans)]


def test_a_collector_that_hangs_holds_up_neither_answers_nor_the_end(serve: Any, bundles: Path, collector: Any) -> None:
    collector.gate.clear()
    with serve(bundles, "--tracing-endpoint", collector.endpoint, environment={"OTEL_BSP_SCHEDULE_DELAY": "50"}) as server:
        with Client(server.address) as client:
            first = client.generate(TEXT, model="en-de").text
            assert collector.arrived.wait(30)
            assert {client.generate(TEXT, model="en-de").text for _ in range(20)} == {first}
        assert server.terminate() == 0
    assert [event["level"] for event in server.events if event["event"].startswith("the collector takes no spans")] == ["warning"]
    assert server.events[-1]["event"] == "stopped"
