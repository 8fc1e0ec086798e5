"""Dashboard, rules and alerts, also of a release: against the server's metrics, the runbook and Prometheus' own tool."""

import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from dragoman.server.telemetry.metrics import LATENCY_BUCKETS, Metrics
from tests.deploy.conftest import ROOT, Render, Values, load

PROMETHEUS = ROOT / "deploy/prometheus"
# Objectives of the dashboard and the rules: shares, and seconds that must be bounds of buckets, or shares would be guesses.
AVAILABILITY, LATENCY, LATENCY_SECONDS, FIRST_TOKEN_SECONDS = 0.999, 0.99, 1.0, 0.5
SERVER_ERRORS = "INTERNAL|RESOURCE_EXHAUSTED|UNAVAILABLE|UNKNOWN"
VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$namespace": ".*", "$instance": ".*", "$model": ".*"}
# Series of Prometheus itself, and those of a process, which only Linux has.
OTHERS = {"up"} | {f"process_{name}" for name in ("resident_memory_bytes", "open_fds", "max_fds", "cpu_seconds_total")}

# Labels that a scrape gives every series, and those of the Python process's own metrics.
TARGET = frozenset({"namespace", "job", "instance", "pod"})
PYTHONS = ("generation", "version", "implementation", "major", "minor", "patchlevel")


def rules(content: Any) -> list[dict[str, Any]]:
    return [rule for group in content["groups"] for rule in group["rules"]]


def selectors(expression: str) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """Return the series that a query reads, each with its matchers, by an independent parser."""
    return parsed(expression)[0]


def parsed(expression: str) -> tuple[list[tuple[str, dict[str, tuple[str, str]]]], set[str]]:
    """Return the series that a query reads, each with its matchers, and the labels it groups and joins by."""
    found: list[Any] = []
    grouped: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            matchers = {each.name: (str(each.op).rpartition(".")[2], each.value) for each in node.matchers.matchers}
            found.append((node.name, matchers))
        elif isinstance(node, promql_parser.AggregateExpr) and node.modifier:
            grouped.update(node.modifier.labels)
        elif isinstance(node, promql_parser.BinaryExpr) and node.modifier:
            grouped.update(node.modifier.group_labels or ())
            grouped.update(node.modifier.matching.labels if node.modifier.matching else ())

    promql_parser.walk(promql_parser.parse(expression), visit)
    return found, grouped


DASHBOARD = json.loads((ROOT / "deploy/grafana/dashboards/dragoman.json").read_text(encoding="utf-8"))
TARGETS = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", ())]
RULES = [rule for name in ("alerts", "recording") for rule in rules(load(f"prometheus/rules/{name}.yaml"))]
ALERTS = {rule["alert"]: rule for rule in RULES if "alert" in rule}


def queries() -> Iterator[tuple[str, set[str]]]:
    """Yield each query of the dashboard and of the rules, with the labels that its legend, variable or annotations show."""
    for target in TARGETS:
        query = target["expr"]
        for variable, value in VARIABLES.items():
            query = query.replace(variable, value)
        yield query, set(re.findall(r"{{\s*(\w+)\s*}}", target.get("legendFormat", "")))
    for variable in DASHBOARD["templating"]["list"]:
        if match := re.fullmatch(r"label_values\((.*), (\w+)\)", variable.get("definition", "")):
            yield match[1].replace("$namespace", ".*"), {match[2]}
    yield from ((rule["expr"], set(re.findall(r"\$labels\.(\w+)", str(rule.get("annotations"))))) for rule in RULES)


def test_queries_read_series_and_labels_that_exist_and_every_metric_is_read() -> None:
    registry, known, asked = CollectorRegistry(), dict.fromkeys(OTHERS, frozenset[str]()), set[str]()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    ours = Metrics(registry).labels
    for metric in registry.collect():
        parts = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",), "info": ("_info",)}
        for part in parts.get(metric.type, ("",)):
            name = metric.name + part
            labels = frozenset(next((ours[each] for each in (name, metric.name) if each in ours), PYTHONS))
            known[name] = labels | {"le"} if part == "_bucket" else labels
    known |= {rule["record"]: frozenset({"model"}) for rule in RULES if "record" in rule}
    for query, shown in queries():
        read, grouped = parsed(query)
        names = {name for name, _ in read}
        assert "$" not in query and names and names <= known.keys(), (query, names - known.keys())
        for name, matchers in read:
            assert matchers.keys() <= known[name] | TARGET, (query, matchers.keys() - known[name])
        assert grouped | shown <= TARGET.union(*(known[name] for name in names)), query
        asked |= names
    assert len(asked) > 60 and ours.keys() - {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked} == set()


def test_every_query_can_be_narrowed_by_the_variables() -> None:
    assert [each["name"] for each in DASHBOARD["templating"]["list"]] == ["datasource", "namespace", "model", "instance"]
    for target in TARGETS:
        assert target["datasource"]["uid"] == "${datasource}"
        query = target.get("expr", "")
        num_selectors = query.count("{") - query.count("{{")
        assert query.count('namespace=~"$namespace"') == query.count('instance=~"$instance"') == num_selectors


def test_objectives_are_edges_of_buckets_and_the_same_in_rules() -> None:
    edges = {LATENCY_SECONDS, FIRST_TOKEN_SECONDS}
    assert edges <= set(LATENCY_BUCKETS)
    tiles = [target["expr"] for panel in DASHBOARD["panels"] if panel["type"] == "stat" for target in panel["targets"]]
    assert all(any(f'le="{edge}"' in query for query in tiles) for edge in edges)
    recording = (PROMETHEUS / "rules/recording.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r'le="([\d.]+)"', recording)) == {str(LATENCY_SECONDS)}
    assert set(re.findall(r'code=~"([A-Z_|]+)"', recording)) == {SERVER_ERRORS}
    for name, objective in (("ErrorBudget", AVAILABILITY), ("LatencyBudget", LATENCY)):
        budgets = {factor for rule in ALERTS for factor in re.findall(r"\* (0\.\d+)", ALERTS[rule]["expr"]) if name in rule}
        assert [float(budget) for budget in budgets] == [pytest.approx(1 - objective)]


def promtool(*arguments: str | Path) -> str:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_accepts_configuration_and_rules_and_alerts_fire_as_they_should() -> None:
    files = sorted((PROMETHEUS / "rules").iterdir())
    assert f"{len(files)} rule files found" in promtool("check", "config", PROMETHEUS / "prometheus.yml")
    promtool("check", "rules", *files)
    fired, silent = set(), set()
    for path in (PROMETHEUS / "tests").glob("*.yaml"):
        for case in load(f"prometheus/tests/{path.name}")["tests"]:
            for test in case["alert_rule_test"]:
                (fired if test["exp_alerts"] else silent).add(test["alertname"])
    assert fired == silent == ALERTS.keys(), "each alert has a case that fires and one that is silent"
    promtool("test", "rules", *(PROMETHEUS / "tests").glob("*.yaml"))


def test_each_alert_has_a_severity_and_a_section_of_the_runbook() -> None:
    runbook = (ROOT / "docs/runbook.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (Dragoman\w+)$", runbook, re.MULTILINE)) == ALERTS.keys()
    for name, rule in ALERTS.items():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        section = re.split(r"\n##+ ", runbook.partition(f"\n### {name}\n")[2])[0]
        for part in ("**Meaning.**", "**Impact.**", "**Diagnosis.**", "**Mitigation.**"):
            assert part in section, f"{name}: {part}"


# The rules of a release.

ON: Values = {"metrics.prometheusRule.enabled": True}
PREFIX = "https://git.example/dragoman/blob/v0.1.0"


def of_release(render: Render, values: Values, release: str = "dragoman") -> list[dict[str, Any]]:
    return rules(render(ON | values, release=release).find("PrometheusRule spec"))


def test_release_has_every_rule_and_changes_only_its_series_and_labels(render: Render) -> None:
    ours = of_release(render, {})
    for rule, original in zip(ours, RULES, strict=True):
        assert [name for name, _ in selectors(rule["expr"])] == [name for name, _ in selectors(original["expr"])]
        assert all(rule.get(key) == original.get(key) for key in ("alert", "record", "for", "annotations"))
        assert rule.get("labels", {}) == original.get("labels", {}) | ({"release": "dragoman"} if "alert" in rule else {})


@pytest.mark.parametrize(("release", "name"), [("dragoman", "dragoman"), ("mt", "mt-dragoman")])
def test_rules_read_series_of_their_release_alone(render: Render, release: str, name: str) -> None:
    """A job is named as the Service, or NAMESPACE/NAME of the PodMonitor, as the Prometheus operator does without a jobLabel."""
    for rule in of_release(render, {}, release):
        for _, matchers in selectors(rule["expr"]):
            assert matchers["namespace"] == ("Equal", "translation")
            pattern = matchers["job"][1]
            assert re.fullmatch(pattern, name) and re.fullmatch(pattern, f"translation/{name}")
            assert not re.fullmatch(pattern, f"{name}-canary") and not re.fullmatch(pattern, f"other-{name}")
        assert 'job!=""' not in rule["expr"], "no placeholder is left"
    for kind in ("ServiceMonitor", "PodMonitor"):
        monitor = render({"metrics.monitor.kind": kind}, release=release).find(kind)
        assert monitor["metadata"]["name"] == name and "jobLabel" not in monitor["spec"]
