"""The example for KServe: against the API that KServe publishes, the server's settings, and what the manual says of it."""

import copy
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from dragoman.server import config as settings
from dragoman.server.core.core import CLOSE_SECONDS
from dragoman.server.faces.grpc.health import LIVENESS, OVERALL
from dragoman.server.supervisor import STOP_SECONDS
from tests.deploy.kserve_schema import Schemas

FILES = ("servingruntime.yaml", "inferenceservice.yaml", "inferenceservice-knative.yaml")
# What KServe cannot give to Knative, or Knative refuses.
NOT_ON_KNATIVE = {"terminationGracePeriodSeconds", "deploymentStrategy", "autoScaling", "lifecycle"}


@cache
def schemas() -> Schemas:
    return Schemas()


def load(root: Path, name: str) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
    content: dict[str, Any] = yaml.safe_load((root / "deploy/kserve" / name).read_text(encoding="utf-8"))
    return content


@pytest.fixture
def runtime(root: Path) -> dict[str, Any]:
    spec: dict[str, Any] = load(root, "servingruntime.yaml")["spec"]
    return spec


@pytest.fixture
def container(runtime: dict[str, Any]) -> dict[str, Any]:
    (found,) = runtime["containers"]
    return dict(found)


def errors(manifest: dict[str, Any]) -> list[str]:
    """Return what KServe's API has against a manifest."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: make setup")
    group, _, version = manifest["apiVersion"].partition("/")
    assert group == "serving.kserve.io"
    schema = schemas().of(f"{version.capitalize()}{manifest['kind']}")
    return [f"{error.json_path}: {error.message}" for error in jsonschema.Draft202012Validator(schema).iter_errors(manifest)]


@pytest.mark.parametrize("name", FILES)
def test_the_manifests_are_what_kserve_takes(root: Path, name: str) -> None:
    assert errors(load(root, name)) == []


def test_the_folder_holds_nothing_that_is_not_checked(root: Path) -> None:
    assert sorted(path.name for path in (root / "deploy/kserve").iterdir()) == sorted(FILES)


@pytest.mark.parametrize(
    ("name", "path", "value", "said"),
    [
        ("servingruntime.yaml", ("spec", "supportedModelFormat"), [], "supportedModelFormat"),
        ("servingruntime.yaml", ("spec", "containers"), None, "containers"),
        ("servingruntime.yaml", ("spec", "multiModel"), "no", "multiModel"),
        ("servingruntime.yaml", ("spec", "containers", 0, "readinessProbe", "grpc", "servce"), "a", "servce"),
        ("inferenceservice.yaml", ("spec", "predictor", "model", "ports", 0, "containerPort"), "h2c", "containerPort"),
        ("inferenceservice.yaml", ("spec", "predictor", "model", "protocol"), "v2", "protocol"),
        ("servingruntime.yaml", ("spec", "volumes", 0, "emptyDirectory"), {}, "emptyDirectory"),
        ("inferenceservice.yaml", ("spec", "predictor", "model", "modelFormat"), None, "modelFormat"),
        ("inferenceservice.yaml", ("spec", "predictor", "model", "storageURI"), "s3://a", "storageURI"),
        ("inferenceservice.yaml", ("spec", "predictor", "minReplicas"), "two", "minReplicas"),
        ("inferenceservice.yaml", ("spec", "predictor", "autoScaling", "metrics", 0, "external", "metrics"), {}, "metrics"),
        ("inferenceservice-knative.yaml", ("spec", "predictor", "canaryTrafficPercentage"), 10, "canaryTrafficPercentage"),
        ("inferenceservice-knative.yaml", ("spec", "predictor", "canaryTrafficPercent"), "10%", "canaryTrafficPercent"),
    ],
)
def test_the_check_finds_what_kserve_would_not_take(root: Path, name: str, path: tuple[Any, ...], value: Any, said: str) -> None:
    manifest = copy.deepcopy(load(root, name))
    place: Any = manifest
    for key in path[:-1]:
        place = place[key]
    if value is None:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    assert any(said in error for error in errors(manifest))


def test_the_server_takes_what_the_runtime_tells_it(container: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    read = settings.load({})
    assert read.models == Path("/mnt/models"), "where KServe puts what storageUri names"
    assert container["args"] == ["serve"] and container["name"] == "kserve-container"


def test_the_runtime_speaks_both_protocols_and_leaves_ports_to_the_services(
    root: Path, runtime: dict[str, Any], container: dict[str, Any]
) -> None:
    """Names of ports say what proxies speak to them; what both would name, a service on Knative could not take back."""
    assert "ports" not in container and runtime["protocolVersions"] == ["v2", "grpc-v2"]
    fields = settings.ServerConfig.model_fields
    ports_of = {"http1": fields["http_port"].default, "h2c": fields["port"].default}
    protocol_of = {"http1": "v2", "h2c": "grpc-v2"}
    for name, wanted in (("inferenceservice.yaml", ["http1", "h2c"]), ("inferenceservice-knative.yaml", ["h2c"])):
        model = load(root, name)["spec"]["predictor"]["model"]
        assert [port["name"] for port in model["ports"]] == wanted
        assert all(port["containerPort"] == ports_of[port["name"]] for port in model["ports"])
        assert model["protocolVersion"] == protocol_of[wanted[0]], "that of port 80"


def test_probes_ask_for_health_that_the_server_tells(container: dict[str, Any]) -> None:
    for probe, service in (("startupProbe", "readiness"), ("readinessProbe", "readiness"), ("livenessProbe", LIVENESS)):
        assert container[probe]["grpc"] == {"port": settings.ServerConfig.model_fields["port"].default, "service": service}
    assert "readiness" in OVERALL


def test_metrics_are_scraped_where_they_are(runtime: dict[str, Any]) -> None:
    default = settings.ServerConfig.model_fields["metrics_port"].default
    assert runtime["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": str(default),
        "prometheus.io/path": "/metrics",
    }


def test_only_tmp_is_written(runtime: dict[str, Any], container: dict[str, Any]) -> None:
    assert container["securityContext"]["readOnlyRootFilesystem"] and container["securityContext"]["runAsNonRoot"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]
    assert {volume["name"] for volume in runtime["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}


def test_the_services_use_the_runtime_for_a_format_that_it_has(root: Path, runtime: dict[str, Any]) -> None:
    formats = {(each["name"], each["version"]) for each in runtime["supportedModelFormats"]}
    for name in FILES[1:]:
        model = load(root, name)["spec"]["predictor"]["model"]
        assert model["runtime"] == load(root, "servingruntime.yaml")["metadata"]["name"]
        assert (model["modelFormat"]["name"], model["modelFormat"]["version"]) in formats


def test_nothing_is_called_so_that_its_variables_look_like_settings(root: Path) -> None:
    for name in FILES[1:]:
        variable = load(root, name)["metadata"]["name"].upper().replace("-", "_")
        assert not variable.startswith(settings.PREFIX.rstrip("_"))


def test_running_requests_are_not_cut_off(root: Path) -> None:
    predictor = load(root, "inferenceservice.yaml")["spec"]["predictor"]
    environment = {variable["name"]: variable["value"] for variable in predictor["model"]["env"]}
    pre_stop = predictor["model"]["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = pre_stop + float(environment["DRAGOMAN_DRAIN_SECONDS"]) + 2 * CLOSE_SECONDS + 2 * STOP_SECONDS
    assert predictor["terminationGracePeriodSeconds"] >= needed
    assert predictor["deploymentStrategy"]["rollingUpdate"]["maxUnavailable"] == 0


def test_the_example_for_knative_has_nothing_that_knative_refuses(root: Path, container: dict[str, Any]) -> None:
    predictor = load(root, "inferenceservice-knative.yaml")["spec"]["predictor"]
    assert not NOT_ON_KNATIVE & (predictor.keys() | predictor["model"].keys() | container.keys())


def test_it_is_scaled_by_what_the_chart_scales_by(root: Path) -> None:
    predictor = load(root, "inferenceservice.yaml")["spec"]["predictor"]
    (metric,) = [each["external"] for each in predictor["autoScaling"]["metrics"]]
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
    values = yaml.safe_load((root / "deploy/helm/dragoman/values.yaml").read_text(encoding="utf-8"))
    assert float(metric["target"]["value"]) == values["autoscaling"]["queueSeconds"]["target"]
    assert "dragoman_estimated_queue_seconds" in metric["metric"]["query"]


def test_the_manual_names_every_file(root: Path) -> None:
    manual = (root / "docs/kubernetes.md").read_text(encoding="utf-8")
    assert set(re.findall(r"deploy/kserve/([\w.-]+)", manual)) == set(FILES)
