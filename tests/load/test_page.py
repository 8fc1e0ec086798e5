"""The report: one well-formed page that needs nothing else, with everything in it."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest

from dragoman.load.page import report_page
from dragoman.load.result import Check, Step, Sweep, summarise
from dragoman.load.scrape import Point, ServerSeries


def parse(page: str) -> ElementTree.Element:
    """Parse the page as XML: it is written so that it is both."""
    head, _, rest = page.partition("\n")
    assert head == "<!DOCTYPE html>"
    return ElementTree.fromstring(rest)


@pytest.fixture
def result(make_result):
    generator = np.random.default_rng(0)
    latencies = [generator.lognormal(-3, 0.7, 40).tolist() for _ in range(30)]
    plain = make_result(latencies, slos={"e2e": 0.1})
    steps = [
        Step(
            rate,
            rate < 30,
            1.0,
            rate,
            rate,
            {},
            plain.total.times | ({} if rate < 30 else {"e2e": summarise(plain.total.counts.times["e2e"])}),
        )
        for rate in (10.0, 20.0, 40.0)
    ]
    points = [Point(float(at), {"waiting": 1.0 * at, "rss_bytes": 1e8, "step_seconds": 0.004}) for at in range(30)]
    return make_result(
        latencies,
        slos={"e2e": 0.1},
        warmup_seconds=3.0,
        server=[ServerSeries("http://10.0.0.1/metrics", points, 1)],
        sweep=Sweep(steps, 20.0, 0.99),
        checks=[Check("p95>500ms", 0.2, False), Check("ttft_p95>1s", None, True)],
        warnings=["<script>alert(1)</script> & more"],
        settings={"--server": "<b>", "--in": 'a"b'},
    )


def test_the_page_is_well_formed_and_needs_nothing_else(result) -> None:
    page = report_page(result)
    root = parse(page)
    names = {element.tag for element in root.iter()}
    assert not names & {"script", "link", "img", "iframe", "object"}
    assert not [element for element in root.iter() if {"src", "href"} & set(element.attrib)]
    assert "url(" not in page and "@import" not in page


def test_what_users_give_is_text(result) -> None:
    page = report_page(result)
    assert "<script" not in page and "&lt;script&gt;alert(1)&lt;/script&gt; &amp; more" in page
    assert parse(page).findtext("head/title") == "Load on <b>"


def test_every_plot_is_there_and_has_a_name(result) -> None:
    root = parse(report_page(result))
    captions = [element.text for element in root.iter("figcaption")]
    for start in (
        "Latency by percentile",
        "End-to-end latency over time",
        "Requests a second",
        "Calls under way",
        "Throughput by",
        "Memory",
    ):
        assert any(caption.startswith(start) for caption in captions), start
    assert all(svg.get("role") == "img" and svg.get("aria-label") for svg in root.iter("svg"))


def test_no_plot_leaves_its_picture(result) -> None:
    root = parse(report_page(result))
    for svg in root.iter("svg"):
        _, _, width, height = map(float, svg.attrib["viewBox"].split())
        for path in svg.iter("path"):
            numbers = [float(number) for number in re.findall(r"-?[\d.]+", path.attrib["d"])]
            assert all(0 <= x <= width for x in numbers[::2]) and all(0 <= y <= height for y in numbers[1::2]), svg.get(
                "aria-label"
            )
        for rect in svg.iter("rect"):
            x, y, w, h = (float(rect.attrib[name]) for name in ("x", "y", "width", "height"))
            assert w > 0 and h > 0 and x >= 0 and y >= 0 and x + w <= width + 0.5 and y + h <= height + 0.5


def test_tables_have_headings(result) -> None:
    for table in parse(report_page(result)).iter("table"):
        columns = {len(list(row)) for row in table.iter("tr")}
        assert len(columns) == 1
        assert table.find("caption") is not None and all(cell.get("scope") for cell in table.iter("th"))


@pytest.mark.parametrize("latencies", [[], [[]], [[], []], [[0.1]], [[0.0]], [[1e-9, 1e4]]])
def test_a_run_of_little_or_nothing_has_a_page(make_result, latencies: list) -> None:
    assert parse(report_page(make_result(latencies))).find("body") is not None


def test_both_schemes_of_colours_define_all_of_them(result) -> None:
    style = parse(report_page(result)).findtext("head/style")
    assert style is not None
    light, _, dark = style.partition("@media (prefers-color-scheme:dark)")
    assert set(re.findall(r"(--\w+):", light)) == set(re.findall(r"(--\w+):", dark)) >= set(re.findall(r"var\((--\w+)\)", style))
