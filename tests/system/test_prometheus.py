"""The dashboard and the rules on the data of a real server under load, gathered by the real Prometheus."""

import json
import math
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.system.harness.callers import NATIVE, Callers
from tests.system.harness.server import ROOT, kill, serving
from tests.system.test_soak import MISBEHAVING

pytestmark = pytest.mark.e2e

CONFIGURATION = """
global: {{scrape_interval: 1s, scrape_timeout: 1s, evaluation_interval: 1s}}
rule_files: ["{rules}/*.yaml"]
scrape_configs:
  - job_name: dragoman
    static_configs: [{{targets: ["{target}"]}}]
"""
VARIABLES = {"$__rate_interval": "20s", "$__range": "1m", "$namespace": ".*", "$instance": ".*", "$model": ".*"}
SECONDS = 50
# Requests of every kind, and some of what callers do wrong.
KINDS = NATIVE | {name: MISBEHAVING[name] for name in ("late", "cancelled", "no tokens")}
# Series that this server has none of: those of GPUs, of several front ends, of callers who are known, and of files that change.
ONLY_SOMEWHERE = re.compile("dragoman_(gpu|front_end|tls_certificate|caller|reloads?)_")


class Prometheus:
    """A running Prometheus."""

    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **arguments: str) -> Any:
        """Return the data of an answer; fail with what it says is wrong."""
        query = urllib.parse.urlencode(arguments)
        try:
            with urllib.request.urlopen(f"{self.address}/api/v1/{path}?{query}", timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError((arguments, error.read())) from None

    def values(self, query: str) -> list[float]:
        """Return a query's values now, those alone that are numbers."""
        values = [float(series["value"][1]) for series in self.get("query", query=query)["result"]]
        return [value for value in values if not math.isnan(value)]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
    """Scrape a server once a second."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("prometheus is not installed")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    configuration = CONFIGURATION.format(rules=ROOT / "deploy/prometheus/rules", target=target.removeprefix("http://"))
    (folder / "prometheus.yml").write_text(configuration)
    flags = [
        f"--config.file={folder}/prometheus.yml",
        f"--storage.tsdb.path={folder}/data",
        f"--web.listen-address=127.0.0.1:{port}",
    ]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen([binary, *flags], stdout=log, stderr=log)
    try:
        running = Prometheus(f"http://127.0.0.1:{port}")
        wait_until(lambda: is_up(running), lambda: (folder / "log").read_text()[-2000:])
        yield running
    finally:
        process.terminate()
        process.wait(30)


def is_up(running: Prometheus) -> bool:
    with suppress(OSError):
        return running.values("min(dragoman_model_ready)") == [1.0]
    return False


def wait_until(condition: Callable[[], bool], what: Callable[[], object]) -> None:
    """Ask Prometheus, which looks once a second, a few times a second."""
    end = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < end, what()
        time.sleep(0.25)


def dashboard_queries() -> dict[str, str]:
    """Return the dashboard's queries by panel and legend; those of GPUs, which have no data here, apart."""
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/dragoman.json").read_text(encoding="utf-8"))
    queries = {}
    for panel in dashboard["panels"]:
        for target in panel.get("targets", ()):
            query = target["expr"]
            for variable, value in VARIABLES.items():
                query = query.replace(variable, value)
            queries[f"{panel['title']}: {target['legendFormat']}"] = query
    return queries


def test_every_panel_and_every_rule_has_data(endless: Path, tmp_path: Path) -> None:
    queries = dashboard_queries()
    flags = ("--max-slots", "4", "--max-waiting-requests", "4")
    with serving(endless / "alpha", *flags) as server, prometheus(tmp_path, server.metrics_address) as running:
        rules = [rule for group in running.get("rules")["groups"] for rule in group["rules"]]
        records = {rule["name"]: rule["name"] for rule in rules if rule["type"] == "recording"}
        named = {
            name
            for rule in rules
            if rule["type"] == "alerting"
            for name in re.findall(
                r"\b(?:dragoman_\w+|process_\w+|up)(?=[{\[\s)]|$)", re.sub(r"by \([^)]*\)|on \([^)]*\)", "", rule["query"])
            )
        }
        assert len(queries) > 60 and len(records) == 18 and len(named) > 12
        missing = {name: query for name, query in queries.items() if not ONLY_SOMEWHERE.search(query)} | records
        missing |= {name: name for name in named if not ONLY_SOMEWHERE.search(name)}
        incidents = {
            f"{reason}": f'dragoman_requests_{kind}="{reason}"}} > 0'
            for kind, reason in (
                ("rejected_total{reason", "queue_full"),
                ("rejected_total{reason", "invalid"),
                ("failed_total{code", "CANCELLED"),
                ("failed_total{code", "DEADLINE_EXCEEDED"),
            )
        }
        missing |= incidents

        def has_everything() -> bool:
            for name, query in list(missing.items()):
                if running.values(query):
                    del missing[name]
            return not missing

        with Callers(server, kinds=KINDS, num=17, max_new_tokens=20) as callers:
            wait_until(has_everything, lambda: f"no data: {missing}")
        assert callers.statuses.keys() <= {"RESOURCE_EXHAUSTED"}
        for query in queries.values():
            running.values(query)
        rules = [rule for group in running.get("rules")["groups"] for rule in group["rules"]]
        assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
        firing = {rule["name"] for rule in rules if rule["type"] == "alerting" and rule["state"] == "firing"}
        assert not firing & {"DragomanNoMetrics", "DragomanTargetDown", "DragomanEngineRestarted", "DragomanModelNotReady"}
        assert server.metric("dragoman_engine_restarts_total") == 0


def test_an_engine_that_dies_is_an_alert(endless: Path, tmp_path: Path) -> None:
    with serving(endless / "alpha") as server, prometheus(tmp_path, server.metrics_address) as running:
        wait_until(lambda: running.values("dragoman_engine_restarts_total") == [0.0], lambda: "no series to rise from")
        kill(*server.engines())

        def fires() -> bool:
            return bool(running.values('ALERTS{alertname="DragomanEngineRestarted",alertstate="firing"}'))

        wait_until(fires, lambda: running.get("alerts"))
