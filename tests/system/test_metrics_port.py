"""The metrics port: probes, metrics and attacks on it; the dashboard and the rules on data that the real Prometheus gathers."""

import gzip
import json
import math
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import requests

from tests.system.harness.callers import NATIVE, Callers
from tests.system.harness.server import ROOT, Server, serving, wait_until
from tests.system.test_soak import MISBEHAVING

pytestmark = pytest.mark.e2e

MAX_HEAD_BYTES, MAX_CONNECTIONS = 8192, 256


@pytest.fixture(scope="module")
def server(endless: Path) -> Iterator[Server]:
    with serving(endless / "alpha") as started:
        yield started
        assert started.terminate() == 0
        assert not started.problems()


def connected(server: Server) -> socket.socket:
    host, _, port = server.metrics_address.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def sent(server: Server, request: bytes) -> bytes:
    with connected(server) as client:
        client.sendall(request)
        client.shutdown(socket.SHUT_WR)
        return b"".join(iter(lambda: client.recv(65536), b""))


def status(server: Server, path: str = "/healthz") -> bytes:
    return sent(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())[9:12]


def test_metrics_and_probes_are_served(server: Server) -> None:
    text = requests.get(f"{server.metrics_address}/metrics", headers={"Accept-Encoding": "identity"}, timeout=60).text
    assert 'dragoman_model_ready{model="alpha"} 1.0' in text and "dragoman_build_info{" in text
    compressed = sent(server, b"GET /metrics HTTP/1.1\r\nAccept-Encoding: gzip\r\n\r\n")
    assert b'dragoman_model_ready{model="alpha"} 1.0' in gzip.decompress(compressed.partition(b"\r\n\r\n")[2])
    for path, body in (("/healthz", "ok\n"), ("/readyz", "ready\n"), ("/readyz?verbose", "ready\n")):
        response = requests.get(server.metrics_address + path, timeout=60)
        assert (response.status_code, response.text) == (200, body)
    answer = sent(server, b"HEAD /healthz HTTP/1.1\r\n\r\n")
    assert answer.endswith(b"\r\n\r\n") and b"Content-Length: 3\r\n" in answer


@pytest.mark.parametrize(
    ("request_", "expected"),
    [
        (b"GET /healthz HTTP/1.0\r\n\r\n", b"200"),
        (b"GET /healthz?x=1 HTTP/1.1\r\nHost: x\r\nAccept: a\r\nAccept: b\r\n\r\n", b"200"),
        (b"GET http://x/healthz HTTP/1.1\r\n\r\n", b"200"),
        *[(b"GET " + path + b" HTTP/1.1\r\n\r\n", b"404") for path in (b"/", b"/metrics/x", b"http://a", b"/%00", b"/\xff\xfe")],
        *[(b"GET " + path + b" HTTP/1.1\r\n\r\n", b"404") for path in (b"/../metrics", b"/" + b"x" * 5000)],
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", b"405"),
        *[(method + b" /healthz HTTP/1.1\r\n\r\n", b"405") for method in (b"DELETE", b"OPTIONS")],
        (b"GET /healthz HTTP/2.0\r\n\r\n", b"505"),
        *[(head + b"\r\n\r\n", b"400") for head in (b"GET healthz HTTP/1.1", b"GET /healthz", b"", b"PRI * HTTP/2.0\r\n\r\nSM")],
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", b"400"),
        *[(b"GET /healthz HTTP/1.1\r\n" + head + b"\r\n\r\n", b"400") for head in (b"no colon", b" : x", b"A: 1\r\n B: folded")],
        *[
            (b"GET /healthz HTTP/1.1\r\n" + name + b": a\r\n" + name + b": b\r\n\r\n", b"400")
            for name in (b"Authorization", b"Host")
        ],
        (b"GET /" + b"x" * MAX_HEAD_BYTES + b" HTTP/1.1\r\n\r\n", b"431"),
        (b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * MAX_HEAD_BYTES, b"431"),
        (b"x" * 1_000_000, b"431"),
        (b"GET /healthz HTTP/1.1\r\n", b""),
        (b"", b""),
    ],
    ids=lambda value: repr(value[:40]),
)
def test_every_request_is_answered(server: Server, request_: bytes, expected: bytes) -> None:
    answer = sent(server, request_)
    assert answer[9:12] == expected
    assert not answer or b"\r\nConnection: close\r\n" in answer
    assert b"Traceback" not in answer and b"Exception" not in answer


def test_idle_connections_make_room_and_aborted_ones_leave_no_error(server: Server) -> None:
    for _ in range(5):
        client = connected(server)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00")
        client.sendall(b"GET /metrics HTTP/1.1\r\n")
        client.close()
    with ExitStack() as stack:
        idle = [stack.enter_context(connected(server)) for _ in range(MAX_CONNECTIONS + 50)]
        began = time.monotonic()
        assert status(server) == b"200" and time.monotonic() - began < 5
        assert idle[0].recv(1) == b"", "the oldest has made room"
    with connected(server) as client:
        client.sendall(b"POST /metrics HTTP/1.1\r\nContent-Length: 500000\r\n\r\n" + b"x" * 500_000)
        assert client.recv(65536).startswith(b"HTTP/1.1 405 "), "a refused body does not undo the answer"


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
    def __init__(self, address: str) -> None:
        self.address = address

    def get(self, path: str, **arguments: str) -> Any:
        answer = requests.get(f"{self.address}/api/v1/{path}", params=arguments, timeout=10)
        assert answer.status_code == 200, (arguments, answer.text)
        return answer.json()["data"]

    def values(self, query: str) -> list[float]:
        values = [float(series["value"][1]) for series in self.get("query", query=query)["result"]]
        return [value for value in values if not math.isnan(value)]


@contextmanager
def prometheus(folder: Path, target: str) -> Iterator[Prometheus]:
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
        wait_until(lambda: is_up(running), f"Prometheus has the server, see {folder}/log", SECONDS, 0.25)
        yield running
    finally:
        process.terminate()
        process.wait(30)


def is_up(running: Prometheus) -> bool:
    with suppress(requests.ConnectionError):
        return running.values("min(dragoman_model_ready)") == [1.0]
    return False


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
        alerts = [re.sub(r"by \([^)]*\)|on \([^)]*\)", "", rule["query"]) for rule in rules if rule["type"] == "alerting"]
        named = set(re.findall(r"\b(?:dragoman_\w+|process_\w+|up)(?=[{\[\s)]|$)", "\n".join(alerts), re.MULTILINE))
        assert len(queries) > 60 and len(records) == 18 and len(named) > 12
        missing = {name: query for name, query in queries.items() if not ONLY_SOMEWHERE.search(query)} | records
        missing |= {name: name for name in named if not ONLY_SOMEWHERE.search(name)}
        missing |= {f"rejected {x}": f'dragoman_requests_rejected_total{{reason="{x}"}} > 0' for x in ("queue_full", "invalid")}
        missing |= {f"failed {x}": f'dragoman_requests_failed_total{{code="{x}"}} > 0' for x in ("CANCELLED", "DEADLINE_EXCEEDED")}

        def has_everything() -> bool:
            for name, query in list(missing.items()):
                if running.values(query):
                    del missing[name]
            return not missing

        with Callers(server, kinds=KINDS, num=17, max_new_tokens=20) as callers:
            wait_until(has_everything, missing, SECONDS, 0.25)
        assert callers.statuses.keys() <= {"RESOURCE_EXHAUSTED"}
        for query in queries.values():
            running.values(query)
        rules = [rule for group in running.get("rules")["groups"] for rule in group["rules"]]
        assert {rule["name"]: rule.get("lastError") for rule in rules if rule["health"] != "ok"} == {}
        firing = {rule["name"] for rule in rules if rule["type"] == "alerting" and rule["state"] == "firing"}
        assert not firing & {"DragomanNoMetrics", "DragomanTargetDown", "DragomanEngineCrashLoops", "DragomanModelNotReady"}
        assert server.metric("dragoman_engine_restarts_total") == 0
