"""The manifests for KServe, against the settings of the server that they start."""

from pathlib import Path

import pytest

from dragoman.server import config as settings
from dragoman.server.protocols.grpc.health import LIVENESS
from dragoman.server.service.service import CLOSE_SECONDS
from dragoman.server.workers.supervisor import STOP_SECONDS
from tests.deploy.conftest import load

RUNTIME, SERVICE, KNATIVE = "servingruntime.yaml", "inferenceservice.yaml", "inferenceservice-knative.yaml"
FIELDS = settings.ServerConfig.model_fields


def test_runtime_starts_a_server_that_is_probed_scraped_and_confined(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = load(f"kserve/{RUNTIME}")["spec"]
    (container,) = runtime["containers"]
    for variable in container["env"]:
        monkeypatch.setenv(variable["name"], variable["value"])
    assert settings.load({}).models == Path("/mnt/models"), "KServe puts there what storageUri names"
    assert container["args"] == ["serve"] and container["name"] == "kserve-container" and "ports" not in container
    assert runtime["protocolVersions"] == ["v2", "grpc-v2"]
    for probe, service in (("startupProbe", "readiness"), ("readinessProbe", "readiness"), ("livenessProbe", LIVENESS)):
        assert container[probe]["grpc"] == {"port": FIELDS["port"].default, "service": service}
    scraped = {"scrape": "true", "port": str(FIELDS["metrics_port"].default), "path": "/metrics"}
    assert runtime["annotations"] == {f"prometheus.io/{name}": value for name, value in scraped.items()}
    assert container["securityContext"]["readOnlyRootFilesystem"] and container["securityContext"]["runAsNonRoot"]
    assert [mount["mountPath"] for mount in container["volumeMounts"]] == ["/tmp"]
    assert {volume["name"] for volume in runtime["volumes"]} == {mount["name"] for mount in container["volumeMounts"]}


@pytest.mark.parametrize(("name", "ports"), [(SERVICE, ["http1", "h2c"]), (KNATIVE, ["h2c"])])
def test_services_use_the_runtime_with_a_format_and_ports_that_it_has(name: str, ports: list[str]) -> None:
    runtime, manifest = load(f"kserve/{RUNTIME}"), load(f"kserve/{name}")
    used, numbers = manifest["spec"]["predictor"]["model"], {"http1": FIELDS["http_port"].default, "h2c": FIELDS["port"].default}
    assert used["runtime"] == runtime["metadata"]["name"]
    formats = {(each["name"], each["version"]) for each in runtime["spec"]["supportedModelFormats"]}
    assert (used["modelFormat"]["name"], used["modelFormat"]["version"]) in formats
    assert [(port["name"], port["containerPort"]) for port in used["ports"]] == [(name, numbers[name]) for name in ports]
    assert used["protocolVersion"] == {"http1": "v2", "h2c": "grpc-v2"}[ports[0]], "that of port 80"
    variable = manifest["metadata"]["name"].upper().replace("-", "_")
    assert not variable.startswith(settings.PREFIX.rstrip("_")), "variables of the service would look like settings"


def test_rollouts_cut_no_request_off_and_scaling_is_by_the_queue() -> None:
    predictor = load(f"kserve/{SERVICE}")["spec"]["predictor"]
    environment = {variable["name"]: variable["value"] for variable in predictor["model"]["env"]}
    pre_stop = predictor["model"]["lifecycle"]["preStop"]["sleep"]["seconds"]
    needed = pre_stop + float(environment["DRAGOMAN_DRAIN_SECONDS"]) + 2 * CLOSE_SECONDS + 2 * STOP_SECONDS
    assert predictor["terminationGracePeriodSeconds"] >= needed
    assert predictor["deploymentStrategy"]["rollingUpdate"]["maxUnavailable"] == 0
    (metric,) = [each["external"] for each in predictor["autoScaling"]["metrics"]]
    target = load("helm/dragoman/values.yaml")["autoscaling"]["targets"]["queueSeconds"]
    assert float(metric["target"]["value"]) == target and "dragoman_estimated_queue_seconds" in metric["metric"]["query"]
    knative, (container,) = load(f"kserve/{KNATIVE}")["spec"]["predictor"], load(f"kserve/{RUNTIME}")["spec"]["containers"]
    refused = {"terminationGracePeriodSeconds", "deploymentStrategy", "autoScaling", "lifecycle"}
    assert not refused & (knative.keys() | knative["model"].keys() | container.keys()), "Knative refuses them"
