"""Render the chart by Helm as a library, installing into an API server that stores nothing."""

import asyncio
import copy
import json
import re
import runpy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jsonschema
import pytest
import yaml
from kubernetes_validate import utils
from referencing import Registry, Resource

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy/helm/dragoman"
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
    "ray.io/v1": ("RayJob",),
}
Values = dict[str, Any]


class Refused(Exception):
    """Error message of Helm for values that the chart does not accept."""


@dataclass(frozen=True)
class Rendered:
    """Objects of a chart installed with some values."""

    objects: list[dict[str, Any]]

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Return the objects of a kind."""
        return [item for item in self.objects if item["kind"] == kind]

    def find(self, path: str) -> Any:
        """Return a part of an object by keys, indices or names separated by spaces, or None where it is missing.

        The first word is `pod`, `container`, `env`, or a kind, with the object's name behind a colon where there are several.
        """
        first, *steps = path.split()
        kind, _, name = first.partition(":")
        found: Any = {
            "pod": lambda: self.find("Deployment spec template spec"),
            "container": lambda: self.find("pod containers dragoman"),
            "env": lambda: {variable["name"]: variable.get("value") for variable in self.find("container env")},
        }.get(kind, lambda: next((item for item in self.all(kind) if name in ("", item["metadata"]["name"])), None))()
        for step in steps:
            if isinstance(found, list):
                places = {str(i): item for i, item in enumerate(found)}
                found = places | {item.get("name"): item for item in found if isinstance(item, dict)}
            found = (found or {}).get(step)
        return found


def nested(values: Values) -> Values:
    """Return values whose keys are paths, such as `tls.enabled`, as nested dictionaries."""
    result: Values = {}
    for path, value in copy.deepcopy(values).items():
        *parents, last = path.split(".")
        place = result
        for parent in parents:
            place[parent] = place.get(parent) or {}
            place = place[parent]
        place[last] = (place.get(last) or {}) | value if isinstance(value, dict) else value
    return result


def _resources(version: str, kinds: tuple[str, ...]) -> dict[str, Any]:
    """Return the API server's list of the kinds of a version."""
    plurals = {kind: kind.lower()[:-1] + "ies" if kind.endswith("cy") else kind.lower() + "s" for kind in kinds}
    found = [{"name": name, "namespaced": True, "kind": kind, "verbs": ["create", "get"]} for kind, name in plurals.items()]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": found}


VERSIONS = [{"groupVersion": name, "version": name.split("/")[1]} for name in KINDS if "/" in name]
GROUPS = [{"name": each["groupVersion"].split("/")[0], "versions": [each], "preferredVersion": each} for each in VERSIONS]
ANSWERS: dict[str, Any] = {f"/{'apis' if '/' in name else 'api'}/{name}": _resources(name, kinds) for name, kinds in KINDS.items()}
ANSWERS["/api"] = {"kind": "APIVersions", "versions": ["v1"]}
ANSWERS["/apis"] = {"kind": "APIGroupList", "apiVersion": "v1", "groups": GROUPS}
MISSING = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}


class _Cluster(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer is one packet; in two, each would wait 40 ms for the other
    version = NEWEST

    def do_GET(self) -> None:
        major, minor = self.version.split(".")
        versions = {"/version": {"major": major, "minor": minor, "gitVersion": f"v{self.version}.0"}}
        found = (ANSWERS | versions).get(self.path.partition("?")[0])
        self._send(json.dumps(found or MISSING).encode(), 200 if found else 404, "application/json")

    def do_POST(self) -> None:
        self._send(self.rfile.read(int(self.headers["Content-Length"])), 201, self.headers["Content-Type"])

    do_PUT = do_POST

    def _send(self, body: bytes, code: int, kind: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="session")
def configuration(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[], Any]]:
    """Helm's configuration for the fake cluster."""
    helm_sdkpy = pytest.importorskip("helm_sdkpy", reason="Helm's library is not installed: make setup")
    path = tmp_path_factory.mktemp("helm") / "kubeconfig"
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Cluster)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
    clusters = [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}]
    contexts = [{"name": "here", "context": {"cluster": "here", "user": "me"}}]
    config = {"apiVersion": "v1", "kind": "Config", "current-context": "here", "clusters": clusters, "contexts": contexts}
    path.write_text(json.dumps(config | {"users": [{"name": "me", "user": {}}]}))
    yield lambda: helm_sdkpy.Configuration(namespace="translation", kubeconfig=str(path))
    server.shutdown()
    server.server_close()


SCALED = {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod", "advanced", "triggers"}
# Custom resources: the fields of their specifications that must be there, and those that may.
SPECS = {
    "ServiceMonitor": ({"selector", "endpoints"}, set()),
    "PodMonitor": ({"selector", "podMetricsEndpoints"}, set()),
    "PrometheusRule": ({"groups"}, set()),
    "GRPCRoute": ({"parentRefs", "rules"}, {"hostnames"}),
    "HTTPRoute": ({"parentRefs", "rules"}, {"hostnames"}),
    "ScaledObject": (SCALED, {"fallback"}),
}


@cache
def validator(kind: str, api: str, version: str) -> Any:
    group, _, number = api.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], number)))
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    schema = utils.schema_contents(f"{folder}/{name}.json", version)
    definitions = Resource.from_contents(utils.schema_contents(f"{folder}/_definitions.json", version))
    return jsonschema.Draft202012Validator(schema, registry=definitions @ (Resource.from_contents(schema) @ Registry()))


def assert_valid(item: dict[str, Any], version: str) -> None:
    """Check an object against the schema of its kind, strictly: a field that Kubernetes does not know is an error."""
    if item["kind"] in SPECS:
        needed, possible = SPECS[item["kind"]]
        assert needed <= item["spec"].keys() <= needed | possible, item["kind"]
        return
    errors = validator(item["kind"], item["apiVersion"], version).iter_errors(item)
    assert [f"{item['kind']} {error.json_path}: {error.message}" for error in errors] == []


def assert_names_fit(rendered: Rendered) -> None:
    """Check that volumes, mounts, variables, ports, labels and Services of a release fit together."""
    pod, labels = rendered.find("pod"), rendered.find("Deployment spec template metadata labels")
    volumes = [volume["name"] for volume in pod["volumes"]]
    assert len(volumes) == len(set(volumes))
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        mounts = container.get("volumeMounts", [])
        assert {mount["name"] for mount in mounts} <= set(volumes)
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        names = [variable["name"] for variable in container.get("env", [])]
        assert len(names) == len(set(names)), names
    ports = {port["name"] for port in rendered.find("container ports")}
    selectors = [rendered.find("Deployment spec selector matchLabels")]
    for service in rendered.all("Service"):
        selectors.append(service["spec"]["selector"])
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    assert all(selector.items() <= labels.items() for selector in selectors)
    accounts = [account["metadata"]["name"] for account in rendered.all("ServiceAccount")]
    assert pod["serviceAccountName"] in accounts or not accounts
    for item in rendered.objects:
        assert item["metadata"].get("namespace", "translation") == "translation"
        assert len(item["metadata"]["name"]) <= 63 or item["kind"] == "ConfigMap"


Render = Callable[..., Rendered]


def install(configuration: Callable[[], Any], chart: Path, values: Values, release: str, version: str = NEWEST) -> Rendered:
    """Return the objects of a chart with values whose keys may be paths; raise `Refused` for values that it does not accept."""
    import helm_sdkpy

    _Cluster.version = version
    try:
        result = asyncio.run(helm_sdkpy.Install(configuration()).run(release, str(chart), values=nested(values), wait=False))
    except helm_sdkpy.HelmError as error:
        raise Refused(str(error)) from error
    return Rendered([item for item in yaml.load_all(result["manifest"], yaml.CSafeLoader) if item])


@pytest.fixture(scope="session")
def render(configuration: Callable[[], Any]) -> Render:
    """Render the chart of the server, once for the same values, and check that its objects are valid and fit together."""
    known: dict[str, Rendered] = {}

    def render(values: Values | None = None, *, release: str = "dragoman", version: str = NEWEST) -> Rendered:
        key = json.dumps([values, release, version])
        if key not in known:
            known[key] = install(configuration, CHART, values or {}, release, version)
            for item in known[key].objects:
                assert_valid(item, version)
            assert_names_fit(known[key])
        return known[key]

    return render


def program(path: str) -> Any:
    """Import a program of `deploy/` that is in no package."""
    return SimpleNamespace(**runpy.run_path(str(ROOT / "deploy" / path)))


def load(path: str) -> Any:
    """Read a YAML file of `deploy/`."""
    return yaml.safe_load((ROOT / "deploy" / path).read_text(encoding="utf-8"))


def manual_blocks() -> list[dict[str, Any]]:
    """Return the blocks of YAML in the manual for Kubernetes."""
    text = (ROOT / "docs/deploy.md").read_text(encoding="utf-8")
    blocks = map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", text, re.DOTALL))
    return [block for block in blocks if isinstance(block, dict)]
