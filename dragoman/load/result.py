"""What a run came to: the file that `--output` writes, `--report` draws and `load-compare` reads."""

from pathlib import Path
from typing import Literal

import msgspec

from dragoman.load.failures import Failure
from dragoman.load.histogram import PERCENTS, Histogram
from dragoman.load.plan import KINDS
from dragoman.load.scrape import ServerSeries
from dragoman.load.tally import Group, Slice
from dragoman.model.errors import InputError

FORMAT = "dragoman-load"
VERSION = 1
Unit = Literal["", "s", "/s", "share"]


class Summary(msgspec.Struct, frozen=True):
    """A measure in figures; times in seconds, None where there are no samples.

    Attributes:
        num: Samples.
        mean: Their mean.
        percentiles: By their names: p50, p90, p95, p99, p99.9 and max.
    """

    num: int
    mean: float | None
    percentiles: dict[str, float | None]

    def figure(self, name: str) -> float | None:
        """Return a percentile to show; None where there are too few samples for it to be another than the largest."""
        fewest = 1.0 if name == "max" else 1 / (1 - float(name[1:]) / 100)
        return self.percentiles[name] if self.num >= round(fewest) else None


class GroupResult(msgspec.Struct, frozen=True):
    """Requests that are counted together.

    Attributes:
        counts: Numbers of requests and tokens, failures by status, and the histograms of the times.
        requests_per_second: Answers that came while it counted, over that time.
        goodput: Of them, those within the service levels.
        tokens_per_second: Their tokens.
        times: By measure: e2e, ttft, itl (of streams), queue and server (as the server says).
    """

    counts: Group
    requests_per_second: float
    goodput: float
    tokens_per_second: float
    times: dict[str, Summary]

    @property
    def num_failed(self) -> int:
        """Failures that were not provoked."""
        return sum(self.counts.failures.values())


class TimelineResult(msgspec.Struct, frozen=True):
    """The run by time.

    Attributes:
        width: Length of a slice, seconds.
        slices: In order, from the start, the warm-up included.
    """

    width: int
    slices: list[Slice]


class SenderResult(msgspec.Struct, frozen=True):
    """How the sender did.

    Attributes:
        num_processes: Its processes.
        num_sent: Calls sent, the warm-up's too.
        lag: How much later than due calls were sent; empty for a closed loop.
        loop_lag: How late its event loops were.
        cpu_cores: Processor time over wall time of the busiest process.
    """

    num_processes: int
    num_sent: int
    lag: Summary
    loop_lag: Summary
    cpu_cores: float


class Step(msgspec.Struct, frozen=True):
    """One rate of a sweep.

    Attributes:
        rate: Calls a second.
        is_passed: Whether the service levels held.
        share_good: Requests answered within the service levels, of all that were due.
        requests_per_second: Answers a second.
        goodput: Of them, within the service levels.
        failures: Failures by status.
        times: As in `GroupResult`.
    """

    rate: float
    is_passed: bool
    share_good: float
    requests_per_second: float
    goodput: float
    failures: dict[str, int]
    times: dict[str, Summary]


class Sweep(msgspec.Struct, frozen=True):
    """Rates tried in search of the highest that holds the service levels.

    Attributes:
        steps: In the order they were tried.
        knee: The highest rate that held; None where none did.
        share: Part of the requests that has to be good.
    """

    steps: list[Step]
    knee: float | None
    share: float


class Check(msgspec.Struct, frozen=True):
    """A condition of `--fail-on`.

    Attributes:
        condition: As it was given.
        value: What was measured; None where there was nothing to measure.
        is_failed: Whether it makes the run fail.
        unit: Of the value: `s`, `/s`, `share` for parts of 1, or nothing for a number.
    """

    condition: str
    value: float | None
    is_failed: bool
    unit: Unit = ""


class Result(msgspec.Struct, frozen=True):
    """A run.

    Attributes:
        created: When it began, ISO 8601, UTC.
        settings: What was asked for, by flag.
        versions: Of programs and machine, by name.
        models: What the server has, as `ListModels` tells.
        seconds: How long calls were sent.
        warmup_seconds: The part of it that does not count.
        is_interrupted: Whether it was ended before its time.
        slos: Limits of a good answer, seconds.
        total: All requests; its times are of those that did not misbehave.
        groups: By the kind of call, or by how it misbehaved.
        timeline: By time.
        sender: How the sender did.
        server: The server's own metrics, an entry for each address.
        sweep: Rates tried; None for a single run. Everything else is then of the run at the knee.
        checks: Conditions of `--fail-on`.
        errors: Failures that were not provoked, by status and message, the most frequent first.
        warnings: What a reader should know before believing the figures.
        format: Always `dragoman-load`.
        version: Of this format; grows when what is there changes its meaning.
    """

    created: str
    settings: dict[str, str]
    versions: dict[str, str]
    models: list[dict[str, str]]
    seconds: float
    warmup_seconds: float
    is_interrupted: bool
    slos: dict[str, float]
    total: GroupResult
    groups: dict[str, GroupResult]
    timeline: TimelineResult
    sender: SenderResult
    server: list[ServerSeries] = []
    sweep: Sweep | None = None
    checks: list[Check] = []
    errors: list[Failure] = []
    warnings: list[str] = []
    format: str = FORMAT
    version: int = VERSION

    @property
    def has_success(self) -> bool:
        """Whether anything ended as it should; where all calls were to misbehave, as they were provoked to."""
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


class _Head(msgspec.Struct):
    format: str = ""
    version: int = 0


def percentile_name(percent: float) -> str:
    """Return what a percentile is called."""
    return f"p{percent:g}"


def summarise(histogram: Histogram) -> Summary:
    """Return a histogram in figures."""
    values = dict(zip(map(percentile_name, PERCENTS), histogram.percentiles(PERCENTS), strict=True))
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


def write_result(path: Path, result: Result) -> None:
    """Write a result as JSON."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")


def read_result(path: Path) -> Result:
    """Read a result.

    Raises:
        InputError: If the file cannot be read or is not one, or is of a version that this program does not know.
    """
    try:
        content = path.read_bytes()
        head = msgspec.json.decode(content, type=_Head)
        if head.format != FORMAT:
            raise InputError(f"{path}: not a result of `dragoman load`")
        if head.version != VERSION:
            raise InputError(f"{path}: version {head.version} of the format; this program reads version {VERSION}")
        return msgspec.json.decode(content, type=Result)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise InputError(f"{path}: not a result of `dragoman load`: {error}") from error
