"""The rules of a release: every rule of the project, restricted to series of that release, with links to the runbook."""

import re
from typing import Any

import pytest

from tests.deploy.conftest import ROOT, Render, Values, load

ON: Values = {"metrics.prometheusRule.enabled": True}
PREFIX = "https://git.example/dragoman/blob/v0.1.0"


def rules(content: Any) -> list[dict[str, Any]]:
    return [rule for group in content["groups"] for rule in group["rules"]]


def of_release(render: Render, values: Values, release: str = "dragoman") -> list[dict[str, Any]]:
    return rules(render(ON | values, release=release).find("PrometheusRule spec"))


def selectors(expression: str) -> list[tuple[str, dict[str, tuple[str, str]]]]:
    """Return the series that a query reads, each with its matchers, by an independent parser."""
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed: make setup")
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, parser.VectorSelector):
            matchers = {each.name: (str(each.op).rpartition(".")[2], each.value) for each in node.matchers.matchers}
            found.append((node.name, matchers))

    parser.walk(parser.parse(expression), visit)
    return found


def test_release_has_every_rule_and_changes_only_its_series_and_labels(render: Render) -> None:
    ours, originals = of_release(render, {}), [rule for name in ("alerts", "recording") for rule in rules(originals_of(name))]
    for rule, original in zip(ours, originals, strict=True):
        assert [name for name, _ in selectors(rule["expr"])] == [name for name, _ in selectors(original["expr"])]
        assert all(rule.get(key) == original.get(key) for key in ("alert", "record", "for", "annotations"))
        assert rule.get("labels", {}) == original.get("labels", {}) | ({"release": "dragoman"} if "alert" in rule else {})


def originals_of(name: str) -> Any:
    return load(f"prometheus/rules/{name}.yaml")


@pytest.mark.parametrize(("release", "name"), [("dragoman", "dragoman"), ("mt", "mt-dragoman")])
def test_rules_read_series_of_their_release_alone(render: Render, release: str, name: str) -> None:
    """A job is named as the Service, or NAMESPACE/NAME of the PodMonitor, as the Prometheus operator does without a jobLabel."""
    for rule in of_release(render, {}, release):
        for series, matchers in selectors(rule["expr"]):
            label, prefix = ("horizontalpodautoscaler", "keda-hpa-") if series.startswith("kube_") else ("job", "translation/")
            assert matchers["namespace"] == ("Equal", "translation")
            pattern = matchers[label][1]
            assert re.fullmatch(pattern, name) and re.fullmatch(pattern, f"{prefix}{name}")
            assert not re.fullmatch(pattern, f"{name}-canary") and not re.fullmatch(pattern, f"other-{name}")
        assert "scope=" not in rule["expr"], "no placeholder is left"
    for kind in ("serviceMonitor", "podMonitor"):
        monitor = render({f"metrics.{kind}.enabled": True}, release=release).find(kind[0].upper() + kind[1:])
        assert monitor["metadata"]["name"] == name and "jobLabel" not in monitor["spec"]


def test_matchers_may_name_another_job_and_their_labels_stay_in_sums(render: Render) -> None:
    """Without these labels in the recorded sums no alert on an objective could ever fire."""
    asked, sums = 'job="translate",app=~"a|b=\\"c\\"", app!="d"', []
    for rule in of_release(render, {"metrics.prometheusRule.matchers": 'job="translate",cluster=~"a|b"'}):
        for series, matchers in selectors(rule["expr"]):
            if not series.startswith("kube_"):
                assert matchers["job"] == ("Equal", "translate") and matchers["cluster"][1] == "a|b"
    for rule in of_release(render, {"metrics.prometheusRule.matchers": asked}):
        found = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
        sums += [text for text in found if "horizontalpodautoscaler" not in text]
    sums = [text.removesuffix(", le").removesuffix(", version, cause") for text in sums]
    assert len(sums) > 20 and set(sums) == {"namespace, job, app, model"}


@pytest.mark.parametrize("prefix", [PREFIX, f"{PREFIX}/"])
def test_links_lead_to_a_section_of_the_runbook(render: Render, prefix: str) -> None:
    values = {"metrics.prometheusRule": {"runbookPrefix": prefix, "alertLabels": {"team": "language"}, "enabled": True}}
    headings = re.findall(r"^### (\w+)$", (ROOT / "docs/runbook.md").read_text(encoding="utf-8"), re.MULTILINE)
    alerts = [rule for rule in of_release(render, values) if "alert" in rule]
    assert len(alerts) > 20
    for rule in alerts:
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert path == f"{PREFIX}/docs/runbook.md" and anchor in {heading.lower() for heading in headings}
        assert rule["labels"]["team"] == "language" and rule["labels"]["severity"] in ("critical", "warning")
