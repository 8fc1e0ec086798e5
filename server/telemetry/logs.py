"""Structured logs on standard error: JSON lines, or text on a terminal; includes other libraries' log records.

Lines that cannot be written (closed terminal or pipe) are dropped. structlog's context variables (request id, model) are on every
line of a request. Users' texts are never logged, and tracebacks omit the values of variables.
"""

import json
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping, MutableMapping
from datetime import UTC, datetime
from typing import Any, Literal, TextIO, cast

import msgspec
import structlog
from structlog.types import Processor

from dragoman.server.buckets import Bucket

# Per kind of line: burst, and sustained lines per second.
BURST = 100
PER_SECOND = 10.0
# Interval of reports of suppressed lines.
REPORT_SECONDS = 10.0
# gRPC logs an error with traceback under this text when a caller disconnects before its answer is sent.
CALLER_LEFT = "ExecuteBatchError raised in core by servicer method"

LogFormat = Literal["auto", "json", "console"]


class Sampler:
    """Rate limit of log lines that clients can cause, by kind; thread-safe. Each kind has a bucket, so kinds must be few."""

    def __init__(self, log: Callable[[str, int], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Start without suppressed lines; `log` reports a kind and its number of suppressed lines."""
        self._log, self._clock = log, clock
        self._buckets: dict[str, Bucket] = {}
        self._suppressed: dict[str, int] = {}
        self._reported_at = clock()
        self._lock = threading.Lock()

    def allows(self, kind: str) -> bool:
        """Return whether to write a line of this kind; count suppressed lines and report them when due."""
        with self._lock:
            bucket = self._buckets.get(kind)
            if bucket is None:
                bucket = self._buckets[kind] = Bucket(PER_SECOND, BURST, self._clock)
            if bucket.level >= 1.0:
                bucket.take(1.0)
                return True
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            is_due = self._clock() - self._reported_at >= REPORT_SECONDS
        if is_due:
            self.flush()
        return False

    def flush(self) -> None:
        """Report the suppressed lines of each kind since the last report."""
        with self._lock:
            suppressed, self._suppressed = self._suppressed, {}
            self._reported_at = self._clock()
        for kind, count in suppressed.items():
            self._log(kind, count)


def configure_logging(
    level: str, log_format: LogFormat, stream: TextIO | None = None, fields: Mapping[str, object] | None = None
) -> Sampler:
    """Send structlog and the standard library's logging to one stream; return the sampler of other libraries' lines.

    `auto` is `console` on a terminal, otherwise `json`; the default stream is standard error, `fields` are added to every line.
    """
    # Always opened: otherwise the next socket gets the descriptor to which C libraries write warnings.
    target = cast(TextIO, _Lossy(stream or sys.stderr or open(os.devnull, "w", encoding="utf-8")))  # noqa: SIM115
    if log_format == "auto":
        log_format = "console" if target.isatty() else "json"
    threshold = logging.getLevelNamesMapping()[level.upper()]
    shared: list[Processor] = [
        *([_adding(fields)] if fields else []),
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        _add_time if log_format == "json" else structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    renderers: list[Processor] = _renderers(log_format, target)
    # Our own lines bypass the standard library, whose records cost more than a request's log line may.
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=target),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(target)
    sampler = Sampler(_log_suppressed)
    handler.addFilter(lambda record: not str(record.msg).startswith(CALLER_LEFT) and sampler.allows(record.name))
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderers],
        )
    )
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(threshold)
    # Python keeps the text of each warning not ignored, and a library may warn about a request's content.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.captureWarnings(True)
    return sampler


def _add_time(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Add the time as `datetime`, which msgspec formats five times as fast as Python."""
    event["timestamp"] = datetime.now(UTC)
    return event


def _adding(fields: Mapping[str, object]) -> Processor:
    def add(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.update(fields)
        return event

    return add


def _log_suppressed(kind: str, count: int) -> None:
    structlog.get_logger("dragoman").warning("lines of a library not written", logger=kind, suppressed=count)


class _Lossy:
    """Stream wrapper that drops lines that cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.isatty = stream.isatty

    def write(self, text: str) -> None:
        try:  # noqa: SIM105 - once a line, and `contextlib.suppress` takes as long as the write
            self._stream.write(text)
        except OSError:
            pass

    def flush(self) -> None:
        try:  # noqa: SIM105
            self._stream.flush()
        except OSError:
            pass


def _renderers(log_format: LogFormat, target: TextIO) -> list[Processor]:
    """Return the event formatters; plain tracebacks, since structlog's own print the values of variables."""
    if log_format == "console":
        formatter = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=formatter)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]


def _to_json(event: Any, **_: Any) -> str:
    """Return compact JSON; unsupported values are written as `str`."""
    try:
        return msgspec.json.encode(event, enc_hook=str).decode()
    except UnicodeEncodeError:  # such as a file name that is not UTF-8
        return json.dumps(event, default=str, separators=(",", ":"))
