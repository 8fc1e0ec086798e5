"""Outcomes of calls as counts and histograms by kind and by time, with reasons of failures."""

import math
from dataclasses import dataclass, field
from typing import Self

import msgspec

from dragoman.load.histogram import Counts, Histogram
from dragoman.load.show import one_line

OK = "OK"
# Where a call has no status of gRPC's: it was still under way when the run was given up, or ended without its answer.
UNFINISHED, INCOMPLETE = "UNFINISHED", "INCOMPLETE"
# A request that should have been refused was answered.
ACCEPTED = "MALFORMED_ACCEPTED"
# Was due while too many were under way, and not sent.
UNSENT = "UNSENT"
# Messages for statuses of our own.
MEANINGS = {
    UNFINISHED: "still under way when the run was given up",
    INCOMPLETE: "the call ended without an answer",
    ACCEPTED: "a malformed request was answered",
    UNSENT: "not sent: too many calls were under way",
}

MEASURES = ("e2e", "ttft", "itl", "queue", "server")

# Messages kept of each status. Servers put figures into theirs, so that there may be as many as there are requests.
MAX_MESSAGES = 20
MAX_CHARACTERS = 500
OTHERS = "(other messages)"
MAX_SLICES = 600


class Failure(msgspec.Struct, frozen=True):
    """One way to fail."""

    code: str  # name of the status
    message: str  # message of the server, gRPC or the sender
    num: int  # requests that failed so


class Failures(Counts):
    """Failed requests by status and message; what was provoked is not among them."""

    counts: dict[str, dict[str, int]] = msgspec.field(default_factory=dict)  # numbers of requests by status, then by message

    def add(self, code: str, message: str, num: int = 1) -> None:
        """Count requests; of a status that has enough messages further ones are counted together."""
        message = one_line(message, MAX_CHARACTERS)
        messages = self.counts.setdefault(code, {})
        if message not in messages and len(messages) >= MAX_MESSAGES:
            message = OTHERS
        messages[message] = messages.get(message, 0) + num

    def merge(self, other: Self) -> None:
        """Count another's too."""
        for failure in other.most_frequent():
            self.add(failure.code, failure.message, failure.num)

    def most_frequent(self) -> list[Failure]:
        """Return them, the most frequent first."""
        found = [Failure(code, message, num) for code, messages in self.counts.items() for message, num in messages.items()]
        return sorted(found, key=lambda failure: (-failure.num, failure.code, failure.message))


@dataclass(slots=True)
class Outcome:
    """Outcome of one request; times are seconds since the start of the run."""

    group: str  # group for counting: the kind of its call, or its misbehaviour
    is_injected: bool  # whether it misbehaved; its times are then counted for its group only
    due: float  # when its call was due
    ended: float = math.nan  # when it was answered or failed
    code: str = OK  # name of its status
    message: str = ""  # why it failed, where somebody said it
    is_intended: bool = False  # whether a failure was provoked
    first_token: float | None = None  # when its first token came; None for calls that do not stream
    gaps: list[float] = field(default_factory=list)  # times between messages with tokens
    source_tokens: int = 0  # tokens of the source
    generated_tokens: int = 0  # tokens of all answers
    queue_seconds: float | None = None  # waiting, as the server says
    server_seconds: float | None = None  # all of its time, as the server says
    num_retries: int = 0  # further attempts

    @property
    def is_ok(self) -> bool:
        """Whether it was answered."""
        return self.code == OK

    def times(self) -> dict[str, list[float]]:
        """Return its samples of each measure, seconds."""
        times = {"e2e": [self.ended - self.due], "itl": self.gaps}
        if self.first_token is not None:
            times["ttft"] = [self.first_token - self.due]
        if self.queue_seconds is not None and self.server_seconds is not None:
            times |= {"queue": [self.queue_seconds], "server": [self.server_seconds]}
        return times

    def is_good(self, slos: dict[str, float]) -> bool:
        """Tell whether it was answered within every limit, on the mean for tokens; limits on tokens are for streams."""
        if not (self.is_ok and slos):
            return self.is_ok
        times = self.times()
        samples = ((limit, times.get(measure)) for measure, limit in slos.items())
        return all(not seconds or sum(seconds) / len(seconds) <= limit for limit, seconds in samples)


class Group(Counts):
    """Requests that are counted together."""

    num: int = 0  # requests that were due while it counted
    num_ok: int = 0  # of them, answered
    num_good: int = 0  # of them, answered within the service levels
    num_retries: int = 0  # further attempts of them
    failures: dict[str, int] = msgspec.field(default_factory=dict)  # of them, failed, by status
    intended: dict[str, int] = msgspec.field(default_factory=dict)  # of them, failed as was provoked, by status
    source_tokens: int = 0  # of the answered
    generated_tokens: int = 0  # of the answered
    num_done: int = 0  # answers that came while it counted, whenever they were due
    num_done_good: int = 0  # of them, within the service levels
    num_done_tokens: int = 0  # tokens of them
    times: dict[str, Histogram] = msgspec.field(
        default_factory=dict
    )  # histograms by measure: `e2e`, `ttft`, `itl`, `queue`, `server`; of answers only

    def add_due(self, outcome: Outcome, is_good: bool) -> None:
        """Count a request that was due while it counted."""
        self.num += 1
        self.num_retries += outcome.num_retries
        if not outcome.is_ok:
            codes = self.intended if outcome.is_intended else self.failures
            codes[outcome.code] = codes.get(outcome.code, 0) + 1
            return
        self.num_ok += 1
        self.num_good += is_good
        self.source_tokens += outcome.source_tokens
        self.generated_tokens += outcome.generated_tokens
        for measure, samples in outcome.times().items():
            if samples and measure not in self.times:
                self.times[measure] = Histogram()
            for seconds in samples:
                self.times[measure].add(seconds)

    def add_done(self, outcome: Outcome, is_good: bool) -> None:
        """Count an answer that came while it counted."""
        self.num_done += 1
        self.num_done_good += is_good
        self.num_done_tokens += outcome.generated_tokens


class Slice(Counts):
    """A piece of the run's time."""

    num_due: int = 0  # requests due in it
    num_done: int = 0  # answers that came in it
    num_good: int = 0  # of them, within the service levels, of calls that did not misbehave
    num_failed: int = 0  # failures in it that were not provoked
    tokens: int = 0  # tokens of the answers
    in_flight: int = 0  # most calls under way at once
    # Times of the requests due in it, answered, of calls that did not misbehave.
    e2e: Histogram = msgspec.field(default_factory=Histogram)
    ttft: Histogram = msgspec.field(default_factory=Histogram)  # their times to the first token

    def merge(self, other: Self) -> None:
        """Add another's counts; of what was under way the larger number stays."""
        in_flight = max(self.in_flight, other.in_flight)
        super().merge(other)
        self.in_flight = in_flight


class Tally(Counts):
    """Counts of one sender process since it last handed them on, or of a run."""

    groups: dict[str, Group] = msgspec.field(default_factory=dict)  # by the kind of call, or by how it misbehaved
    slices: dict[int, Slice] = msgspec.field(default_factory=dict)  # by the second of the run
    # Failures that were counted and not provoked, with the reasons.
    failures: Failures = msgspec.field(default_factory=Failures)
    lag: Histogram = msgspec.field(default_factory=Histogram)  # delay of calls after they were due, while it counted
    # Delay of the sender's event loop, while it counted.
    loop_lag: Histogram = msgspec.field(default_factory=Histogram)

    def slice_at(self, seconds: float) -> Slice:
        """Return the slice of a time."""
        second = int(seconds)
        if second not in self.slices:  # an empty one takes longer to make than to look for
            self.slices[second] = Slice()
        return self.slices[second]

    def record(self, outcome: Outcome, slos: dict[str, float], start: float, end: float) -> None:
        """Count how a request ended, by limits of a good answer; counting begins and ends at seconds of the run."""
        is_good = not outcome.is_injected and outcome.is_good(slos)
        if outcome.group not in self.groups:
            self.groups[outcome.group] = Group()
        group = self.groups[outcome.group]
        if start <= outcome.due < end:
            group.add_due(outcome, is_good)
            if not outcome.is_ok and not outcome.is_intended:
                self.failures.add(outcome.code, outcome.message or MEANINGS.get(outcome.code, ""))
        if outcome.is_ok and start <= outcome.ended < end:
            group.add_done(outcome, is_good)
        due, ended = self.slice_at(outcome.due), self.slice_at(outcome.ended)
        due.num_due += 1
        if outcome.is_ok:
            ended.num_done += 1
            ended.num_good += is_good
            ended.tokens += outcome.generated_tokens
            if not outcome.is_injected:
                due.e2e.add(outcome.ended - outcome.due)
                if outcome.first_token is not None:
                    due.ttft.add(outcome.first_token - outcome.due)
        elif not outcome.is_intended:
            ended.num_failed += 1


class Timeline:
    """Slices of equal length, from the start of the run; slices where nothing happened are missing.

    When there are too many, `width`, the length of a slice in seconds, is doubled.
    """

    def __init__(self, max_slices: int = MAX_SLICES) -> None:
        self.width = 1
        self.slices: dict[int, Slice] = {}
        self._max_slices = max_slices
        # Calls in flight by second and process: one second may come in two messages.
        self._in_flight: dict[int, dict[int, int]] = {}

    def add(self, process: int, seconds: dict[int, Slice]) -> None:
        """Add what a process counted, by the second."""
        for second, piece in seconds.items():
            by_process = self._in_flight.setdefault(second, {})
            by_process[process] = max(by_process.get(process, 0), piece.in_flight)
            piece.in_flight = sum(by_process.values())
            self.slices.setdefault(second // self.width, Slice()).merge(piece)
            while max(self.slices) >= self._max_slices:
                self.width *= 2
                old, self.slices = self.slices, {}
                for number, each in old.items():
                    self.slices.setdefault(number // 2, Slice()).merge(each)
        while len(self._in_flight) > MAX_SLICES:  # seconds so long ago that their calls are over
            del self._in_flight[min(self._in_flight)]

    def list(self) -> list[Slice]:
        """Return the slices in order, empty ones too."""
        return [self.slices.get(number, Slice()) for number in range(max(self.slices, default=-1) + 1)]
