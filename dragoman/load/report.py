"""HTML reports of one run and of two runs compared: one file from `page.html`, which loads nothing from elsewhere."""

from collections.abc import Sequence
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined

from dragoman.load.charts import Chart, latency_charts, request_charts, server_charts, sweep_charts
from dragoman.load.compare import Comparison
from dragoman.load.conditions import share_good
from dragoman.load.result import Result
from dragoman.load.show import duration, milliseconds, number, share
from dragoman.load.table import (
    Table,
    checks_table,
    differences_table,
    error_tables,
    groups_table,
    sender_table,
    sweep_table,
    times_table,
)

TIMES_TEXT = (
    "Times count from when a call was due, and are of answers to calls that did not misbehave on purpose; rows by kind are of that "
    "kind alone. Queue and server's total are as the server reports them."
)

INTERVALS_TEXT = (
    "The interval is of the second figure less the first, by a block bootstrap over the seconds of each run; a difference is "
    "beyond noise if the interval leaves zero out. Noise from run to run is not in it: repeat runs to see that."
)


class Tile(NamedTuple):
    """A large figure; `kind` is `good`, `bad` or empty."""

    label: str
    value: str
    unit: str
    kind: str = ""


class Section(NamedTuple):
    """A part of the page."""

    title: str
    tables: Sequence[Table] = ()
    charts: Sequence[Chart] = ()
    text: str = ""


def report_page(result: Result) -> str:
    """Return the report of a run."""
    sections = [
        Section("Latency", [times_table(result)], latency_charts(result), TIMES_TEXT),
        Section("Requests", [groups_table(result), *error_tables(result)], request_charts(result)),
    ]
    if result.sweep is not None:
        sections.insert(0, Section("Sweep", [sweep_table(result)], sweep_charts(result)))
    for series in result.server:
        failed = f"{series.num_failures:,} readings failed." if series.num_failures else ""
        if (charts := server_charts(series, result.seconds)) or failed:
            sections.append(Section(f"Server: {series.url}", charts=charts, text=failed))
    settings = result.settings | {f"limit on {name}": duration(limit) for name, limit in result.slos.items()}
    named = [Table("As given", ("flag", "value"), list(settings.items()))]
    named.append(Table("Versions of the sender", ("", ""), list(result.versions.items())))
    sections += [Section("Sender", [sender_table(result)]), Section("Settings", named)]
    checks = [checks_table(result)] if result.checks else []
    title = f"Load on {result.settings.get('--server', 'a server')}"
    return render(title, sections, _subtitle(result), result.warnings, checks, _tiles(result))


def comparison_page(comparison: Comparison, results: tuple[Result, Result], names: tuple[str, str]) -> str:
    """Return a comparison as one HTML page."""
    runs = [
        (name, result.created, f"{result.counted_seconds:.1f} s", f"{result.total.counts.num:,}", f"{result.total.num_failed:,}")
        for name, result in zip(names, results, strict=True)
    ]
    head = ("", "began", "counted", "requests", "failed")
    sections = [
        Section("Differences", [differences_table(comparison, "Times in milliseconds")], text=INTERVALS_TEXT),
        Section("Runs", [Table("First and second", head, runs)]),
    ]
    if comparison.unlike:
        sections.append(Section("Settings that differ", [Table("By flag", ("", "first", "second"), comparison.unlike)]))
    return render("Two runs compared", sections, warnings=comparison.warnings)


def render(
    title: str,
    sections: Sequence[Section],
    subtitle: str = "",
    warnings: Sequence[str] = (),
    tables: Sequence[Table] = (),
    tiles: Sequence[Tile] = (),
) -> str:
    """Return a page."""
    environment = Environment(loader=PackageLoader("dragoman.load", "."), autoescape=True, undefined=StrictUndefined)
    content = {"sections": sections, "subtitle": subtitle, "warnings": warnings, "tables": tables, "tiles": tiles}
    return environment.get_template("page.html").render(title=title, **content)


def _subtitle(result: Result) -> str:
    asked = [model for model in result.models if model["name"] == result.settings.get("--model", model["name"])]
    models = " or ".join(f"{m['name']} {m['version']} ({m['precision']}, {m['device']})" for m in asked)
    when = result.created.replace("T", " ").replace("+00:00", " UTC")
    return f"{when}; {result.seconds:.1f} s, the first {result.warmup_seconds:.1f} s not counted; {models or 'models unknown'}"


def _tiles(result: Result) -> list[Tile]:
    total, sweep = result.total, result.sweep
    e2e, ttft = total.times.get("e2e"), total.times.get("ttft")
    tiles = [] if sweep is None else [Tile("knee", number(sweep.knee), " calls/s", "good" if sweep.knee else "bad")]
    tiles += [Tile("answers", number(total.requests_per_second), "/s"), Tile("tokens", number(total.tokens_per_second), "/s")]
    if result.slos:
        good, wanted = share_good(result), 0.99 if sweep is None else sweep.share
        tiles.append(Tile(f"goodput, {share(good)}", number(total.goodput), "/s", "good" if (good or 0) >= wanted else "bad"))
    for name in ("p50", "p95", "p99"):
        tiles.append(Tile(f"end to end, {name}", milliseconds(e2e.figure(name) if e2e else None), " ms"))
    if ttft is not None:
        tiles.append(Tile("first token, p95", milliseconds(ttft.figure("p95")), " ms"))
    failed = total.num_failed
    return [*tiles, Tile("errors", f"{failed:,}", f" of {total.counts.num:,}", "bad" if failed else "good")]
