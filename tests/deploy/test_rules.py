"""Prometheus' configuration, rules and alerts: by Prometheus' own tool, and against the runbook and the dashboard."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana import objectives
from dragoman.server.config import ServerConfig

RULES = ("recording.yaml", "alerts.yaml")


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    return root / "deploy/prometheus"


def load(path: Path) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def alerts(folder: Path) -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in load(folder / "rules/alerts.yaml")["groups"] for rule in group["rules"]}


def promtool(*arguments: str | Path, timeout: float = 300) -> str:
    """Run Prometheus' tool; it must be content."""
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    done = subprocess.run([tool, *map(str, arguments)], capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_prometheus_takes_its_configuration_and_finds_the_rules(folder: Path) -> None:
    said = promtool("check", "config", folder / "prometheus.yml")
    assert f"{len(RULES)} rule files found" in said


def test_prometheus_scrapes_the_server_of_the_compose_file(root: Path, folder: Path) -> None:
    (scraped,) = load(folder / "prometheus.yml")["scrape_configs"]
    ((target,),) = [each["targets"] for each in scraped["static_configs"]]
    service, _, port = target.partition(":")
    assert service in load(root / "deploy/docker/compose.yaml")["services"]
    assert int(port) == ServerConfig.model_fields["metrics_port"].default


def test_prometheus_takes_the_rules(folder: Path) -> None:
    promtool("check", "rules", *(folder / "rules" / name for name in RULES))
    assert sorted(path.name for path in (folder / "rules").iterdir()) == sorted(RULES)


def test_alerts_fire_when_they_should_and_are_silent_when_they_should(folder: Path) -> None:
    promtool("test", "rules", *sorted((folder / "tests").glob("*.yaml")))


def test_each_alert_has_a_case_that_fires_and_one_that_is_silent(folder: Path, alerts: dict[str, Any]) -> None:
    fired, silent = set(), set()
    cases = [case for path in sorted((folder / "tests").glob("*.yaml")) for case in load(path)["tests"]]
    for case in cases:
        for test in case["alert_rule_test"]:
            (fired if test["exp_alerts"] else silent).add(test["alertname"])
            assert case["name"].startswith(test["alertname"])
    assert fired == silent == alerts.keys()


def test_each_alert_says_how_bad_what_and_where_to_read_on(root: Path, alerts: dict[str, Any]) -> None:
    runbook = (root / "docs/runbook.md").read_text(encoding="utf-8")
    for name, rule in alerts.items():
        assert rule["labels"]["severity"] in ("critical", "warning")
        assert rule["annotations"]["summary"] and rule["annotations"]["description"].endswith(".")
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
        _, heading, section = runbook.partition(f"\n### {name}\n")
        assert heading, f"the runbook has no section {name}"
        section = re.split(r"\n##+ ", section)[0]
        for part in ("**Meaning.**", "**Impact.**", "**Diagnosis.**", "**Mitigation.**"):
            assert part in section, f"{name}: {part}"


def test_the_runbook_has_no_section_of_an_alert_that_is_gone(root: Path, alerts: dict[str, Any]) -> None:
    runbook = (root / "docs/runbook.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (Dragoman\w+)$", runbook, re.MULTILINE)) == alerts.keys()


def test_rules_have_the_objectives_of_the_dashboard(folder: Path, alerts: dict[str, Any]) -> None:
    recording = (folder / "rules/recording.yaml").read_text(encoding="utf-8")
    assert set(re.findall(r'le="([\d.]+)"', recording)) == {str(objectives.LATENCY_SECONDS)}
    errors = set(re.findall(r'code=~"([A-Z_|]+)"', recording))
    assert errors == {objectives.SERVER_ERRORS}
    for name, objective in (("ErrorBudget", objectives.AVAILABILITY), ("LatencyBudget", objectives.LATENCY)):
        budgets = {factor for rule in alerts for factor in re.findall(r"\* (0\.\d+)", alerts[rule]["expr"]) if name in rule}
        assert [float(budget) for budget in budgets] == [pytest.approx(1 - objective)]


def test_a_burn_is_seen_in_a_long_window_and_still_in_a_short_one(alerts: dict[str, Any]) -> None:
    """The short one ends the alert soon after the burning."""
    minutes = {"5m": 5, "30m": 30, "1h": 60, "2h": 120, "6h": 360, "1d": 1440, "3d": 4320}
    for name, rule in alerts.items():
        if "BudgetBurns" not in name:
            continue
        pairs = re.findall(r"rate(\w+) > ([\d.]+) .*\s+and\s+\S+rate(\w+) > ([\d.]+) ", rule["expr"])
        assert len(pairs) == 2, name
        for long, factor, short, same in pairs:
            assert factor == same and minutes[long] == 12 * minutes[short]
