"""Run of a bulk job: progress, what is left of earlier jobs, the summary and its page."""

import html
import resource
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.live import Live

from dragoman.bulk.job import MANIFEST_SUFFIX, Done, Work
from dragoman.bulk.storage import Input, Output
from dragoman.export.processor import processor_name
from dragoman.extras import own_version
from dragoman.server.system import available_cores

SUMMARY, PAGE = "summary.json", "summary.html"
LINE_SECONDS = 10.0  # between two lines of progress where there is no terminal
MAX_LISTED = 20


@dataclass
class Summary:
    """Counts of a job; rates are of the rows that this run translated.

    Attributes:
        remade: Shards that an earlier run had made of something else, by reason.
        cost_per_million: Of rows, in the currency of the price; None without one.
        errors: The first ones.
        removed: Outputs of shards that an input no longer has.
        foreign: Files of other jobs in the output folder.
    """

    output: str
    bundle: str
    options: dict[str, Any]
    inputs: int
    dragoman: str = field(default_factory=own_version)
    processor: str = field(default_factory=lambda: _processor())
    began: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))
    rows: int = 0
    rows_kept: int = 0
    rows_with_errors: int = 0
    shards: int = 0
    shards_kept: int = 0
    remade: dict[str, int] = field(default_factory=dict)
    source_tokens: int = 0
    generated_tokens: int = 0
    seconds: float = 0.0
    rows_per_second: float = 0.0
    generated_tokens_per_second: float = 0.0
    max_resident_mib: float = 0.0
    cost_per_million: float | None = None
    removed: int = 0
    foreign: int = 0
    errors: list[str] = field(default_factory=list)

    def text(self) -> str:
        """Return the summary in a few lines."""
        lines = [f"{self.rows:,} rows in {self.shards:,} shards, {self.rows_with_errors:,} with an error"]
        if self.shards_kept:
            lines.append(f"{self.rows_kept:,} rows were done before")
        lines += [f"{count:,} shards made again: {reason}" for reason, count in self.remade.items()]
        if self.rows > self.rows_kept:
            cost = "" if self.cost_per_million is None else f", {self.cost_per_million:.2f} a million rows"
            lines.append(f"{self.seconds:.1f} s, {self.rows_per_second:,.1f} rows/s{cost}")
        if self.foreign:
            lines.append(f"{self.foreign:,} files of other jobs are in {self.output}")
        return "\n".join(lines)

    def page(self) -> str:
        """Return the summary as an HTML page."""
        values = asdict(self)
        errors = values.pop("errors")
        rows = "".join(f"<tr><th>{html.escape(name)}<td>{html.escape(str(value))}" for name, value in values.items())
        listed = "".join(f"<li>{html.escape(error)}" for error in errors)
        style = "body{font:15px system-ui;margin:2em}th{text-align:left;padding-right:2em;font-weight:400}"
        title = f"Bulk job {html.escape(self.output)}"
        return (
            f'<!DOCTYPE html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{style}</style>'
            f"<h1>{title}</h1><table>{rows}</table>{'<h2>First errors</h2><ul>' + listed + '</ul>' if errors else ''}</html>\n"
        )


def run_job(
    work: Work, inputs: Sequence[Input], output: Output, done: Iterable[Done], price_per_hour: float | None, progress: TextIO
) -> Summary:
    """Run a job to its end by taking the shards that are done, and write its summary; raises as `done`."""
    options = msgspec.to_builtins((work.settings.columns, work.settings.request))
    changed = {name: value for part in options for name, value in part.items() if value not in (None, "", False, 0, (), [])}
    summary = Summary(output.address, work.settings.digest, changed, len(inputs))
    began = time.monotonic()
    num_shards = dict.fromkeys((source.name for source in inputs), 0)
    read = dict.fromkeys(num_shards, 0)  # bytes
    num_bytes, num_bytes_read, num_bytes_kept = max(1, sum(source.num_bytes for source in inputs)), 0, 0
    with _progress(progress) as show:
        for one in done:
            _add(summary, one)
            num_shards[one.input] = max(num_shards[one.input], one.number + 1)
            more = max(0, one.num_bytes_read - read[one.input])
            read[one.input] += more
            num_bytes_kept += more if one.state == "done" else 0
            summary.seconds = time.monotonic() - began
            _rate(summary, price_per_hour)
            num_bytes_read += more
            show(_line(summary, min(1.0, num_bytes_read / num_bytes), num_bytes_kept / num_bytes))
    summary.seconds = time.monotonic() - began
    _rate(summary, price_per_hour)
    _clear(summary, output, num_shards)
    resident = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    summary.max_resident_mib = round(max(resident) / 1024, 1)
    output.write(SUMMARY, msgspec.json.format(msgspec.json.encode(summary), indent=1) + b"\n")
    output.write(PAGE, summary.page().encode())
    return summary


def _processor() -> str:
    return f"{processor_name()}, {available_cores()} cores"


def _add(summary: Summary, one: Done) -> None:
    manifest = one.manifest
    summary.shards += 1
    summary.rows += manifest.num_rows
    summary.rows_with_errors += manifest.num_errors
    left = max(0, MAX_LISTED - len(summary.errors))
    summary.errors += [f"{one.input}, row {error.row}: {error.error}" for error in manifest.errors[:left]]
    if one.state == "done":
        summary.shards_kept += 1
        summary.rows_kept += manifest.num_rows
        return
    if one.state != "new":
        summary.remade[one.state] = summary.remade.get(one.state, 0) + 1
    summary.source_tokens += manifest.source_tokens
    summary.generated_tokens += manifest.generated_tokens


def _rate(summary: Summary, price_per_hour: float | None) -> None:
    num_rows, seconds = summary.rows - summary.rows_kept, max(summary.seconds, 1e-9)
    summary.rows_per_second = num_rows / seconds
    summary.generated_tokens_per_second = summary.generated_tokens / seconds
    if price_per_hour is not None and num_rows:
        summary.cost_per_million = price_per_hour * seconds / 3600 / num_rows * 1e6


def _line(summary: Summary, share: float, share_kept: float) -> str:
    parts = [f"{share:.1%}", f"{summary.rows:,} rows", f"{summary.rows_per_second:,.1f} rows/s"]
    if share > share_kept:
        minutes, seconds = divmod(round(summary.seconds * (1 - share) / (share - share_kept)), 60)
        parts.append(f"{minutes // 60}:{minutes % 60:02}:{seconds:02} left")
    if summary.rows_with_errors:
        parts.append(f"{summary.rows_with_errors:,} errors")
    if summary.cost_per_million is not None:
        parts.append(f"{summary.cost_per_million:.2f} a million")
    return ", ".join(parts)


@contextmanager
def _progress(stream: TextIO) -> Iterator[Any]:
    """Yield a function that shows a line: in place on a terminal, else now and then."""
    if stream.isatty():
        with Live(console=Console(file=stream), refresh_per_second=4) as live:
            yield live.update
        return
    last = time.monotonic()

    def show(line: str) -> None:
        nonlocal last
        if time.monotonic() >= last + LINE_SECONDS:
            last = time.monotonic()
            print(line, file=stream, flush=True)

    yield show


def _clear(summary: Summary, output: Output, num_shards: dict[str, int]) -> None:
    """Remove outputs of shards that inputs no longer have; count the files of other jobs."""
    for name in output.names():
        folder, _, file = name.rpartition("/")
        number = file.removeprefix("part-").partition(".")[0]
        if folder not in num_shards or not file.startswith("part-") or not number.isdecimal():
            summary.foreign += name not in (SUMMARY, PAGE)
        elif int(number) >= num_shards[folder]:
            output.remove(name)
            summary.removed += not name.endswith(MANIFEST_SUFFIX)
