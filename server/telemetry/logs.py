"""Structured logs."""

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

# Of each kind: lines that may come at once, and lines a second in the long run.
BURST = 100
PER_SECOND = 10.0
# How often those that were not written are to be told.
TELL_SECONDS = 10.0


class Sampler:
    """Says which lines to write; for any thread. Kinds must be few: each is remembered."""

    def __init__(self, tell: Callable[[str, int], None], clock: Callable[[], float] = time.monotonic) -> None:
        """Start with nothing left out.

        Args:
            tell: Writes that of a kind so many lines were not written.
            clock: Seconds that only rise.
        """
        self._tell = tell
        self._clock = clock
        self._buckets: dict[str, Bucket] = {}
        self._suppressed: dict[str, int] = {}
        self._last_told = clock()
        self._lock = threading.Lock()

    def allows(self, kind: str) -> bool:
        """Say whether to write a line of this kind; one that is not is counted, and told when it is time for that."""
        with self._lock:
            bucket = self._buckets.get(kind)
            if bucket is None:
                bucket = self._buckets[kind] = Bucket(PER_SECOND, BURST, self._clock)
            if bucket.level >= 1.0:
                bucket.take(1.0)
                return True
            self._suppressed[kind] = self._suppressed.get(kind, 0) + 1
            is_due = self._clock() - self._last_told >= TELL_SECONDS
        if is_due:
            self.tell()
        return False

    def tell(self) -> None:
        """Tell how many lines of each kind were not written and not told yet."""
        with self._lock:
            suppressed, self._suppressed = self._suppressed, {}
            self._last_told = self._clock()
        for kind, count in suppressed.items():
            self._tell(kind, count)


LogFormat = Literal["auto", "json", "console"]
# What gRPC logs, as an error and with a traceback, where a caller is gone before its answer has been sent.
CALLER_LEFT = "ExecuteBatchError raised in core by servicer method"


def configure_logging(
    level: str, log_format: LogFormat, stream: TextIO | None = None, fields: Mapping[str, object] | None = None
) -> Sampler:
    """Send structlog and the standard library's logging to one stream; return what leaves out other libraries' lines.

    Args:
        level: Least severe level that is written: `debug`, `info`, `warning` or `error`.
        log_format: `json`, `console`, or `auto`: the latter on a terminal, otherwise the former.
        stream: Where to; standard error if None, and nowhere if the process was started without one.
        fields: What every line has.
    """
    # Opened even to lose what is written: otherwise the next socket gets the descriptor that C libraries write warnings to.
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
    # Our own lines skip the standard library, whose records cost more than a request's whole log line may.
    structlog.configure(
        processors=[*shared, *renderers],
        wrapper_class=structlog.make_filtering_bound_logger(threshold),
        logger_factory=structlog.WriteLoggerFactory(file=target),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(target)
    sampler = Sampler(_tell_suppressed)
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
    # Python keeps the text of each warning that it does not ignore, and a library may warn of what callers send.
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
    logging.captureWarnings(True)
    return sampler


def _add_time(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Put the time on a line; JSON's encoder writes it as text in a fifth of the time that Python takes."""
    event["timestamp"] = datetime.now(UTC)
    return event


def _adding(fields: Mapping[str, object]) -> Processor:
    """Return what puts fields on a line."""

    def add(_: Any, __: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event.update(fields)
        return event

    return add


def _tell_suppressed(kind: str, count: int) -> None:
    structlog.get_logger("dragoman").warning("lines of a library not written", logger=kind, suppressed=count)


class _Lossy:
    """A stream that loses what cannot be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.isatty = stream.isatty

    def write(self, text: str) -> None:
        try:  # noqa: SIM105 - once a line, and `contextlib.suppress` takes as long as what is to be done
            self._stream.write(text)
        except OSError:
            pass

    def flush(self) -> None:
        try:  # noqa: SIM105
            self._stream.flush()
        except OSError:
            pass


def _renderers(log_format: LogFormat, target: TextIO) -> list[Processor]:
    """Return what turns an event into a line; plain tracebacks, because the pretty ones print the values of variables."""
    if log_format == "console":
        formatter = structlog.dev.plain_traceback
        return [structlog.dev.ConsoleRenderer(colors=target.isatty(), exception_formatter=formatter)]
    return [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_to_json)]


def _to_json(event: Any, **_: Any) -> str:
    """Return compact JSON; what JSON cannot express is written as its `str`."""
    try:
        return msgspec.json.encode(event, enc_hook=str).decode()
    except UnicodeEncodeError:  # such as the name of a file that is not UTF-8
        return json.dumps(event, default=str, separators=(",", ":"))
