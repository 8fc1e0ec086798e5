"""How spans leave the process, or do not."""

import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

tracing = pytest.importorskip("dragoman.server.telemetry.tracing", reason="needs the extra `tracing`")

METHOD = "/dragoman.v1.Generation/Generate"


@pytest.fixture
def black_hole() -> Iterator[str]:
    """An endpoint that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def trace(tracer: Any, number: int = 1) -> None:
    for _ in range(number):
        span = tracer.start(METHOD, time.monotonic(), None)
        ending = {"request_id": "mine", "model": "en-de", "source_tokens": 1, "generated_tokens": 2, "refusal": ""}
        span.end("OK", ended=time.monotonic(), **ending)


def sending_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith(("OtelBatch", "flush-spans"))}


def test_closing_sends_what_is_left_and_ends_the_thread(collector: Any) -> None:
    before = sending_threads()
    tracer = tracing.Tracer(collector.endpoint, 1.0, "1.2.3")
    trace(tracer, 3)
    assert tracer.close(10)
    assert len(collector.spans) == 3
    assert sending_threads() == before


def test_times_are_those_of_the_day(collector: Any) -> None:
    tracer = tracing.Tracer(collector.endpoint, 1.0, "1.2.3")
    before = time.time_ns()
    trace(tracer)
    after = time.time_ns()
    tracer.close(10)
    (span,) = collector.spans
    slack = 1_000_000  # the two clocks are read one after the other
    assert before - slack <= span.start_time_unix_nano <= span.end_time_unix_nano <= after + slack


def test_the_service_is_called_as_the_environment_says(collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for variables, name in (
        ({}, "dragoman"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=translations,deployment.environment.name=test"}, "translations"),
        ({"OTEL_SERVICE_NAME": "nearer"}, "nearer"),
    ):
        for variable, value in variables.items():
            monkeypatch.setenv(variable, value)
        tracer = tracing.Tracer(collector.endpoint, 1.0, "1.2.3")
        trace(tracer)
        tracer.close(10)
        assert collector.resources[-1]["service.name"] == name
        assert collector.resources[-1]["service.version"] == "1.2.3"
    assert collector.resources[-1]["deployment.environment.name"] == "test"


def test_a_ratio_between_none_and_all_is_kept_roughly(collector: Any) -> None:
    tracer = tracing.Tracer(collector.endpoint, 0.25, "1.2.3")
    started = [tracer.start(METHOD, time.monotonic(), None) for _ in range(2000)]
    tracer.close(10)
    # Six standard deviations on either side.
    assert 380 < sum(span is not None for span in started) < 620


@pytest.mark.parametrize("is_there", [True, False], ids=["silent", "absent"])
def test_a_dead_collector_neither_blocks_spans_nor_the_end(is_there: bool, black_hole: str) -> None:
    before = sending_threads()
    tracer = tracing.Tracer(black_hole if is_there else "http://127.0.0.1:1", 1.0, "1.2.3")
    trace(tracer, 5000)  # more than the queue holds
    closing = threading.Thread(target=tracer.close, args=(0.2,))
    closing.start()
    closing.join(20)
    assert not closing.is_alive()
    deadline = time.monotonic() + 20
    while sending_threads() != before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert sending_threads() == before


def test_an_export_that_hangs_is_called_off(collector: Any) -> None:
    collector.gate.clear()
    tracer = tracing.Tracer(collector.endpoint, 1.0, "1.2.3")
    trace(tracer, 600)  # a batch: it leaves at once
    assert collector.arrived.wait(10)
    assert not tracer.close(0.1)


def test_what_the_queue_cannot_hold_is_dropped(collector: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "8")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "8")
    collector.gate.clear()
    tracer = tracing.Tracer(collector.endpoint, 1.0, "1.2.3")
    trace(tracer, 8)
    assert collector.arrived.wait(10)
    trace(tracer, 100)
    collector.gate.set()
    assert tracer.close(10)
    assert len(collector.spans) <= 16
