"""Export of spans: every state of the collector, and no effect on the process."""

import socket
import threading
import time
from typing import Any

import pytest

tracing = pytest.importorskip("dragoman.server.telemetry.tracing", reason="needs the extra `tracing`")

METHOD = "/dragoman.v1.Generation/Generate"


def trace(tracer: Any, number: int = 1) -> None:
    for _ in range(number):
        span = tracer.start(METHOD, time.monotonic(), None)
        ending = {"request_id": "mine", "model": "en-de", "source_tokens": 1, "generated_tokens": 2, "refusal": ""}
        span.end("OK", ended=time.monotonic(), **ending)


def sending_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("OtelBatch", "flush-spans"))}


def test_closing_sends_the_rest_with_the_times_of_the_day_and_ends_the_thread(collector: Any) -> None:
    before, began, slack = sending_threads(), time.time_ns(), 1_000_000  # two clocks are read one after the other
    tracer = tracing.Tracer(collector.endpoint, 1.0, "1.2.3")
    trace(tracer, 3)
    ended = time.time_ns()
    assert tracer.close(10) and len(collector.spans) == 3 and sending_threads() == before
    for span in collector.spans:
        assert began - slack <= span.start_time_unix_nano <= span.end_time_unix_nano <= ended + slack


def test_the_service_is_named_by_the_environment(collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value, name in (
        ("OTEL_TRACES_SAMPLER", "", "dragoman"),
        ("OTEL_RESOURCE_ATTRIBUTES", "service.name=translations,deployment.environment.name=test", "translations"),
        ("OTEL_SERVICE_NAME", "nearer", "nearer"),
    ):
        monkeypatch.setenv(variable, value)
        tracer = tracing.Tracer(collector.endpoint, 1.0, "1.2.3")
        trace(tracer)
        tracer.close(10)
        resource = collector.resources[-1]
        assert (resource["service.name"], resource["service.version"]) == (name, "1.2.3")
    assert resource["deployment.environment.name"] == "test"


def test_a_ratio_is_kept_within_six_standard_deviations(collector: Any) -> None:
    tracer = tracing.Tracer(collector.endpoint, 0.25, "1.2.3")
    started = [tracer.start(METHOD, time.monotonic(), None) for _ in range(2000)]
    tracer.close(10)
    assert 380 < sum(span is not None for span in started) < 620


@pytest.mark.parametrize("is_there", [True, False], ids=["silent", "absent"])
def test_a_dead_collector_neither_blocks_spans_nor_the_end(is_there: bool) -> None:
    before = sending_threads()
    with socket.create_server(("127.0.0.1", 0)) as black_hole:
        port = black_hole.getsockname()[1] if is_there else 1
        tracer = tracing.Tracer(f"http://127.0.0.1:{port}", 1.0, "1.2.3")
        trace(tracer, 5000)  # more than the queue holds
        closing = threading.Thread(target=tracer.close, args=(0.2,))
        closing.start()
        closing.join(20)
        assert not closing.is_alive()
        deadline = time.monotonic() + 20
        while sending_threads() != before and time.monotonic() < deadline:
            time.sleep(0.01)
        assert sending_threads() == before
