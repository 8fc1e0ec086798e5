import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
import structlog

from dragoman.server.telemetry.logs import configure_logging

Configure = Callable[..., Callable[[], list[str]]]


@pytest.fixture
def configure() -> Iterator[Configure]:
    """Configure logging to memory for one test; what is returned reads the lines written so far."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    root.handlers[:] = []

    def set_up(level: str = "info", log_format: Any = "json") -> Callable[[], list[str]]:
        stream = io.StringIO()
        configure_logging(level, log_format, stream)
        return lambda: stream.getvalue().splitlines()

    yield set_up
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_line_is_one_json_object_with_a_utc_time(configure: Configure) -> None:
    lines = configure()
    structlog.get_logger().info("listening", port=8500, where=object, note="ü\n2")
    [line] = [json.loads(line) for line in lines()]
    assert (line["event"], line["level"], line["port"], line["note"]) == ("listening", "info", 8500, "ü\n2")
    assert line["where"] == "<class 'object'>"
    assert abs(datetime.fromisoformat(line["timestamp"]) - datetime.now(UTC)).total_seconds() < 60


def test_a_file_whose_name_is_no_text_can_be_logged(configure: Configure) -> None:
    lines = configure()
    structlog.get_logger().info("ours", path="mod\udcff", where=object)
    [line] = [json.loads(line) for line in lines()]
    assert (line["path"], line["where"]) == ("mod\udcff", "<class 'object'>")


def test_other_libraries_lines_look_the_same(configure: Configure) -> None:
    lines = configure()
    structlog.contextvars.bind_contextvars(request_id="mine")
    logging.getLogger("grpc._server").warning("lost %s", "it")
    structlog.get_logger().info("ours")
    theirs, ours = [json.loads(line) for line in lines()]
    assert (theirs["event"], theirs["level"], theirs["logger"]) == ("lost it", "warning", "grpc._server")
    assert theirs["request_id"] == ours["request_id"] == "mine"
    assert set(theirs) - {"logger"} == set(ours)


def test_warnings_are_logged(configure: Configure) -> None:
    lines = configure()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(True)
        warnings.warn("old thing", stacklevel=1)
        logging.captureWarnings(False)
    [line] = [json.loads(line) for line in lines()]
    assert "old thing" in line["event"]
    assert line["level"] == "warning"


def fail() -> None:
    user_text = "a very " + "private sentence"
    raise ValueError(f"too long: {len(user_text)}")


@pytest.mark.parametrize("log_format", ["json", "console"])
@pytest.mark.parametrize("through", [structlog.get_logger, logging.getLogger])
def test_traceback_shows_the_code_but_no_values(configure: Configure, log_format: str, through: Any) -> None:
    lines = configure(log_format=log_format)
    try:
        fail()
    except ValueError:
        through("ours").error("failed", exc_info=True)
    text = "\n".join(lines())
    assert "too long: 23" in text
    assert "in fail" in text
    assert "private sentence" not in text.replace('"a very " + "private sentence"', "").replace(
        r"\"a very \" + \"private sentence\"", ""
    )
    if log_format == "json":
        assert len(lines()) == 1


def test_level_holds_for_all(configure: Configure) -> None:
    lines = configure("warning")
    structlog.get_logger().info("quiet")
    logging.getLogger("other").info("quiet")
    assert lines() == []
    structlog.get_logger().warning("loud")
    logging.getLogger("other").warning("loud")
    assert len(lines()) == 2


def test_configuring_again_replaces_the_stream(configure: Configure) -> None:
    old, new = configure(), configure()
    logging.getLogger("other").warning("once")
    assert (len(old()), len(new())) == (0, 1)


def test_console_is_plain_text(configure: Configure) -> None:
    lines = configure(log_format="console")
    structlog.get_logger().info("listening", port=8500)
    [line] = lines()
    assert "listening" in line
    assert "port=8500" in line
    assert "\x1b" not in line


def test_a_caller_that_is_gone_when_its_answer_comes_is_nobodys_error(configure: Configure) -> None:
    """It had been an error with a traceback, as many as a caller liked."""
    lines = configure()
    logger = logging.getLogger("grpc._cython.cygrpc")
    logger.error("ExecuteBatchError raised in core by servicer method [%s]", "/a.B/C")
    logger.error("something else")
    assert [line["event"] for line in map(json.loads, lines())] == ["something else"]
