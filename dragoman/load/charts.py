"""The plots of a report: percentiles, latency over time, throughput, the sweep, and what the server said of itself."""

import math
from collections.abc import Sequence

from dragoman.load.histogram import Histogram, middle_of
from dragoman.load.plan import KINDS
from dragoman.load.result import Result
from dragoman.load.scrape import Point, ServerSeries
from dragoman.load.show import milliseconds, number
from dragoman.load.svg import Axis, Line, level, linear_axis, log_axis, plot, tips, upright, x_of, y_of

_MAX_COLUMNS, _ROWS = 120, 34
_PERCENT_TICKS = ((0.0, "0"), (50.0, "50"), (90.0, "90"), (95.0, ""), (99.0, "99"), (99.9, "99.9"), (99.99, "99.99"))
_MEGABYTE = 1024 * 1024


def percentile_chart(result: Result) -> str:
    """Return the latency at each percentile, stretched to the right so that the tail can be seen."""
    histograms = {"end to end": result.total.counts.times.get("e2e"), "first token": result.total.counts.times.get("ttft")}
    kinds = [name for name in (*KINDS, "slow") if name in result.groups]
    if len(kinds) > 1:
        histograms |= {name: result.groups[name].counts.times.get("e2e") for name in kinds}
    present = {name: histogram for name, histogram in histograms.items() if histogram is not None and histogram.num}
    if not present:
        return ""
    most = max(histogram.num for histogram in present.values())
    end = min(5.0, max(1.0, math.log10(most)))
    places = [end * i / 160 for i in range(161)]
    percents = [100 * (1 - 10**-place) for place in places]
    lines = []
    for colour, (name, histogram) in enumerate(list(present.items())[:6]):
        limit = math.log10(histogram.num) + 1e-9  # beyond it there is no sample
        values = histogram.percentiles(percents)
        points = [(p, v * 1000) for p, v in zip(places, values, strict=True) if v is not None and p <= max(limit, 0.3)]
        lines.append(Line(name, points, colour))
    values_seen = [max(value, 1e-3) for line in lines for _, value in line.points if value is not None]
    ticks = [(-math.log10(1 - percent / 100), text) for percent, text in _PERCENT_TICKS]
    x = Axis("percent of the requests that were not slower", 0.0, end, [tick for tick in ticks if tick[0] <= end + 1e-9])
    y = log_axis("milliseconds", min(values_seen), max(values_seen))
    marks = level(y, result.slos["e2e"] * 1000, "limit, end to end") if "e2e" in result.slos else ""
    return plot("Latency by percentile", x, y, lines, marks=marks)


def heat_chart(result: Result) -> str:
    """Return how many requests had which latency when, with the median and the 99th percentile."""
    columns, width = _columns([piece.e2e for piece in result.timeline.slices], result.timeline.width)
    filled = [histogram for histogram in columns if histogram.num]
    if not filled:
        return ""
    low = min(h.smallest or h.largest for h in filled) * 1000
    high = max(histogram.largest for histogram in filled) * 1000
    y = log_axis("milliseconds", max(low, 1e-3), max(high, 2e-3))
    x = linear_axis("seconds since the start, when the request was due", len(columns) * width)
    grid = [_rows(histogram, y) for histogram in columns]
    most = max(max(rows) for rows in grid)
    step = math.log(y.high / y.low) / _ROWS
    cells = []
    for i, rows in enumerate(grid):
        left, right = x_of(x, i * width), x_of(x, (i + 1) * width)
        for j, count in enumerate(rows):
            if count:
                top = y_of(y, y.low * math.exp((j + 1) * step))
                height = y_of(y, y.low * math.exp(j * step)) - top
                cells.append(
                    f'<rect class="cell" x="{left:.1f}" y="{top:.1f}" width="{right - left:.2f}" height="{height:.2f}" '
                    f'opacity="{0.12 + 0.88 * math.sqrt(count / most):.2f}"/>'
                )
    centres = [(i + 0.5) * width for i in range(len(columns))]
    lines = [
        Line(name, [(centre, _scaled(h.percentile(percent))) for centre, h in zip(centres, columns, strict=True)], colour)
        for name, percent, colour in (("median", 50, 1), ("99th percentile", 99, 4))
    ]

    def tip(i: int) -> str:
        p50, p95, p99 = (milliseconds(value) for value in columns[i].percentiles((50, 95, 99)))
        return f"{i * width}–{(i + 1) * width} s: {columns[i].num:,} requests, p50 {p50}, p95 {p95}, p99 {p99} ms"

    marks = _warmup(x, result) + tips(x, centres, width, tip)
    return plot("End-to-end latency over time (stronger: more requests)", x, y, lines, "".join(cells), marks)


def rate_chart(result: Result) -> str:
    """Return requests that were due, answers, good answers and failures by the second."""
    names = {"due": "num_due", "answered": "num_done", "good": "num_good", "failed": "num_failed"}
    if not result.slos:
        del names["good"]
    return _timeline(result, "Requests a second", "requests a second", names, is_rate=True)


def in_flight_chart(result: Result) -> str:
    """Return how many calls were under way."""
    return _timeline(result, "Calls under way", "calls", {"most under way": "in_flight"}, is_rate=False)


def token_chart(result: Result) -> str:
    """Return tokens by the second."""
    return _timeline(result, "Tokens a second", "tokens a second", {"tokens of the answers": "tokens"}, is_rate=True)


def sweep_charts(result: Result) -> str:
    """Return throughput and latency by the rate that was offered; nothing without a sweep."""
    if result.sweep is None:
        return ""
    steps = sorted(result.sweep.steps, key=lambda step: step.rate)
    high = max(step.rate for step in steps)
    x = linear_axis("calls a second, offered", high)
    knee = result.sweep.knee
    marks = "" if knee is None else upright(x, knee, f"knee {number(knee)}/s")
    rates = [
        Line("answers", [(step.rate, step.requests_per_second) for step in steps], 0),
        Line("good answers", [(step.rate, step.goodput) for step in steps], 2),
    ]
    y = linear_axis("a second", max(step.requests_per_second for step in steps))
    pictures = [plot("Throughput by offered rate", x, y, rates, marks=marks)]
    times = [
        Line(name, [(s.rate, _scaled(s.times["e2e"].figure(name))) for s in steps if "e2e" in s.times], colour)
        for name, colour in (("p50", 1), ("p95", 0), ("p99", 4))
    ]
    values = [max(value, 1e-3) for line in times for _, value in line.points if value is not None]
    if values:
        y = log_axis("milliseconds", min(values), max(values))
        if "e2e" in result.slos:
            marks += level(y, result.slos["e2e"] * 1000, "limit")
        pictures.append(plot("Latency by offered rate", x, y, times, marks=marks))
    return "".join(pictures)


def server_charts(series: ServerSeries, seconds: float) -> str:
    """Return what one address told about itself in the time that calls were sent."""
    points = [point for point in series.points if 0 <= point.at <= seconds]
    kinds: tuple[tuple[str, str, dict[str, str], float], ...] = (
        ("Requests in the server", "requests", {"waiting": "waiting", "running": "running"}, 1),
        ("Decode batch", "rows", {"slots in use": "slots_in_use", "rows in a step": "rows_per_step"}, 1),
        ("Step and queue", "milliseconds", {"step": "step_seconds", "queue": "queue_seconds"}, 1e3),
        ("Tokens the server generated", "tokens a second", {"tokens": "tokens_per_second"}, 1),
        ("Processor", "cores", {"all processes of the server": "cpu_cores"}, 1),
        ("Memory", "MiB", {"all processes of the server": "rss_bytes"}, 1 / _MEGABYTE),
    )
    return "".join(_server_chart(points, seconds, *kind) for kind in kinds)


def _server_chart(readings: list[Point], seconds: float, title: str, unit: str, names: dict[str, str], factor: float) -> str:
    lines = []
    for colour, (label, name) in enumerate(names.items()):
        points = [(point.at, point.values[name] * factor if name in point.values else None) for point in readings]
        if any(value is not None for _, value in points):
            lines.append(Line(label, points, colour))
    if not lines:
        return ""
    x = linear_axis("seconds since the start", seconds)
    y = linear_axis(unit, max((value for line in lines for _, value in line.points if value is not None), default=1.0))
    return plot(title, x, y, lines)


def _timeline(result: Result, title: str, unit: str, names: dict[str, str], is_rate: bool) -> str:
    width = result.timeline.width
    slices = [piece for i, piece in enumerate(result.timeline.slices) if i * width < result.seconds] or result.timeline.slices
    if not slices:
        return ""
    # The last slice is often cut short by the end of the run.
    lengths = [min(width, max(result.seconds - i * width, 0.001 * width)) if is_rate else 1 for i in range(len(slices))]
    if is_rate and len(slices) > 1 and lengths[-1] < width / 2:
        slices, lengths = slices[:-1], lengths[:-1]
    x = linear_axis("seconds since the start", len(slices) * width)
    centres = [(i + 0.5) * width for i in range(len(slices))]

    def values(name: str) -> list[float]:
        return [getattr(piece, name) / length for piece, length in zip(slices, lengths, strict=True)]

    colours = {"due": 5, "answered": 0, "good": 2, "failed": 4}
    by_label = {label: values(name) for label, name in names.items()}
    lines = [Line(label, list(zip(centres, by_label[label], strict=True)), colours.get(label, 0)) for label in names]
    y = linear_axis(unit, max(max(row) for row in by_label.values()))

    def tip(i: int) -> str:
        return f"{i * width}–{(i + 1) * width} s: " + ", ".join(f"{label} {number(row[i])}" for label, row in by_label.items())

    return plot(title, x, y, lines, marks=_warmup(x, result) + tips(x, centres, width, tip))


def _columns(histograms: Sequence[Histogram], width: int) -> tuple[list[Histogram], int]:
    """Merge neighbours until there are few enough."""
    size = max(1, -(-len(histograms) // _MAX_COLUMNS))
    columns = []
    for start in range(0, len(histograms), size):
        column = Histogram()
        for histogram in histograms[start : start + size]:
            column.merge(histogram)
        columns.append(column)
    while columns and not columns[-1].num:
        columns.pop()
    return columns, width * size


def _rows(histogram: Histogram, y: Axis) -> list[int]:
    rows = [0] * _ROWS
    for index, count in histogram.bins.items():
        place = y.place(middle_of(index) * 1000)
        rows[min(_ROWS - 1, max(0, int(place * _ROWS)))] += count
    return rows


def _warmup(x: Axis, result: Result) -> str:
    return upright(x, result.warmup_seconds, "counted from here") if result.warmup_seconds else ""


def _scaled(seconds: float | None) -> float | None:
    return None if seconds is None else seconds * 1000
