"""Every query of the dashboard and of the rules: PromQL, about metrics that the server or a rule has."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

from dragoman.server.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
VARIABLES = {"$__rate_interval": "5m", "$__range": "1h", "$namespace": ".*", "$instance": ".*", "$model": ".*"}
# What Prometheus itself writes of each target, and what kube-state-metrics tells of autoscalers.
PROMETHEUS_OWN = {"up"}
SCALERS = {f"kube_horizontalpodautoscaler_{name}" for name in ("status_desired_replicas", "spec_max_replicas", "spec_min_replicas")}
# On Linux only; the tests may run elsewhere.
PROCESS = {f"process_{name}" for name in ("resident_memory_bytes", "open_fds", "max_fds", "cpu_seconds_total")}


def rules() -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
    files = sorted((ROOT / "deploy/prometheus/rules").glob("*.yaml"))
    return [rule for path in files for group in yaml.safe_load(path.read_text())["groups"] for rule in group["rules"]]


def queries() -> Iterator[tuple[str, str]]:
    """Yield where each query stands, and the query."""
    for path in sorted((ROOT / "deploy/grafana/dashboards").glob("*.json")):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                query = target["expr"]
                for variable, value in VARIABLES.items():
                    query = query.replace(variable, value)
                yield f"{path.name}: {panel['title']}", query
        for variable in dashboard["templating"]["list"]:
            if match := re.fullmatch(r"label_values\((.*), \w+\)", variable.get("definition", "")):
                yield f"{path.name}: ${variable['name']}", match[1].replace("$namespace", ".*")
    for rule in rules():
        yield rule.get("record") or rule["alert"], rule["expr"]


def known_series() -> set[str]:
    """Names that a query may have."""
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    Metrics(registry, (1.0,))
    names = PROMETHEUS_OWN | SCALERS | PROCESS | {rule["record"] for rule in rules() if "record" in rule}
    for metric in registry.collect():
        if metric.type == "histogram":
            names |= {f"{metric.name}_{part}" for part in ("bucket", "sum", "count")}
        else:
            names.add(metric.name + {"counter": "_total", "info": "_info"}.get(metric.type, ""))
    return names


def series_of(query: str) -> set[str]:
    """Return the names that a query asks for; fail if it is no PromQL."""
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed: make setup")
    names: set[str] = set()

    def visit(node: Any) -> None:
        if isinstance(node, parser.VectorSelector):
            names.add(node.name)

    parser.walk(parser.parse(query), visit)
    return names


def test_queries_are_understood_and_ask_for_what_there_is() -> None:
    known, asked = known_series(), set[str]()
    for where, query in queries():
        assert "$" not in query, where
        names = series_of(query)
        assert names and names <= known, (where, names - known)
        asked |= names
    assert len(asked) > 60


def test_the_check_would_notice_a_query_of_what_is_not_there() -> None:
    assert series_of("rate(dragoman_nothing_total[5m]) / dragoman_slots") == {"dragoman_nothing_total", "dragoman_slots"}
    assert "dragoman_nothing_total" not in known_series()
    with pytest.raises(ValueError, match="unclosed left parenthesis"):
        series_of("sum by (model (up)")


def test_every_metric_of_ours_is_on_the_dashboard_or_in_a_rule() -> None:
    """Or why is it there? A histogram counts as seen by any of its series."""
    asked = {name for _, query in queries() for name in series_of(query)}
    asked = {re.sub(r"_(bucket|sum|count)$", "", name) for name in asked}
    registry = CollectorRegistry()
    assert set(Metrics(registry, (1.0,)).labels) - asked == set()
