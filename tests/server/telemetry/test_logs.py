"""Logs: one line of JSON or text per event, no values of variables in tracebacks, and sampling of lines that callers can cause."""

import io
import json
import logging
import os
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog

from dragoman.server.telemetry.logs import BURST, PER_SECOND, REPORT_SECONDS, Sampler, configure_logging

Configure = Callable[..., Callable[[], list[str]]]


@pytest.fixture
def configure(_logging_as_it_was: None) -> Iterator[Configure]:
    """Configure logging to memory for one test; the result reads the lines so far."""

    def set_up(level: str = "info", log_format: Any = "json") -> Callable[[], list[str]]:
        stream = io.StringIO()
        configure_logging(level, log_format, stream)
        return lambda: stream.getvalue().splitlines()

    yield set_up
    logging.captureWarnings(False)
    structlog.contextvars.clear_contextvars()


def test_a_line_is_one_json_object_with_a_utc_time(configure: Configure) -> None:
    """A name of a file that was not UTF-8 once ended the task that watched the models."""
    lines, odd = configure(), os.fsdecode(b"models/\xff")
    structlog.get_logger().info("listening", port=8500, where=object, note="ü\n2")
    structlog.get_logger().error("refused", folder=odd, where=object)
    first, second = map(json.loads, lines())
    assert (first["event"], first["level"], first["port"], first["note"]) == ("listening", "info", 8500, "ü\n2")
    assert second["folder"] == odd and first["where"] == second["where"] == "<class 'object'>"
    for line in (first, second):
        assert abs(datetime.fromisoformat(line["timestamp"]) - datetime.now(UTC)).total_seconds() < 60


def test_other_libraries_lines_and_warnings_look_the_same(configure: Configure) -> None:
    lines = configure()
    structlog.contextvars.bind_contextvars(request_id="mine")
    logging.getLogger("grpc._server").warning("lost %s", "it")
    structlog.get_logger().info("ours")
    # A caller that is gone when its answer comes is no error.
    logging.getLogger("grpc._cython.cygrpc").error("ExecuteBatchError raised in core by servicer method [%s]", "/a.B/C")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old thing", stacklevel=1)
        logging.captureWarnings(False)
    theirs, ours, warning = map(json.loads, lines())
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("lost it", "warning", "grpc._server")
    assert theirs["request_id"] == ours["request_id"] == "mine" and set(theirs) - {"logger"} == set(ours)
    assert "old thing" in warning["event"] and warning["level"] == "warning"


@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.parametrize("through", [structlog.get_logger, logging.getLogger])
def test_a_traceback_shows_code_but_no_values(configure: Configure, log_format: str, through: Any) -> None:
    def fail() -> None:
        user_text = "-".join(("private", "sentence"))
        raise ValueError(f"too long: {len(user_text)}")

    lines = configure(log_format=log_format)
    try:
        fail()
    except ValueError:
        through("ours").error("failed", exc_info=True)
    text = "\n".join(lines())
    assert "too long: 16" in text and "in fail" in text and "private-sentence" not in text
    assert log_format == "console" or len(lines()) == 1


def test_level_stream_and_format_hold_for_all(configure: Configure) -> None:
    old, lines = configure(), configure("warning", "console")
    for name in ("info", "warning"):
        for logger in (structlog.get_logger(), logging.getLogger("other")):
            getattr(logger, name)("loud")
    structlog.get_logger().error("listening", port=8500)
    *loud, last = lines()
    assert old() == [] and len(loud) == 2
    assert "listening" in last and "port=8500" in last and "\x1b" not in last


def test_a_storm_of_lines_is_sampled_by_kind_and_counted() -> None:
    now, told = [0.0], list[tuple[str, int]]()
    sampler = Sampler(lambda kind, count: told.append((kind, count)), lambda: now[0])

    def storm(kind: str, count: int) -> int:
        return sum(sampler.allows(kind) for _ in range(count))

    assert storm("invalid", 10_000) == BURST and storm("unauthenticated", 1) == 1, "one kind hides no other"
    for _ in range(2):
        sampler.flush()
        assert told == [("invalid", 10_000 - BURST)]
    told.clear()
    written = 0
    for _ in range(1000):
        now[0] += 0.1
        written += storm("invalid", 1000)
    sampler.flush()
    assert 100 * PER_SECOND - 1 <= written <= BURST + 100 * PER_SECOND + 1
    assert written + sum(count for _, count in told) == 1_000_000 and len(told) <= 100 / REPORT_SECONDS + 1


def test_other_libraries_lines_are_sampled_by_their_logger(_logging_as_it_was: None) -> None:
    stream = io.StringIO()
    sampler = configure_logging("info", "json", stream)
    for _ in range(BURST + 50):
        logging.getLogger("grpc.aio._server").error("Unexpected [%s] raised by servicer method", "KeyError")
    logging.getLogger("other").error("rare")
    sampler.flush()
    *lines, told = map(json.loads, stream.getvalue().splitlines())
    assert (told["event"], told["logger"]) == ("lines of a library not written", "grpc.aio._server")
    events = [line["event"] for line in lines]
    assert sum(event.startswith("Unexpected") for event in events) + told["suppressed"] == BURST + 50 and "rare" in events
