"""Results shown to people: the HTML report, the live view in a terminal, and comparisons of two runs."""

import gzip
import io
import json
import re
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import numpy as np
import pytest
from rich.console import Console

from dragoman.load.compare import NUM_DRAWS, Comparison, Difference, compare
from dragoman.load.live import picture, watching
from dragoman.load.report import report_page
from dragoman.load.result import Check, Result, Step, Sweep, encode, summarise
from dragoman.load.run import Run
from dragoman.load.schedule import Arrivals
from dragoman.load.scrape import Point, ServerSeries
from dragoman.load.tally import Outcome, Tally
from dragoman.load.worker import Progress
from dragoman.model.errors import InputError
from tests.load.conftest import make_plan, make_result, run_of

SVG = "{http://www.w3.org/2000/svg}"


def parse(page: str) -> ElementTree.Element:
    """Parse a page as XML: it is written so that it is both."""
    head, _, rest = page.partition("\n")
    assert head == "<!DOCTYPE html>"
    return ElementTree.fromstring(rest)


@pytest.fixture(scope="module")
def page() -> str:
    generator = np.random.default_rng(0)
    latencies = [generator.lognormal(-3, 0.7, 40).tolist() for _ in range(30)]
    total = make_result(latencies, slos={"e2e": 0.1}).total
    slow = total.times | {"e2e": summarise(total.counts.times["e2e"])}
    steps = [Step(rate, rate < 30, 1.0, rate, rate, {}, total.times if rate < 30 else slow) for rate in (10.0, 20.0, 40.0)]
    points = [Point(float(at), {"waiting": 1.0 * at, "rss_bytes": 1e8, "step_seconds": 0.004}) for at in range(30)]
    return report_page(
        make_result(
            latencies,
            slos={"e2e": 0.1},
            warmup_seconds=3.0,
            server=[ServerSeries("http://10.0.0.1/metrics", points, 1)],
            sweep=Sweep(steps, 20.0, 0.99),
            checks=[Check("p95>500ms", 0.2, False, "s"), Check("ttft_p95>1s", None, True)],
            warnings=["<script>alert(1)</script> & more"],
            settings={"--server": "<b>", "--in": 'a"b', "--model": "en-de"},
            models=[{"name": name, "version": "3", "precision": "fp32", "device": "cpu"} for name in ("en-de", "en-fr")],
        )
    )


def test_the_report_is_well_formed_needs_nothing_else_and_escapes_text(page: str) -> None:
    for latencies in ([], [[]], [[], []], [[0.1]], [[0.0]], [[1e-9, 1e4]]):
        assert parse(report_page(make_result(latencies))).find("body") is not None
    root = parse(page)
    tags = {element.tag.removeprefix(SVG) for element in root.iter()}
    assert not tags & {"script", "link", "img", "iframe", "object"}
    links = [value for element in root.iter() for name, value in element.attrib.items() if name.endswith(("src", "href"))]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert set(re.findall(r"url\((.)", page)) <= {"#"} and "@import" not in page
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert root.findtext("head/title") == "Load on <b>"
    style = root.findtext("head/style") or ""
    light, _, dark = style.partition("@media (prefers-color-scheme:dark)")
    assert set(re.findall(r"(--\w+):", light)) == set(re.findall(r"(--\w+):", dark)) >= set(re.findall(r"var\((--\w+)\)", style))


def test_charts_have_names_and_tables_have_headings(page: str) -> None:
    root = parse(page)
    assert "en-de 3 (fp32, cpu)" in "".join(root.find("body/main/header").itertext()) and "en-fr" not in page
    charts = {figure.findtext("figcaption"): figure.find(f"{SVG}svg") for figure in root.iter("figure")}
    named = ("Latency by percentile", "Requests a second", "Calls under way", "Tokens a second", "Throughput by offered rate")
    assert {*named, "Latency by offered rate", "Memory", "Step and queue"} < charts.keys() and len(charts) == 10
    for title, svg in charts.items():
        assert (svg.get("role"), svg.get("aria-label")) == ("img", title) and svg.get("width") is None
    written = {title: "".join(svg.itertext()) for title, svg in charts.items()}
    for text in ("limit, end to end", "99.9", "milliseconds"):
        assert text in written["Latency by percentile"]
    assert "knee 20/s" in written["Throughput by offered rate"] and "counted from here" in written["Requests a second"]
    rows = {}
    for table in root.iter("table"):
        assert len({len(list(row)) for row in table.iter("tr")}) == 1
        assert table.find("caption") is not None and all(cell.get("scope") for cell in table.iter("th"))
        rows |= {cells[0]: cells[1:] for row in table.iter("tr") if (cells := [cell.text for cell in row])}
    assert rows["p95>500ms"] == ["passed", "it is 200 ms"] and rows["ttft_p95>1s"] == ["failed", "nothing was measured"]
    assert rows["unary"][:5] == ["1,200", "1,200", rows["unary"][2], "0", "0"]
    assert rows["40"][:2] == ["no", "100.0 %"] and rows["20"][0] == "yes"


def test_a_recorded_run_has_the_figures_that_it_had_when_it_was_recorded() -> None:
    """The figures were shown by an earlier report, made by other code."""
    recorded = json.loads(gzip.decompress(Path(__file__).with_name("recorded.json.gz").read_bytes()))
    root = parse(report_page(msgspec.json.decode(json.dumps(recorded["result"]), type=Result)))
    tables = [
        [t.findtext("caption"), [["".join(cell.itertext()) for cell in row] for row in t.iter("tr")]] for t in root.iter("table")
    ]
    assert tables == recorded["tables"]
    tiles = [tile for tile in root.iter("div") if tile.get("class", "").startswith("tile ")]
    assert [["".join(part.itertext()) for part in tile] for tile in tiles] == recorded["tiles"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_has_pace_latency_and_errors_and_is_for_terminals_only() -> None:
    tally = Tally()
    for due in range(8):
        for i in range(10):
            tally.record(Outcome("unary", False, due + i / 20, due + i / 20 + 0.25), {}, 0.0, 30.0)
    tally.record(Outcome("unary", False, 7.0, 7.1, "UNAVAILABLE"), {}, 0.0, 30.0)
    run = run_of(make_plan(arrivals=Arrivals(10.0), seconds=30.0), Progress(tally, 81, 3, 0.1, 30.0))
    for stream, is_shown in ((io.StringIO(), False), (Terminal(), True)):
        with watching(stream, lambda: "load on somewhere") as refresh:
            refresh(run)
        assert ("load on somewhere" in stream.getvalue()) == is_shown
    shown, empty = io.StringIO(), io.StringIO()
    Console(file=shown, width=100).print(picture(run, "load on somewhere"))
    for text in ("UNAVAILABLE 1", "10.0/s", "3 in flight", "p50 250"):
        assert text in shown.getvalue()
    Console(file=empty, width=100).print(picture(Run(make_plan(concurrency=1)), "soon"))
    assert "none" in empty.getvalue()


def latencies(seed: int, scale: float = 1.0, num: int = 40, seconds: int = 60) -> list[list[float]]:
    generator = np.random.default_rng(seed)
    return [(scale * generator.lognormal(-3, 0.5, generator.poisson(num))).clip(1e-5, 0.7).tolist() for _ in range(seconds)]


def compared(first: Result, second: Result, **options: int) -> dict[str, Difference]:
    return {difference.name: difference for difference in compare(first, second, **options).differences}


def beyond_noise(first: Result, second: Result) -> dict[str, bool]:
    """Return whether the second run is better, by each figure that is beyond noise."""
    return {name: found.is_better for name, found in compared(first, second).items() if found.is_beyond_noise}


def test_a_comparison_finds_what_changed_and_how_much() -> None:
    first = make_result(latencies(1))
    assert beyond_noise(first, first) == {} and all(one.first == one.second for one in compared(first, first).values())
    slower = make_result(latencies(2, scale=1.2))
    assert beyond_noise(first, slower) == dict.fromkeys(("e2e p50", "e2e p95", "e2e p99"), False)
    assert compare(first, slower) == compare(first, slower) and NUM_DRAWS >= 1000
    found = compared(first, slower)
    for name, quantile in (("e2e p50", 0.0), ("e2e p95", 1.645), ("e2e p99", 2.326)):
        assert found[name].low <= np.exp(-3 + 0.5 * quantile) * 0.2 <= found[name].high
    assert found["e2e p50"].change == pytest.approx(0.2, abs=0.05)
    fewer = compared(first, make_result(latencies(2, num=30)))
    assert fewer["throughput"].low <= -10 <= fewer["throughput"].high and not fewer["errors/s"].is_beyond_noise
    assert beyond_noise(first, make_result(latencies(2, num=30))) == {"throughput": False, "tokens/s": False}
    slow_start = make_result([[0.5] * 40] * 5 + latencies(1)[5:], warmup_seconds=5.0)
    assert beyond_noise(make_result(latencies(1), warmup_seconds=5.0), slow_start) == {}
    with_levels = [make_result(latencies(seed, scale), slos={"e2e": 0.06}) for seed, scale in ((1, 1.0), (2, 1.5))]
    assert beyond_noise(*with_levels)["goodput"] is False and "goodput" not in found


def test_a_comparison_tells_what_makes_runs_unlike() -> None:
    first = make_result(latencies(1, seconds=5), settings={"--rate": "10", "--in": "a"}, warnings=["careful"])
    second = make_result(latencies(1), settings={"--rate": "20", "--in": "a"}, models=[])
    comparison: Comparison = compare(first, second)
    assert comparison.unlike == [("--rate", "10", "20")]
    assert any("first run has 5 slices" in warning for warning in comparison.warnings)
    assert {"the first run: careful", "the two runs have different models"} <= set(comparison.warnings)
    with pytest.raises(InputError, match="second run is too short"):
        compare(make_result(latencies(1)), make_result([]))


def test_load_compare_tells_it_in_text_files_and_exit_code(
    run_command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    files = [tmp_path / "first.json", tmp_path / "second.json"]
    output, page = tmp_path / "difference.json", tmp_path / "page.html"
    asked = ("load-compare", *files, "--output", output, "--report", page)
    for scale, verdicts, code in ((1.0, set(), 0), (1.5, {"worse"}, 3), (0.5, {"better"}, 0)):
        for path, times in zip(files, (latencies(3), latencies(3, scale)), strict=True):
            path.write_bytes(encode(make_result(times)))
        assert run_command(*asked)[0] == 0
        ended, out, err = run_command(*asked, "--fail-if-worse")
        assert (ended, err) == (code, "") and "e2e p50 (ms)" in out
        assert {word for word in ("worse", "better") if word in out} == verdicts
    assert json.loads(output.read_text())["differences"][0]["name"] == "throughput"
    assert parse(page.read_text()).findtext("head/title") == "Two runs compared"
