"""Lines that callers can cause at will: a few are written, and all are counted."""

import io
import json
import logging

from dragoman.server.telemetry.logs import configure_logging
from dragoman.server.telemetry.sampling import BURST, PER_SECOND, TELL_SECONDS, Sampler


class Told:
    def __init__(self) -> None:
        self.now = 0.0
        self.lines: list[tuple[str, int]] = []
        self.sampler = Sampler(lambda kind, count: self.lines.append((kind, count)), lambda: self.now)

    def storm(self, kind: str, count: int) -> int:
        return sum(self.sampler.allows(kind) for _ in range(count))


def test_a_storm_writes_some_lines_and_tells_the_others() -> None:
    told = Told()
    assert told.storm("invalid", 10_000) == BURST
    told.sampler.tell()
    assert told.lines == [("invalid", 10_000 - BURST)]
    told.sampler.tell()
    assert len(told.lines) == 1


def test_lines_come_at_their_rate_in_the_long_run() -> None:
    told = Told()
    written = 0
    for _ in range(1000):
        told.now += 0.1
        written += told.storm("invalid", 1000)
    assert written <= BURST + 100 * PER_SECOND + 1
    told.sampler.tell()
    assert written + sum(count for _, count in told.lines) == 1_000_000
    assert len(told.lines) <= 100 / TELL_SECONDS + 1


def test_one_kinds_storm_hides_no_other_kind() -> None:
    told = Told()
    told.storm("invalid", 10_000)
    assert told.storm("unauthenticated", 1) == 1


def test_other_libraries_lines_are_sampled_by_their_logger(_logging_as_it_was: None) -> None:
    stream = io.StringIO()
    sampler = configure_logging("info", "json", stream)
    for _ in range(BURST + 50):
        logging.getLogger("grpc.aio._server").error("Unexpected [%s] raised by servicer method", "KeyError")
    logging.getLogger("other").error("rare")
    sampler.tell()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    told = lines[-1]
    assert (told["event"], told["logger"]) == ("lines of a library not written", "grpc.aio._server")
    events = [line["event"] for line in lines]
    assert len([event for event in events if event.startswith("Unexpected")]) + told["suppressed"] == BURST + 50
    assert "rare" in events
