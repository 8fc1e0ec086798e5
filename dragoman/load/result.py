"""Result of a run: the file that `--output` writes, `--report` shows and `load-compare` reads."""

from pathlib import Path
from typing import Literal

import msgspec

from dragoman.load.histogram import PERCENTS, Histogram
from dragoman.load.plan import KINDS
from dragoman.load.scrape import ServerSeries
from dragoman.load.tally import Failure, Group, Slice
from dragoman.model.errors import InputError

FORMAT = "dragoman-load"
VERSION = 1
Unit = Literal["", "s", "/s", "share"]


class Summary(msgspec.Struct, frozen=True):
    """A measure in figures; times in seconds, None where there are no samples."""

    num: int  # samples
    mean: float | None  # their mean
    percentiles: dict[str, float | None]  # by their names: p50, p90, p95, p99, p99.9 and max

    def figure(self, name: str) -> float | None:
        """Return a percentile to show; None where there are too few samples for it to be another than the largest."""
        fewest = 1.0 if name == "max" else 1 / (1 - float(name[1:]) / 100)
        return self.percentiles[name] if self.num >= round(fewest) else None


class GroupResult(msgspec.Struct, frozen=True):
    """Requests that are counted together."""

    counts: Group  # numbers of requests and tokens, failures by status, and the histograms of the times
    requests_per_second: float  # answers that came while it counted, over that time
    goodput: float  # of them, those within the service levels
    tokens_per_second: float  # their tokens
    times: dict[str, Summary]  # by measure: e2e, ttft, itl (of streams), queue and server (as the server says)

    @property
    def num_failed(self) -> int:
        """Failures that were not provoked."""
        return sum(self.counts.failures.values())


class TimelineResult(msgspec.Struct, frozen=True):
    """The run by time."""

    width: int  # length of a slice, seconds
    slices: list[Slice]  # in order, from the start, the warm-up included


class SenderResult(msgspec.Struct, frozen=True):
    """Timeliness of the sender."""

    num_processes: int  # its processes
    num_sent: int  # calls sent, the warm-up's too
    lag: Summary  # delay of calls after they were due; empty for a closed loop
    loop_lag: Summary  # delay of the event loops
    cpu_cores: float  # processor time over wall time of the busiest process


class Step(msgspec.Struct, frozen=True):
    """One rate of a sweep."""

    rate: float  # calls a second
    is_passed: bool  # whether the service levels held
    share_good: float  # requests answered within the service levels, of all that were due
    requests_per_second: float  # answers a second
    goodput: float  # of them, within the service levels
    failures: dict[str, int]  # failures by status
    times: dict[str, Summary]  # as in `GroupResult`


class Sweep(msgspec.Struct, frozen=True):
    """Rates tried in search of the highest that holds the service levels."""

    steps: list[Step]  # in the order they were tried
    knee: float | None  # the highest rate that held; None where none did
    share: float  # part of the requests that has to be good


class Check(msgspec.Struct, frozen=True):
    """A condition of `--fail-on`."""

    condition: str  # as it was given
    value: float | None  # measured value; None where nothing was measured
    is_failed: bool  # whether it makes the run fail
    unit: Unit = ""  # of the value: `s`, `/s`, `share` for parts of 1, or nothing for a number


class Result(msgspec.Struct, frozen=True):
    """A run."""

    created: str  # when it began, ISO 8601, UTC
    settings: dict[str, str]  # options, by flag
    versions: dict[str, str]  # of programs and machine, by name
    models: list[dict[str, str]]  # models of the server, by `ListModels`
    seconds: float  # time in which calls were sent
    warmup_seconds: float  # the part of it that does not count
    is_interrupted: bool  # whether it was ended before its time
    slos: dict[str, float]  # limits of a good answer, seconds
    total: GroupResult  # all requests; its times are of those that did not misbehave
    groups: dict[str, GroupResult]  # by the kind of call, or by how it misbehaved
    timeline: TimelineResult  # by time
    sender: SenderResult  # timeliness of the sender
    server: list[ServerSeries] = []  # the server's own metrics, an entry for each address
    sweep: Sweep | None = None  # Rates tried; None for a single run. Everything else is then of the run at the knee.
    checks: list[Check] = []  # conditions of `--fail-on`
    errors: list[Failure] = []  # failures that were not provoked, by status and message, the most frequent first
    warnings: list[str] = []  # reasons for doubt
    format: str = FORMAT  # always `dragoman-load`
    version: int = VERSION  # of this format; grows when what is there changes its meaning

    @property
    def has_success(self) -> bool:
        """Whether anything succeeded; if all calls misbehave, whether they failed as provoked."""
        if self.sweep is not None:
            return any(step.requests_per_second for step in self.sweep.steps)
        plain = [group.counts for name, group in self.groups.items() if name in KINDS]
        if any(counts.num for counts in plain):
            return any(counts.num_ok for counts in plain)
        return any(group.counts.num_ok or group.counts.intended for group in self.groups.values())

    @property
    def counted_seconds(self) -> float:
        """Time that counts."""
        return max(0.0, self.seconds - self.warmup_seconds)


def summarise(histogram: Histogram) -> Summary:
    """Return a histogram in figures."""
    values = {f"p{percent:g}": histogram.percentile(percent) for percent in PERCENTS}
    return Summary(histogram.num, histogram.mean, values | {"max": histogram.largest if histogram.num else None})


def summarise_group(group: Group, seconds: float) -> GroupResult:
    """Return a group in figures; `seconds` is the time that counted."""

    def per_second(count: int) -> float:
        return count / seconds if seconds > 0 else 0.0

    return GroupResult(
        counts=group,
        requests_per_second=per_second(group.num_done),
        goodput=per_second(group.num_done_good),
        tokens_per_second=per_second(group.num_done_tokens),
        times={measure: summarise(histogram) for measure, histogram in group.times.items()},
    )


def encode(value: msgspec.Struct) -> bytes:
    """Return a result or a comparison as the content of a JSON file."""
    return msgspec.json.format(msgspec.json.encode(value), indent=1) + b"\n"


def write_file(path: Path, content: bytes) -> None:
    """Write a file; raises `InputError` naming it where it cannot be written to the end."""
    try:
        path.write_bytes(content)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error


def read_result(path: Path) -> Result:
    """Read a result.

    Raises:
        InputError: If the file cannot be read or is not one, or is of a version that this program does not know.
    """
    try:
        content = path.read_bytes()
        head = msgspec.json.decode(content, type=dict)
        if head.get("format") != FORMAT:
            raise InputError(f"{path}: not a result of `dragoman load`")
        if head.get("version") != VERSION:
            raise InputError(f"{path}: version {head.get('version')} of the format; this program reads version {VERSION}")
        return msgspec.json.decode(content, type=Result)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a result of `dragoman load`: {error}") from error
