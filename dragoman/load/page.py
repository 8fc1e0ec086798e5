"""The result of a run as one HTML page that needs nothing else: no script, no font, no picture from elsewhere."""

import html
from collections.abc import Iterable, Sequence
from pathlib import Path

from dragoman.load.charts import (
    heat_chart,
    in_flight_chart,
    percentile_chart,
    rate_chart,
    server_charts,
    sweep_charts,
    token_chart,
)
from dragoman.load.conditions import share_good
from dragoman.load.result import Result
from dragoman.load.show import duration, milliseconds, number, share
from dragoman.load.style import STYLE
from dragoman.load.table import MEASURES, group_cells, measured, time_cells

_MOST_ERRORS = 20


def report_page(result: Result) -> str:
    """Return the page."""
    body = [
        f"<header><h1>Load on {_text(_target(result))}</h1><p>{_text(_subtitle(result))}</p></header>",
        _notes(result),
        _tiles(result),
        _sweep_section(result),
        section(
            "Latency",
            f'<div class="plots">{percentile_chart(result)}{heat_chart(result)}</div>{_times_table(result)}'
            "<p>Times count from when a call was due, and are of answers to calls that did not misbehave on purpose; rows by kind "
            "are of that kind alone. Queue and server’s total are what the server says.</p>",
        ),
        section(
            "Requests",
            f'<div class="plots">{rate_chart(result)}{in_flight_chart(result)}{token_chart(result)}</div>'
            f"{_groups_table(result)}{_errors_table(result)}",
        ),
        *(
            section(f"Server: {series.url}", f'<div class="plots">{charts}</div>{_failed_readings(series.num_failures)}')
            for series in result.server
            if (charts := server_charts(series, result.seconds)) or series.num_failures
        ),
        section("Sender", _sender_table(result)),
        section("Settings", f'<div class="columns">{_settings_tables(result)}</div>'),
    ]
    return page(f"Load on {_target(result)}", body)


def write_report(path: Path, result: Result) -> None:
    """Write the page to a file."""
    path.write_text(report_page(result), encoding="utf-8")


def page(title: str, body: Iterable[str]) -> str:
    """Return a page of parts that are HTML already."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"/>'
        '<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head><body><main>{''.join(body)}</main></body></html>\n"
    )


def section(title: str, content: str) -> str:
    """Return a part of the page under a heading."""
    return f"<section><h2>{_text(title)}</h2>{content}</section>"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; the first cell of a row is its heading, the others are figures, which have their names on a narrow screen."""
    columns = "".join(f'<th scope="col">{_text(name)}</th>' for name in head)
    is_wide = len(head) > 2
    opened = [f'<td data-column="{_text(name)}">' if is_wide else "<td>" for name in head[1:]]
    lines = "".join(
        f'<tr><th scope="row">{_text(row[0])}</th>'
        f"{''.join(f'{tag}{_text(cell)}</td>' for tag, cell in zip(opened, row[1:], strict=True))}</tr>"
        for row in rows
    )
    return (
        f'<div class="table"><table class="{"wide" if is_wide else "narrow"}"><caption>{_text(caption)}</caption>'
        f"<thead><tr>{columns}</tr></thead><tbody>{lines}</tbody></table></div>"
    )


def tile(label: str, value: str, unit: str = "", kind: str = "") -> str:
    """Return a figure that catches the eye; the kind is `good`, `bad` or nothing."""
    return (
        f'<div class="tile {kind}"><span class="label">{_text(label)}</span>'
        f'<span class="value">{_text(value)}<span class="unit">{_text(unit)}</span></span></div>'
    )


def _text(text: str) -> str:
    return html.escape(text, quote=True)


def _target(result: Result) -> str:
    return result.settings.get("--server", "a server")


def _subtitle(result: Result) -> str:
    asked = [model for model in result.models if model["name"] == result.settings.get("--model", model["name"])]
    models = " or ".join(f"{m['name']} {m['version']} ({m['precision']}, {m['device']})" for m in asked)
    when = result.created.replace("T", " ").replace("+00:00", " UTC")
    return f"{when}; {result.seconds:.1f} s, the first {result.warmup_seconds:.1f} s not counted; {models or 'models unknown'}"


def _notes(result: Result) -> str:
    lines = [f"<li>{_text(warning)}</li>" for warning in result.warnings]
    notes = f'<aside class="warnings" aria-label="Warnings"><ul>{"".join(lines)}</ul></aside>' if lines else ""
    if not result.checks:
        return notes
    rows = [
        (
            check.condition,
            "failed" if check.is_failed else "passed",
            measured(check),
        )
        for check in result.checks
    ]
    return notes + table("The run fails if", ("condition", "", "measured"), rows)


def _tiles(result: Result) -> str:
    total = result.total
    e2e = total.times.get("e2e")
    ttft = total.times.get("ttft")
    tiles = [tile("answers", number(total.requests_per_second), "/s"), tile("tokens", number(total.tokens_per_second), "/s")]
    if result.sweep is not None:
        tiles.insert(0, tile("knee", number(result.sweep.knee), " calls/s", "good" if result.sweep.knee else "bad"))
    if result.slos:
        good = share_good(result)
        wanted = 0.99 if result.sweep is None else result.sweep.share
        tiles.append(tile(f"goodput, {share(good)}", number(total.goodput), "/s", "good" if (good or 0) >= wanted else "bad"))
    for name in ("p50", "p95", "p99"):
        tiles.append(tile(f"end to end, {name}", milliseconds(e2e.figure(name) if e2e else None), " ms"))
    if ttft is not None:
        tiles.append(tile("first token, p95", milliseconds(ttft.figure("p95")), " ms"))
    failed = total.num_failed
    tiles.append(tile("errors", f"{failed:,}", f" of {total.counts.num:,}", "bad" if failed else "good"))
    return f'<div class="tiles">{"".join(tiles)}</div>'


def _sweep_section(result: Result) -> str:
    if result.sweep is None:
        return ""
    rows = []
    for step in sorted(result.sweep.steps, key=lambda step: step.rate):
        e2e = step.times.get("e2e")
        times = [milliseconds(e2e.figure(name) if e2e else None) for name in ("p50", "p95", "p99")]
        rates = (number(step.requests_per_second), number(step.goodput))
        held = "yes" if step.is_passed else "no"
        rows.append((number(step.rate), held, share(step.share_good), *rates, *times, f"{sum(step.failures.values()):,}"))
    head = ("calls/s", "holds", "good", "answers/s", "goodput/s", "p50 ms", "p95 ms", "p99 ms", "errors")
    caption = f"Rates; one holds if {share(result.sweep.share)} of the requests are good"
    return section("Sweep", f'<div class="plots">{sweep_charts(result)}</div>{table(caption, head, rows)}')


def _times_table(result: Result) -> str:
    rows = []
    for measure, label in MEASURES.items():
        if measure in result.total.times:
            rows.append((label, *time_cells(result.total.times[measure])))
        if measure == "e2e" and len(result.groups) > 1:
            rows += [(f"… {name}", *time_cells(g.times["e2e"])) for name, g in result.groups.items() if "e2e" in g.times]
    head = ("", "samples", "mean", "p50", "p90", "p95", "p99", "p99.9", "max")
    return table("Milliseconds", head, rows)


def _groups_table(result: Result) -> str:
    rows = [(name, *group_cells(group)) for name, group in result.groups.items()]
    if len(rows) != 1:
        rows.append(("all", *group_cells(result.total)))
    head = ("", "sent", "answered", "good", "failed", "provoked", "retries", "answers/s")
    return table("Requests by the kind of call, or by how it misbehaved on purpose", head, rows)


def _errors_table(result: Result) -> str:
    counts = result.total.counts
    codes = sorted({*counts.failures, *counts.intended})
    if not codes:
        return ""
    rows = [(code, f"{counts.failures.get(code, 0):,}", f"{counts.intended.get(code, 0):,}") for code in codes]
    messages = [(f"{failure.code}: {failure.message or 'no reason given'}", f"{failure.num:,}") for failure in result.errors]
    reasons = table("The most frequent failures", ("", "requests"), messages[:_MOST_ERRORS]) if messages else ""
    return table("Failures by status", ("", "failed", "provoked"), rows) + reasons


def _failed_readings(count: int) -> str:
    return f"<p>{count:,} readings failed.</p>" if count else ""


def _sender_table(result: Result) -> str:
    sender = result.sender
    rows = [(label, *time_cells(s)) for label, s in (("sent late", sender.lag), ("event loop late", sender.loop_lag)) if s.num]
    head = ("", "samples", "mean", "p50", "p90", "p95", "p99", "p99.9", "max")
    caption = (
        f"Milliseconds; {sender.num_sent:,} calls from {sender.num_processes} process(es), the busiest used "
        f"{sender.cpu_cores:.2f} cores"
    )
    return table(caption, head, rows)


def _settings_tables(result: Result) -> str:
    slos = {f"limit on {name}": duration(limit) for name, limit in result.slos.items()}
    settings = table("As given", ("flag", "value"), list((result.settings | slos).items()))
    return settings + table("Versions of the sender", ("", ""), list(result.versions.items()))
