"""Options of the chart alone and in random combinations, against the schemas of Kubernetes; and values that it refuses by name."""

import json
import random
import re
from functools import cache
from typing import Any

import pytest

from tests.deploy.conftest import CHART, Refused, Render, Rendered, Values, manual_blocks
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
    {"config": {"max_connection_age_seconds": None, "num_threads": 4, "keepalive_seconds": 0.25}},
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


# Refused values: each is named, so that a typo does not pass in silence.

PEER = [{"podSelector": {}}]
TWICE = [{"backends": [{"weight": 95}, {"weight": 5}]}]
# A value that the schema refuses, which names the last part of its path, or of that after the slash.
SCHEMA: list[tuple[str, Any]] = [
    ("replicas", 3),
    ("replicaCount", "three"),
    ("image.pullPolicy", "Sometimes"),
    ("config.max_slots", 0),
    ("config.http_port", 8080),
    ("models.download.archives/sha256", [{"url": "https://x/a", "sha256": "0"}]),
    ("models.download.archives/url", [{"url": "file:///a", "sha256": SHA}]),
    ("models.oci.reference", "registry.example/models:3"),
    *(
        ("models.store.addresses/address", [{"address": address}])
        for address in ("/models", "ftp://models/a", "s3://", "s3://user:secret@models", "https://models.example/a?token=b")
    ),
    ("models.store.addresses/address", [{"address": "oci://registry.example/en-de"}]),
    ("models.store.addresses/sha256", [{"address": "https://models.example/a.tar.gz"}]),
    ("models.files.en de", {}),
    ("models.files.en-de.versions.latest", 0),
    ("models.files.en-de.labels.my stable", "3"),
    ("models.files.en-de.settings.max_slotz", 1),
    ("models.signatures.keys", "a"),
    ("service.httpPort", 0),
    ("strategy.rollingUpdate.maxSurge", "1"),
    ("grpcRoute.rules/weight", [{"backends": [{"weight": -1}]}]),
    ("grpcRoute.rules/service", [{"matches": [{"method": {"method": "Generate"}}]}]),
    ("httpRoute.rules/value", [{"matches": [{"path": {"type": "Exact", "value": "v1"}}]}]),
    ("metrics.prometheusRule.runbookPrefix", "docs"),
    *(("metrics.prometheusRule.matchers", text) for text in ("dragoman", 'job="a', 'job="a",', 'job="a"} or up{job="b"')),
    ("autoscaling.type", "vpa"),
    ("autoscaling.behavior.scaleUp.policies/type", [{"type": "Nodes", "value": 1, "periodSeconds": 1}]),
]
# Combinations that the templates refuse, and a part of the reason.
TEMPLATES: list[tuple[Values, str]] = [
    ({"networkPolicy.enabled": True}, "clients"),
    ({"networkPolicy": {"enabled": True, "clients": PEER}}, "monitoring"),
    ({"networkPolicy": {"enabled": True, "clients": [{}], "monitoring": PEER}}, "clients"),
    (
        {"networkPolicy": {"enabled": True, "clients": PEER, "monitoring": PEER}, "models.source": "store"}
        | {"models.store.addresses": [{"address": "s3://models"}]},
        "networkPolicy.egress",
    ),
    ({"gpu": {"enabled": True, "count": 2}}, "count"),
    ({"models.source": "pvc"}, r"models\.pvc\.claimName"),
    ({"models.source": "oci"}, r"models\.oci\.reference"),
    ({"models.source": "download"}, r"models\.download\.archives"),
    ({"models.source": "store"}, r"models\.store\.addresses"),
    ({"models.source": "store", "models.store.addresses": [{"address": "http://models.example/a"}]}, "must have a sha256 or be"),
    ({"models.signatures": {"configMapName": "a", "secretName": "b"}}, "not both"),
    ({"models.files.en-de.versions": {"latest": 1, "only": ["3"]}}, "files.en-de.versions: latest and only are both"),
    ({"models.files.en-de.weights": {"3": 0.7, "4": 0.7}}, r"files.en-de.weights: are 1.4 together, more than 1"),
    ({"drain.terminationGracePeriodSeconds": 54}, "54 is less than preStopSeconds"),
    ({"tls.enabled": True}, r"tls\.secretName"),
    ({"tls.clientCA.secretName": "a"}, r"needs tls\.enabled"),
    ({"tls": {"enabled": True, "secretName": "a"}, "probes.type": "grpc"}, "gRPC probes speak no TLS"),
    ({"metrics.tls.enabled": True}, r"metrics\.tls\.secretName"),
    ({"config.host": "127.0.0.1", "probes.type": "http"}, "the kubelet cannot probe"),
    ({"config.metrics_host": "localhost", "metrics.podMonitor.enabled": True}, "nobody can scrape"),
    ({"metrics.serviceMonitor.enabled": True, "metrics.podMonitor.enabled": True}, "counted twice"),
    ({"metrics.serviceMonitor.enabled": True, "service.type": "LoadBalancer"}, "metrics.serviceMonitor"),
    ({"strategy.rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0%"}}, "nothing could ever be replaced"),
    ({"service.grpcPort": 8501}, "are the same"),
    ({"service.httpPort": 8500}, "httpPort is that of gRPC or of the metrics"),
    ({"service.httpPort": 8501, "config.http_host": "localhost"}, "httpPort is that of gRPC or of the metrics"),
    ({"grpcRoute.enabled": True}, r"grpcRoute\.parentRefs"),
    ({"httpRoute.enabled": True}, r"httpRoute\.parentRefs"),
    ({"grpcRoute": GATEWAY | {"rules": [{"timeouts": {"request": "10s"}}]}}, r"no timeouts; use grpcRoute\.kind: HTTPRoute"),
    ({"grpcRoute": GATEWAY | {"rules": TWICE}}, "has the backend translation/dragoman:8500 twice"),
    ({"grpcRoute": GATEWAY | {"rules": [{"backends": [{"weight": 0}]}]}}, "weight 0 answers nobody"),
    ({"httpRoute": GATEWAY, "config.http": False}, "httpRoute: nobody outside of the pod reaches HTTP"),
    ({"resources.requests": None, "autoscaling.type": "hpa"}, r"autoscaling\.cpu: needs resources\.requests\.cpu"),
    ({"autoscaling": {"type": "hpa", "minReplicas": 11}}, "minReplicas is more than maxReplicas"),
    ({"autoscaling.type": "keda"}, "serverAddress"),
    (
        {"autoscaling.type": "hpa"}
        | {f"autoscaling.{name}.enabled": False for name in ("queueSeconds", "requestsWaiting", "slotsInUse", "cpu")},
        "enable queueSeconds, requestsWaiting, slotsInUse or cpu",
    ),
    ({"podDisruptionBudget.maxUnavailable": None}, "set minAvailable or maxUnavailable"),
    ({"config": {"warmup": False}}, "config.warmup is gone: a model is always warmed up before it is ready"),
]


NAMED = [({path.split("/")[0]: value}, re.split(r"[./]", path)[-1]) for path, value in SCHEMA]


@pytest.mark.parametrize(("values", "reason"), [*NAMED, *TEMPLATES])
def test_wrong_value_is_refused_and_named(render: Render, values: Values, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        render(values)


def test_examples_of_the_manual_are_accepted(render: Render) -> None:
    known = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"].keys()
    examples = [values for values in manual_blocks() if values.keys() <= known]
    names = {key for values in examples for key in values}
    assert names >= {"models", "grpcRoute", "httpRoute", "tls", "gpu", "networkPolicy", "extraInitContainers"}
    assert all(render(values).all("Deployment") for values in examples)
