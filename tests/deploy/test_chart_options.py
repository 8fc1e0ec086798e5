"""Every option of the chart alone, and random combinations of options, against the schemas of Kubernetes."""

import json
import random
from functools import cache
from typing import Any

import pytest

from tests.deploy.conftest import Refused, Render, Rendered, Values, manual_blocks
from tests.deploy.test_chart import FACTS, GATEWAY, PEERS, ROUTES, SHA
from tests.examples import num_examples

DNS = {"to": [{"namespaceSelector": {}}], "ports": [{"port": 53, "protocol": "UDP"}]}
MONITOR = {"enabled": True, "labels": {"release": "prometheus"}, "relabelings": [{"action": "labeldrop", "regex": "pod_ip"}]}
ARCHIVE = {"url": "https://models.example/a.tar.gz", "sha256": SHA}
STORE = {"addresses": [{"address": f"oci://models.example/a@sha256:{SHA}"}], "claimName": "models", "secretName": "registry"}
STORE |= {"image": "dragoman:pull", "env": [{"name": "A", "value": "b"}], "envFrom": [{"secretRef": {"name": "store"}}]}
# Values beside those whose effects are tested one by one.
OPTIONS: list[Values] = [
    {"fullnameOverride": "translator"},
    {"nameOverride": "mt", "commonLabels": {"team": "language"}},
    {"replicaCount": 0},
    {"replicaCount": 5, "minReadySeconds": 10},
    {"strategy": {"type": "Recreate", "rollingUpdate": None}},
    {"strategy.rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 1}},
    {"image": {"repository": "registry.example/mt/dragoman", "tag": "1.2.3", "pullPolicy": "Always"}},
    {"image.digest": f"sha256:{SHA}", "imagePullSecrets": [{"name": "registry"}]},
    {"models.source": "download", "models.download.archives": [ARCHIVE]},
    {"models.source": "download", "models.download": {"archives": [ARCHIVE], "image": "a", "tokenSecret": {"name": "b"}}},
    {"models.source": "store", "models.store": STORE},
    {"models.files": {"en-de": {"versions": {"latest": 2}, "weights": {"4": 0.1}}, "en-fr": None}},
    {"models.signatures.configMapName": "keys"},
    {"models.signatures.secretName": "keys"},
    {"config": {"max_connection_age_seconds": None, "num_threads": 4, "restart_backoff_initial_seconds": 0.25}},
    {"probes": {"type": "grpc", "startup": {"failureThreshold": 720}}},
    {"service": {"type": "NodePort", "headless": {"enabled": False}, "annotations": {"a": "b"}, "appProtocol": "grpc"}},
    {"service.headless.annotations": {"a": "b"}, "metrics.serviceMonitor": MONITOR},
    {"metrics.podMonitor": MONITOR},
    {"auth.secretName": "dragoman-tokens"},
    {"resources": {"requests": {"cpu": 4, "memory": "4Gi"}}},
    {"gpu": {"enabled": True, "nodeSelector": {"a": "b"}, "tolerations": []}},
    {"gpu": {"enabled": True, "resources": {"requests": None, "limits": None}}},
    {"podDisruptionBudget": {"minAvailable": "50%", "maxUnavailable": None}},
    PEERS | {"networkPolicy.egress": [DNS]},
    {"serviceAccount.create": False},
    {"serviceAccount": {"name": "mt", "annotations": {"eks.amazonaws.com/role-arn": "arn"}}},
    {"tmp": {"medium": "Memory", "sizeLimit": "64Mi"}},
    {"metrics.prometheusRule": {"enabled": True, "labels": {"a": "b"}, "runbookPrefix": "https://wiki", "matchers": 'job="mt"'}},
    {"metrics.dashboards": {"enabled": True, "annotations": {"folder": "Dragoman"}}},
    {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"key": "a", "operator": "Exists"}], "topologySpread": []},
    {"affinity": {"podAntiAffinity": {}}, "priorityClassName": "high"},
    {"topologySpread": [{"topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule", "minDomains": 2}]},
    {"podLabels": {"a": "b"}, "podAnnotations": {"c": "d"}, "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
    {"extraEnvFrom": [{"secretRef": {"name": "more"}}], "extraInitContainers": [{"name": "first", "image": "busybox:1.37"}]},
    {"extraVolumes": [{"name": "a", "emptyDir": {}}], "extraVolumeMounts": [{"name": "a", "mountPath": "/a"}]},
    {"extraContainers": [{"name": "beside", "image": "busybox:1.37"}]},
]
OPTIONS += [{"grpcRoute": GATEWAY | {"kind": kind, "rules": [rule]}} for kind, rule, _ in ROUTES if kind != "HTTP"]
OPTIONS += [{"httpRoute": GATEWAY | {"rules": [rule]}} for kind, rule, _ in ROUTES if kind == "HTTP"]
ALL = OPTIONS + list({json.dumps(values): values for values, _ in FACTS if values}.values())
RANDOM = random.Random(7)
COMBINATIONS = [RANDOM.sample(ALL, 3) for _ in range(num_examples(60, of=600))]
# Custom resources: the fields of their specifications that must be there, and those that may.
SPECS = {
    "ServiceMonitor": ({"selector", "endpoints"}, set()),
    "PodMonitor": ({"selector", "podMetricsEndpoints"}, set()),
    "PrometheusRule": ({"groups"}, set()),
    "GRPCRoute": ({"parentRefs", "rules"}, {"hostnames"}),
    "HTTPRoute": ({"parentRefs", "rules"}, {"hostnames"}),
    "ScaledObject": (
        {"scaleTargetRef", "minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod", "advanced", "triggers"},
        {"fallback"},
    ),
}


@cache
def validator(kind: str, api: str, version: str) -> Any:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: make setup")
    utils = pytest.importorskip("kubernetes_validate.utils", reason="kubernetes-validate is not installed: make setup")
    from referencing import Registry, Resource

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
        assert item["metadata"]["namespace"] == "translation"
        assert len(item["metadata"]["name"]) <= 63 or item["kind"] == "ConfigMap"


VERSIONS = ("1.27", "1.30", "1.33", "1.37")


def test_job_of_the_manual_is_valid() -> None:
    (job,) = [content for content in manual_blocks() if content.get("kind") == "Job"]
    assert_valid(job, "1.37")


def test_options_alone_and_combined_become_valid_objects_or_are_refused(render: Render) -> None:
    num_refused = 0
    for number, chosen in enumerate([[values] for values in OPTIONS] + COMBINATIONS):
        version = VERSIONS[number % 4] if len(chosen) > 1 else "1.37"
        try:
            rendered = render({key: value for values in chosen for key, value in values.items()}, release="mt", version=version)
        except Refused:
            assert len(chosen) > 1, chosen
            num_refused += 1
            continue
        for item in rendered.objects:
            assert_valid(item, version)
        assert_names_fit(rendered)
    assert num_refused < len(COMBINATIONS) / 2
