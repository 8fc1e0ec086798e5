"""Helm itself, as a library, against a cluster that keeps nothing: it answers as an API server and records what it is given."""

import asyncio
import json
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/dragoman"
NAMESPACE = "translation"
NEWEST = "1.37"
KINDS = {
    "v1": ("ConfigMap", "Pod", "Secret", "Service", "ServiceAccount"),
    "apps/v1": ("Deployment",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "policy/v1": ("PodDisruptionBudget",),
    "networking.k8s.io/v1": ("NetworkPolicy",),
    "monitoring.coreos.com/v1": ("ServiceMonitor", "PodMonitor", "PrometheusRule"),
    "keda.sh/v1alpha1": ("ScaledObject",),
    "gateway.networking.k8s.io/v1": ("GRPCRoute", "HTTPRoute"),
}
# Where the chart's own copies are not there yet, the chart is tried with these.
SAMPLE_RULES = "groups:\n- name: sample\n  rules:\n  - record: sample\n    expr: vector(1)\n    labels: {a: '{{ $value }}'}\n"
SAMPLE_DASHBOARD = '{"title": "{{sample}}", "panels": []}\n'


class Refused(Exception):
    """What Helm says about values it does not take."""


@dataclass
class Rendered:
    """What a chart and its values come to."""

    objects: list[dict[str, Any]]
    notes: str
    created: list[dict[str, Any]] = field(default_factory=list)

    def one(self, kind: str, name: str | None = None) -> dict[str, Any]:
        """Return the only object of a kind (and name)."""
        (found,) = [item for item in self.all(kind) if name in (None, item["metadata"]["name"])]
        return found

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Return the objects of a kind."""
        return [item for item in self.objects if item["kind"] == kind]

    @property
    def pod(self) -> dict[str, Any]:
        """The pods' specification."""
        return self.one("Deployment")["spec"]["template"]["spec"]

    @property
    def container(self) -> dict[str, Any]:
        """The server's container."""
        (found,) = [container for container in self.pod["containers"] if container["name"] == "dragoman"]
        return found

    @property
    def environment(self) -> dict[str, str]:
        """The server's variables that have a value of their own."""
        return {variable["name"]: variable["value"] for variable in self.container["env"] if "value" in variable}


class _Cluster(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet; in two, each would wait 40 ms for the other
    version = NEWEST
    created: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        api = path.removeprefix("/apis/").removeprefix("/api/")
        if path == "/version":
            major, minor = self.version.split(".")
            self._answer({"major": major, "minor": minor, "gitVersion": f"v{self.version}.0"})
        elif path == "/api":
            self._answer({"kind": "APIVersions", "versions": ["v1"]})
        elif path == "/apis":
            versions = [{"groupVersion": name, "version": name.split("/")[1]} for name in KINDS if "/" in name]
            groups = [
                {"name": version["groupVersion"].split("/")[0], "versions": [version], "preferredVersion": version}
                for version in versions
            ]
            self._answer({"kind": "APIGroupList", "apiVersion": "v1", "groups": groups})
        elif api in KINDS:
            resources = [
                {"name": _plural(kind), "singularName": "", "namespaced": True, "kind": kind, "verbs": ["create", "get"]}
                for kind in KINDS[api]
            ]
            self._answer({"kind": "APIResourceList", "groupVersion": api, "resources": resources})
        else:
            self._answer({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}, 404)

    def do_POST(self) -> None:
        body, kind = self.rfile.read(int(self.headers["Content-Length"])), self.headers["Content-Type"]
        if kind == "application/json":  # else it is Helm's record of the release
            self.created.append(json.loads(body))
        self._send(body, 201, kind)

    def do_PUT(self) -> None:
        self._send(self.rfile.read(int(self.headers["Content-Length"])), 200, self.headers["Content-Type"])

    def _answer(self, item: object, code: int = 200) -> None:
        self._send(json.dumps(item).encode(), code, "application/json")

    def _send(self, body: bytes, code: int, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def _plural(kind: str) -> str:
    return kind.lower()[:-1] + "ies" if kind.endswith("cy") else kind.lower() + "s"


class Helm:
    """Helm, the chart, and the cluster it believes in."""

    def __init__(self, chart: Path, folder: Path) -> None:
        self.chart = chart
        self._folder = folder
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Cluster)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the cluster."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def render(self, values: dict[str, Any] | None = None, *, release: str = "dragoman", version: str = NEWEST) -> Rendered:
        """Install the chart and return what was installed.

        Raises:
            Refused: If Helm does not take the values.
        """
        import helm_sdkpy
        import yaml

        _Cluster.version, _Cluster.created = version, []
        install = helm_sdkpy.Install(self._configuration())
        try:
            result = asyncio.run(install.run(release, str(self.chart), values=values, wait=False))
        except helm_sdkpy.HelmError as error:
            raise Refused(str(error)) from error
        objects = [item for item in yaml.load_all(result["manifest"], yaml.CSafeLoader) if item]
        return Rendered(objects, result["info"].get("notes", ""), _Cluster.created)

    def lint(self, values: str | None = None) -> list[str]:
        """Return what Helm's linter finds wrong, by default with the chart's own values."""
        import helm_sdkpy

        copy = self._folder / "dragoman"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(self.chart, copy)
        if values is not None:
            (copy / "values.yaml").write_text(values)
        result = asyncio.run(helm_sdkpy.Lint(self._configuration()).run(str(copy)))
        # Severities: 1 is a remark (no icon), 2 a warning, 3 an error.
        return [str(message) for message in result["Messages"] or () if message["Severity"] > 1] + (result["Errors"] or [])

    def _configuration(self) -> Any:
        import helm_sdkpy

        address = f"http://127.0.0.1:{self._server.server_port}"
        path = self._folder / "kubeconfig"
        path.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "here", "cluster": {"server": address}}],
                    "users": [{"name": "me", "user": {}}],
                    "contexts": [{"name": "here", "context": {"cluster": "here", "user": "me"}}],
                    "current-context": "here",
                }
            )
        )
        return helm_sdkpy.Configuration(namespace=NAMESPACE, kubeconfig=str(path))


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Helm]:
    """Helm with a copy of the chart, completed with sample rules and dashboards where it has none."""
    pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
    pytest.importorskip("helm_sdkpy", reason="Helm's library is not installed: make setup")
    folder = tmp_path_factory.mktemp("helm")
    chart = folder / "chart" / "dragoman"
    shutil.copytree(CHART, chart)
    for name, content in (("rules/sample.yaml", SAMPLE_RULES), ("dashboards/sample.json", SAMPLE_DASHBOARD)):
        path = chart / "files" / name
        path.parent.mkdir(exist_ok=True)
        if not any(path.parent.iterdir()):
            path.write_text(content)
    helm = Helm(chart, folder)
    yield helm
    helm.close()


@pytest.fixture(scope="session")
def render(helm: Helm) -> Callable[..., Rendered]:
    """Render the chart with values."""
    return helm.render


@pytest.fixture(scope="session")
def refused() -> type[Refused]:
    """What is raised for values that are not taken."""
    return Refused


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository."""
    return ROOT
