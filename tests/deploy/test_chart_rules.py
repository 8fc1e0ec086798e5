"""The rules as a release has them: every one there is, about its own series, and with a link that leads to the runbook."""

import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

Render = Callable[..., Any]
ON = {"metrics": {"prometheusRule": {"enabled": True}}}
TWO = ("dragoman", "dragoman-canary")


def load(path: Path) -> Any:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def rules(content: Any) -> list[dict[str, Any]]:
    return [rule for group in content["groups"] for rule in group["rules"]]


def selectors(expression: str) -> list[Any]:
    """Return what a query asks for, by a parser of its own."""
    parser = pytest.importorskip("promql_parser", reason="promql-parser is not installed: make setup")
    found: list[Any] = []

    def visit(node: Any) -> None:
        if isinstance(node, parser.VectorSelector):
            found.append(node)

    parser.walk(parser.parse(expression), visit)
    return found


def matchers(selector: Any) -> set[tuple[str, str, str]]:
    return {(matcher.name, str(matcher.op).rpartition(".")[2], matcher.value) for matcher in selector.matchers.matchers}


def originals(root: Path) -> Iterator[dict[str, Any]]:
    for path in sorted((root / "deploy/prometheus/rules").glob("*.yaml")):
        yield from rules(load(path))


def test_a_release_has_every_rule_there_is_and_changes_its_series_and_labels_alone(render: Render, root: Path) -> None:
    ours = rules(render(ON).one("PrometheusRule")["spec"])
    wanted = list(originals(root))
    assert [rule.get("alert", rule.get("record")) for rule in ours] == [rule.get("alert", rule.get("record")) for rule in wanted]
    for rule, original in zip(ours, wanted, strict=True):
        assert [s.name for s in selectors(rule["expr"])] == [s.name for s in selectors(original["expr"])]
        assert rule.get("for") == original.get("for") and rule.get("annotations") == original.get("annotations")
        assert rule.get("labels", {}) == original.get("labels", {}) | ({"release": "dragoman"} if "alert" in rule else {})


@pytest.mark.parametrize(("release", "name"), [("dragoman", "dragoman"), ("mt", "mt-dragoman")])
def test_every_series_that_a_rule_asks_for_is_the_releases_own(render: Render, release: str, name: str) -> None:
    for rule in rules(render(ON, release=release).one("PrometheusRule")["spec"]):
        for selector in selectors(rule["expr"]):
            asked = {(label, value) for label, _, value in matchers(selector)}
            assert ("namespace", "translation") in asked, rule
            if selector.name.startswith("kube_"):
                [pattern] = [value for label, value in asked if label == "horizontalpodautoscaler"]
                assert re.fullmatch(pattern, name) and re.fullmatch(pattern, f"keda-hpa-{name}")
            else:
                [pattern] = [value for label, value in asked if label == "job"]
                assert re.fullmatch(pattern, name) and re.fullmatch(pattern, f"translation/{name}")
            assert not re.fullmatch(pattern, f"{name}-canary") and not re.fullmatch(pattern, f"other-{name}")
        assert "scope=" not in rule["expr"], "no placeholder is left"


@pytest.mark.parametrize("kind", ["serviceMonitor", "podMonitor"])
def test_rules_ask_for_the_job_that_the_monitor_gives(render: Render, kind: str) -> None:
    """Which is the Service's name, or NAMESPACE/NAME of the PodMonitor, as the Prometheus operator has it without a jobLabel."""
    rendered = render({"metrics": ON["metrics"] | {kind: {"enabled": True}}}, release="mt")
    monitor = rendered.one(f"{kind[0].upper()}{kind[1:]}")
    assert "jobLabel" not in monitor["spec"]
    job = monitor["metadata"]["name"] if kind == "serviceMonitor" else "translation/" + monitor["metadata"]["name"]
    if kind == "serviceMonitor":
        ports = {port["name"]: port["targetPort"] for port in rendered.one("Service", job)["spec"]["ports"]}
        assert ports[monitor["spec"]["endpoints"][0]["port"]] == "metrics"
    [rule] = [rule for rule in rules(rendered.one("PrometheusRule")["spec"]) if rule.get("alert") == "DragomanModelNotReady"]
    [selector] = selectors(rule["expr"])
    [pattern] = [value for label, _, value in matchers(selector) if label == "job"]
    assert re.fullmatch(pattern, job)


def test_another_job_may_be_named(render: Render) -> None:
    values = {"metrics": {"prometheusRule": {"enabled": True, "matchers": 'job="translate",cluster=~"a|b"'}}}
    for rule in rules(render(values).one("PrometheusRule")["spec"]):
        for selector in selectors(rule["expr"]):
            if not selector.name.startswith("kube_"):
                assert {("job", "Equal", "translate"), ("cluster", "Re", "a|b")} <= {
                    (label, "Re" if "Re" in op else "Equal", value) for label, op, value in matchers(selector)
                }


def test_what_is_recorded_keeps_the_labels_that_it_is_found_by(render: Render) -> None:
    """Else no alert on an objective could ever fire: its matchers would ask for what the sums have lost."""
    asked = 'job="translate",app=~"a|b=\\"c\\"", app!="d"'
    values = {"metrics": {"prometheusRule": {"enabled": True, "matchers": asked}}}
    sums = [
        found
        for rule in rules(render(values).one("PrometheusRule")["spec"])
        for found in re.findall(r"\bby \(([^)]*)\)", rule["expr"])
        if "horizontalpodautoscaler" not in found
    ]
    assert len(sums) > 20 and {text.removesuffix(", le").removesuffix(", version, cause") for text in sums} == {
        "namespace, job, app, model"
    }


def test_notes_say_where_the_rules_would_find_nothing(render: Render) -> None:
    for more, is_told in (
        ({}, True),
        ({"serviceMonitor": {"enabled": True}}, False),
        ({"podMonitor": {"enabled": True}}, False),
        ({"prometheusRule": {"enabled": True, "matchers": 'job="a"'}}, False),
        ({"prometheusRule": {"enabled": False}}, False),
    ):
        notes = render({"metrics": ON["metrics"] | more}).notes
        assert ("prometheusRule.matchers" in notes) is is_told, more


@pytest.mark.parametrize("prefix", ["https://git.example/dragoman/blob/v0.1.0", "https://git.example/dragoman/blob/v0.1.0/"])
def test_links_lead_to_a_section_of_the_runbook(render: Render, root: Path, prefix: str) -> None:
    values = {"metrics": {"prometheusRule": {"enabled": True, "runbookPrefix": prefix, "alertLabels": {"team": "language"}}}}
    rendered = render(values)
    headings = re.findall(r"^### (\w+)$", (root / "docs/runbook.md").read_text(encoding="utf-8"), re.MULTILINE)
    alerts = [rule for rule in rules(rendered.one("PrometheusRule")["spec"]) if "alert" in rule]
    assert len(alerts) > 20
    for rule in alerts:
        path, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        assert path == "https://git.example/dragoman/blob/v0.1.0/docs/runbook.md"
        assert anchor in {heading.lower() for heading in headings}
        assert rule["labels"]["team"] == "language" and rule["labels"]["severity"] in ("critical", "warning")
    assert "runbookPrefix" not in rendered.notes and "runbookPrefix" in render(ON).notes


def test_two_releases_share_no_group_and_no_rule(render: Render) -> None:
    first, second = (render(ON, release=name).one("PrometheusRule") for name in TWO)
    assert first["metadata"]["name"] != second["metadata"]["name"]
    names = [group["name"] for item in (first, second) for group in item["spec"]["groups"]]
    assert len(names) == len(set(names))
    known = [
        (rule.get("alert") or rule["record"], rule["expr"], *sorted(rule.get("labels", {}).items()))
        for item in (first, second)
        for rule in rules(item["spec"])
    ]
    assert len(known) == len(set(known))
    alerts = [
        (rule["alert"], rule["labels"]["release"]) for item in (first, second) for rule in rules(item["spec"]) if "alert" in rule
    ]
    assert len(alerts) == len(set(alerts)), "an alert's name and release name one rule"


def place(release: str) -> str:
    return f'namespace="translation",job="{release}",instance="{release}:8501",model="en-de"'


def series(release: str, *, is_ill: bool) -> list[dict[str, str]]:
    """Return what a release's server and autoscaler say; an ill one's model is away, and it wants all pods that it may have."""
    here, scaler = place(release), f'namespace="translation",horizontalpodautoscaler="{release}"'
    values = {
        f"dragoman_build_info{{{here}}}": "1x60",
        f"dragoman_model_ready{{{here}}}": "0x60" if is_ill else "1x60",
        f'dragoman_request_success_total{{{here},finish_reason="eos"}}': "0+90x60",
        f'dragoman_requests_failed_total{{{here},code="UNAVAILABLE"}}': "0+30x60" if is_ill else "0x60",
        f"kube_horizontalpodautoscaler_status_desired_replicas{{{scaler}}}": "10x60" if is_ill else "3x60",
        f"kube_horizontalpodautoscaler_spec_max_replicas{{{scaler}}}": "10x60",
        f"kube_horizontalpodautoscaler_spec_min_replicas{{{scaler}}}": "2x60",
    }
    return [{"series": name, "values": shown} for name, shown in values.items()]


def fire(
    render: Render,
    folder: Path,
    given: list[dict[str, str]],
    expected: dict[str, list[dict[str, str]]],
    apps: dict[str, str] | None = None,
) -> None:
    """Have Prometheus' tool see to it that the rules of both releases together fire for what is expected, and no more.

    With `apps`, of each release, its rules go by that label, not by the job.
    What annotations say is tested with the rules themselves; without them the tool compares who fires and how often.
    """
    yaml = pytest.importorskip("yaml")
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("promtool is not installed: it comes with Prometheus")
    for name in TWO:
        settings = ON["metrics"]["prometheusRule"] | ({"matchers": f'app="{apps[name]}"'} if apps else {})
        spec = render({"metrics": {"prometheusRule": settings}}, release=name).one("PrometheusRule")["spec"]
        for rule in rules(spec):
            rule.pop("annotations", None)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(spec))
    tests = [
        {"eval_time": "50m", "alertname": alert, "exp_alerts": [{"exp_labels": labels} for labels in firing]}
        for alert, firing in expected.items()
    ]
    case = {"interval": "1m", "input_series": given, "alert_rule_test": tests}
    content = {"rule_files": [f"{name}.yaml" for name in TWO], "evaluation_interval": "1m", "tests": [case]}
    (folder / "test.yaml").write_text(yaml.safe_dump(content))
    done = subprocess.run([tool, "test", "rules", str(folder / "test.yaml")], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("ill", [(), TWO[:1], TWO[1:], TWO], ids=["none", "one", "the other", "both"])
def test_two_releases_in_one_prometheus_page_once_each_for_what_is_their_own(
    render: Render, tmp_path: Path, ill: tuple[str, ...]
) -> None:
    kinds = {
        "DragomanModelNotReady": ("critical", ("job", "instance", "model")),
        "DragomanErrorBudgetBurnsFast": ("critical", ("job", "model")),
        "DragomanAutoscalerAtMaximum": ("warning", ("horizontalpodautoscaler",)),
    }
    expected: dict[str, list[dict[str, str]]] = {"DragomanNoMetrics": []}
    for alert, (severity, labels) in kinds.items():
        expected[alert] = []
        for name in ill:
            known = {"job": name, "instance": f"{name}:8501", "model": "en-de", "horizontalpodautoscaler": name}
            own = {label: known[label] for label in labels}
            expected[alert].append(own | {"namespace": "translation", "severity": severity, "release": name})
    given = [one for name in TWO for one in series(name, is_ill=name in ill)]
    fire(render, tmp_path, given, expected)


def test_objectives_are_watched_by_other_labels_too(render: Render, tmp_path: Path) -> None:
    apps = {"dragoman": "a", "dragoman-canary": "b"}
    given = []
    for name, app in apps.items():
        for one in series(name, is_ill=app == "b"):
            given.append(one | {"series": one["series"].replace(f'job="{name}"', f'job="pods",app="{app}"')})
    labels = {"namespace": "translation", "job": "pods", "app": "b", "model": "en-de"}
    firing = [labels | {"severity": "critical", "release": "dragoman-canary"}]
    fire(render, tmp_path, given, {"DragomanErrorBudgetBurnsFast": firing, "DragomanNoMetrics": []}, apps)


def test_a_release_without_metrics_is_missed_although_the_other_has_some(render: Render, tmp_path: Path) -> None:
    gone = {"namespace": "translation", "severity": "critical", "release": TWO[1]}
    fire(render, tmp_path, series(TWO[0], is_ill=False), {"DragomanNoMetrics": [gone], "DragomanModelNotReady": []})
