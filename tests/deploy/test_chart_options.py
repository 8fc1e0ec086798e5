"""Many combinations of the chart's options, each pair of choices at least once, against the schemas of Kubernetes."""

import itertools
import json
import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import pytest

from tests.examples import num_examples

SHA = "ab" * 32
PEER = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "apps"}}, "podSelector": {"matchLabels": {"a": "b"}}}
DNS = {"to": [{"namespaceSelector": {}}], "ports": [{"port": 53, "protocol": "UDP"}]}
MONITOR = {"enabled": True, "labels": {"release": "prometheus"}, "relabelings": [{"action": "labeldrop", "regex": "pod_ip"}]}
CANARY = [
    {"matches": [{"headers": [{"name": "canary", "value": "yes"}]}], "backends": [{"name": "canary"}]},
    {"matches": [{"method": {"service": "dragoman.v1.Generation"}}], "backends": [{"weight": 9}, {"name": "canary", "weight": 1}]},
]
HTTP_CANARY = [
    {"matches": [{"path": {"type": "Exact", "value": "/v1/score"}}], "backends": [{"name": "canary"}]},
    {"backends": [{"weight": 9}, {"name": "canary", "weight": 1}], "timeouts": {"request": "0s"}},
]
# Each option: its choices, of which the first is the chart's own default. Choices of different options touch different values.
OPTIONS: dict[str, list[dict[str, Any]]] = {
    "release": [{}, {"fullnameOverride": "translator"}, {"nameOverride": "mt", "commonLabels": {"team": "language"}}],
    "replicas": [{}, {"replicaCount": 1}, {"replicaCount": 0}, {"replicaCount": 5, "minReadySeconds": 10}],
    "strategy": [
        {},
        {"strategy": {"type": "Recreate"}},
        {"strategy": {"type": "Recreate", "rollingUpdate": None}},
        {"strategy": {"rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 1}}},
    ],
    "image": [
        {},
        {"image": {"repository": "registry.example/mt/dragoman", "tag": "1.2.3", "pullPolicy": "Always"}},
        {"image": {"digest": f"sha256:{SHA}"}, "imagePullSecrets": [{"name": "registry"}]},
    ],
    "models": [
        {},
        {"models": {"source": "pvc", "pvc": {"claimName": "models"}}},
        {"models": {"source": "pvc", "pvc": {"claimName": "models", "subPath": "a/b"}}},
        {"models": {"source": "oci", "oci": {"reference": f"registry.example/models:3@sha256:{SHA}", "pullPolicy": "Always"}}},
        {"models": {"source": "download", "download": {"archives": [{"url": "https://models.example/a.tar.gz", "sha256": SHA}]}}},
        {
            "models": {
                "source": "download",
                "download": {
                    "archives": [{"url": "https://models.example/a.tar", "sha256": SHA}],
                    "image": "python:3.11-slim",
                    "tokenSecret": {"name": "download"},
                },
            }
        },
        {"models": {"source": "store", "store": {"addresses": [{"address": "s3://models/production"}]}}},
        {
            "models": {
                "source": "store",
                "store": {
                    "addresses": [
                        {"address": f"oci://registry.example/en-de@sha256:{SHA}"},
                        {"address": "https://models.example/a.tar.gz", "sha256": SHA},
                    ],
                    "image": "dragoman:pull",
                    "claimName": "models",
                    "secretName": "registry",
                    "env": [{"name": "DOCKER_CONFIG", "value": "/etc/dragoman/store"}],
                    "envFrom": [{"secretRef": {"name": "store"}}],
                    "cacheGib": 2.5,
                },
            }
        },
    ],
    "policy": [
        {},
        {"models": {"files": {"en-de": {"versions": {"latest": 2}, "weights": {"4": 0.1}}, "en-fr": None}}},
        {"models": {"signatures": {"configMapName": "keys"}}},
        {"models": {"signatures": {"secretName": "keys"}, "files": {"en-de": {"labels": {"stable": "3"}}}}},
    ],
    "config": [
        {},
        {"config": {"max_message_bytes": 16777216, "warmup": False, "log_level": "debug", "latency_buckets": [0.001, 0.5, 10]}},
        {"config": {"ready_when": "en-de,en-fr", "max_slots": 128, "replicas": 2}},
        {"config": {"max_connection_age_seconds": None, "num_threads": 4, "restart_backoff_initial_seconds": 0.25}},
    ],
    "drain": [
        {},
        {"drain": {"preStopSeconds": 0, "seconds": 2.5}},
        {"drain": {"seconds": 600, "terminationGracePeriodSeconds": 900}},
    ],
    "probes": [{}, {"probes": {"type": "http"}}, {"probes": {"type": "grpc", "startup": {"failureThreshold": 720}}}],
    "service": [
        {},
        {"service": {"type": "LoadBalancer", "annotations": {"a": "b"}}},
        {"service": {"type": "NodePort", "headless": {"enabled": False}}},
        {
            "service": {
                "grpcPort": 9000,
                "httpPort": 9002,
                "metricsPort": 9001,
                "appProtocol": "grpc",
                "headless": {"annotations": {"a": "b"}},
            }
        },
    ],
    "route": [
        {},
        {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["mt.example"]}},
        {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "rules": CANARY}},
        {
            "grpcRoute": {
                "enabled": True,
                "kind": "HTTPRoute",
                "parentRefs": [{"name": "gateway"}],
                "rules": [rule | {"timeouts": {"request": "0s"}} for rule in CANARY],
            }
        },
    ],
    "http": [{}, {"config": {"http": False}}, {"config": {"http_host": "127.0.0.1"}}],
    "http route": [
        {},
        {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "hostnames": ["mt.example"]}},
        {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}], "rules": HTTP_CANARY}},
    ],
    "tls": [
        {},
        {"tls": {"enabled": True, "secretName": "dragoman-tls"}},
        {"tls": {"enabled": True, "secretName": "dragoman-tls", "clientCA": {"secretName": "clients"}}},
    ],
    "auth": [{}, {"auth": {"secretName": "dragoman-tokens"}}],
    "resources": [{}, {"resources": {"requests": {"cpu": 4, "memory": "4Gi"}}}, {"resources": {"requests": None, "limits": None}}],
    "gpu": [
        {},
        {"gpu": {"enabled": True}},
        {"gpu": {"enabled": True, "runtimeClassName": "nvidia", "nodeSelector": {"accelerator": "h200"}, "tolerations": []}},
        {"gpu": {"enabled": True, "resources": {"requests": None, "limits": None}}},
    ],
    "autoscaling": [
        {},
        {"autoscaling": {"type": "hpa"}},
        {"autoscaling": {"type": "hpa", "cpu": {"enabled": True}, "slotsInUse": {"target": 12.5}}},
        {"autoscaling": {"type": "hpa", "minReplicas": 1, "queueSeconds": {"target": 2}, "cpu": {"enabled": False}}},
        {"autoscaling": {"type": "keda", "keda": {"serverAddress": "http://prometheus:9090", "authenticationRef": "prometheus"}}},
        {
            "autoscaling": {"type": "keda"}
            | {name: {"enabled": False} for name in ("queueSeconds", "requestsWaiting", "slotsInUse")}
        },
    ],
    "budget": [
        {},
        {"podDisruptionBudget": {"minAvailable": "50%", "maxUnavailable": None}},
        {"podDisruptionBudget": {"enabled": False}},
    ],
    "network": [
        {},
        {"networkPolicy": {"enabled": True}},
        {"networkPolicy": {"enabled": True, "clients": [PEER], "monitoring": [PEER]}},
        {"networkPolicy": {"enabled": True, "clients": [PEER], "monitoring": [PEER], "egress": [DNS]}},
    ],
    "account": [
        {},
        {"serviceAccount": {"create": False}},
        {"serviceAccount": {"name": "mt", "annotations": {"eks.amazonaws.com/role-arn": "arn"}}},
    ],
    "tmp": [{}, {"tmp": {"medium": "Memory", "sizeLimit": "64Mi"}}],
    "weights": [{}, {"weightsCache": {"enabled": True, "sizeLimit": "9Gi"}}],
    "metrics": [{}, {"metrics": {"serviceMonitor": MONITOR}}, {"metrics": {"podMonitor": MONITOR}}],
    "metrics-port": [
        {},
        {"metrics": {"auth": {"secretName": "scraper", "scrapeKey": "newest"}}},
        {"metrics": {"auth": {"secretName": "scraper"}, "tls": {"enabled": True, "secretName": "metrics-tls"}}},
    ],
    "rules": [
        {},
        {"metrics": {"prometheusRule": {"enabled": True, "labels": {"release": "prometheus"}}}},
        {"metrics": {"prometheusRule": {"enabled": True, "runbookPrefix": "https://wiki.example", "matchers": 'job="mt"'}}},
    ],
    "dashboards": [{}, {"metrics": {"dashboards": {"enabled": True, "annotations": {"folder": "Dragoman"}}}}],
    "placement": [
        {},
        {"nodeSelector": {"pool": "cpu"}, "tolerations": [{"key": "a", "operator": "Exists"}], "topologySpread": []},
        {"affinity": {"podAntiAffinity": {}}, "priorityClassName": "high"},
        {"topologySpread": [{"topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule", "minDomains": 2}]},
    ],
    "extras": [
        {},
        {"podLabels": {"a": "b"}, "podAnnotations": {"c": "d"}, "extraEnv": [{"name": "OMP_NUM_THREADS", "value": "1"}]},
        {
            "extraEnvFrom": [{"secretRef": {"name": "more"}}],
            "extraVolumes": [{"name": "more", "emptyDir": {}}],
            "extraVolumeMounts": [{"name": "more", "mountPath": "/more"}],
            "extraInitContainers": [{"name": "first", "image": "busybox:1.37"}],
            "extraContainers": [{"name": "beside", "image": "busybox:1.37"}],
        },
    ],
}
VERSIONS = ("1.27", "1.30", "1.33", "1.37")
NUM_RANDOM = num_examples(10, of=60)
NUM_PARTS = 8
# Our own idea of the custom resources: what must be there, and nothing that is not theirs.
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


def merged(into: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """Return both, the second before the first, as Helm merges them."""
    result = dict(into)
    for key, value in values.items():
        both = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if both else value
    return result


def num_new(left: set[tuple[int, ...]], row: dict[int, int], place: int, choice: int) -> int:
    """Return how many of the pairs that are left a choice would make with what a row already has."""
    return sum((*min((place, choice), other), *max((place, choice), other)) in left for other in row.items())


def pairwise(sizes: list[int], draw: random.Random) -> list[tuple[int, ...]]:
    """Return rows of choices in which each pair of choices of each two options stands together at least once."""
    left = {(i, a, j, b) for i, j in itertools.combinations(range(len(sizes)), 2) for a in range(sizes[i]) for b in range(sizes[j])}
    rows = []
    while left:
        i, a, j, b = min(left)
        row = {i: a, j: b}
        for place in draw.sample(range(len(sizes)), len(sizes)):
            if place not in row:
                row[place] = max(range(sizes[place]), key=partial(num_new, left, row, place))
        rows.append(tuple(row[place] for place in range(len(sizes))))
        left -= {(*low, *high) for low, high in itertools.combinations(enumerate(rows[-1]), 2)}
    return rows


def combinations() -> list[tuple[int, ...]]:
    """Return rows of choices, that of Kubernetes first: each option alone, each pair, and some at random; always the same."""
    draw = random.Random(7)
    sizes = [len(VERSIONS), *(len(choices) for choices in OPTIONS.values())]
    alone = [
        (len(VERSIONS) - 1, *(choice if place == option else 0 for place in range(len(OPTIONS))))
        for option, size in enumerate(sizes[1:])
        for choice in range(1, size)
    ]
    drawn = [tuple(draw.randrange(size) for size in sizes) for _ in range(NUM_RANDOM)]
    rows = dict.fromkeys([*alone, *pairwise(sizes, draw), *drawn])
    return list(dict.fromkeys(row for drawn in rows for row in (drawn, mended(drawn))))


def mended(row: tuple[int, ...]) -> tuple[int, ...]:
    """Return a row that is not refused: with the default, or the newest Kubernetes, where choices cannot go together."""
    for option in ("http", "network", "probes", "metrics", "resources", "gpu", "autoscaling"):
        if reason_to_refuse(row) is not None:
            place = 1 + list(OPTIONS).index(option)
            row = (*row[:place], 0, *row[place + 1 :])
    return row if reason_to_refuse(row) is None else (len(VERSIONS) - 1, *row[1:])


def values_of(row: tuple[int, ...]) -> dict[str, Any]:
    """Return the values that a row stands for."""
    values: dict[str, Any] = {}
    for choices, choice in zip(OPTIONS.values(), row[1:], strict=True):
        values = merged(values, choices[choice])
    return values


def reason_to_refuse(row: tuple[int, ...]) -> str | None:
    """Return what Helm must say of options that cannot go together; None for those that can."""
    values, version = values_of(row), VERSIONS[row[0]]
    source, is_tls = values.get("models", {}).get("source"), "tls" in values
    scaling, network = values.get("autoscaling", {}), values.get("networkPolicy", {})
    service_type = values.get("service", {}).get("type", "ClusterIP")
    gpu, given = values.get("gpu", {}), values.get("autoscaling", {}).get("cpu", {}).get("enabled")
    by_cpu = bool(scaling.get("type")) and (given if given is not None else not gpu)
    requests = (gpu if gpu else values).get("resources", {}).get("requests", "")
    by_queue = any(scaling.get(name, {}).get("enabled", True) for name in ("queueSeconds", "requestsWaiting", "slotsInUse"))
    reasons = {
        "clients|monitoring": bool(network) and not network.get("clients"),
        "image volumes": source == "oci" and version in ("1.27", "1.30"),
        "networkPolicy.egress": source in ("download", "store") and bool(network) and not network.get("egress"),
        "gRPC probes speak no TLS": is_tls and values.get("probes", {}).get("type") == "grpc",
        "metrics.serviceMonitor": "serviceMonitor" in values.get("metrics", {}) and service_type != "ClusterIP",
        "httpRoute: nobody": "httpRoute" in values and not {"http", "http_host"}.isdisjoint(values.get("config", {})),
        "autoscaling.cpu": by_cpu and requests is None,
        "autoscaling: enable": bool(scaling.get("type")) and not by_cpu and not by_queue,
    }
    return next((text for text, holds in reasons.items() if holds), None)


@cache
def validator(kind: str, api: str, version: str) -> Any:
    import jsonschema
    from kubernetes_validate.utils import schema_contents
    from referencing import Registry, Resource

    group, _, number = api.rpartition("/")
    name = "-".join(filter(None, (kind.lower(), group.partition(".")[0], number)))
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    schema = schema_contents(f"{folder}/{name}.json", version)
    definitions = Resource.from_contents(schema_contents(f"{folder}/_definitions.json", version))
    registry = definitions @ (Resource.from_contents(schema) @ Registry())
    return jsonschema.Draft202012Validator(schema, registry=registry)


def assert_valid(item: dict[str, Any], version: str) -> None:
    """Check an object against the schema of its kind, strictly: a field that Kubernetes does not know is an error."""
    if item["kind"] in SPECS:
        needed, possible = SPECS[item["kind"]]
        assert needed <= item["spec"].keys() <= needed | possible, item["kind"]
        return
    errors = [
        f"{error.json_path}: {error.message}" for error in validator(item["kind"], item["apiVersion"], version).iter_errors(item)
    ]
    assert not errors, (item["kind"], errors)


def assert_names_fit(rendered: Any) -> None:
    """Check what schemas cannot: that volumes, mounts, ports, labels and Services of one release fit together."""
    pod = rendered.pod
    deployment = rendered.one("Deployment")
    volumes = [volume["name"] for volume in pod["volumes"]]
    assert len(volumes) == len(set(volumes))
    for container in [*pod["containers"], *pod.get("initContainers", [])]:
        mounts = container.get("volumeMounts", [])
        assert {mount["name"] for mount in mounts} <= set(volumes)
        assert len({mount["mountPath"] for mount in mounts}) == len(mounts)
        names = [variable["name"] for variable in container.get("env", [])]
        assert len(names) == len(set(names)), names
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    ports = {port["name"] for port in rendered.container["ports"]}
    for service in rendered.all("Service"):
        assert service["spec"]["selector"].items() <= labels.items()
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    accounts = [account["metadata"]["name"] for account in rendered.all("ServiceAccount")]
    assert pod["serviceAccountName"] in accounts or not accounts
    for item in rendered.objects:
        assert item["metadata"]["namespace"] == "translation"
        assert len(item["metadata"]["name"]) <= 63 or item["kind"] == "ConfigMap"


COMBINATIONS = combinations()


def test_each_pair_of_choices_is_tried_and_more_than_a_hundred_combinations_are_good() -> None:
    assert sum(reason_to_refuse(row) is None for row in COMBINATIONS) > 100
    sizes = [len(VERSIONS), *map(len, OPTIONS.values())]
    seen = {pair for row in COMBINATIONS for pair in itertools.combinations(enumerate(row), 2)}
    assert len(seen) == sum(a * b for a, b in itertools.combinations(sizes, 2))


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_options_in_any_combination_are_valid_or_refused_with_a_reason(
    render: Callable[..., Any], refused: type[Exception], part: int
) -> None:
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: make setup")
    for row in COMBINATIONS[part::NUM_PARTS]:
        values, version, reason = values_of(row), VERSIONS[row[0]], reason_to_refuse(row)
        if reason is not None:
            with pytest.raises(refused, match=reason):
                render(values, version=version)
            continue
        rendered = render(values, release="mt", version=version)
        for item in rendered.objects:
            assert_valid(item, version)
        assert_names_fit(rendered)
        created = {(item["kind"], item["metadata"]["name"]) for item in rendered.created}
        assert created == {(item["kind"], item["metadata"]["name"]) for item in rendered.objects}, json.dumps(values)


def test_the_schemas_find_a_field_that_kubernetes_does_not_know(render: Callable[..., Any]) -> None:
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: make setup")
    rendered = render({"extraEnv": [{"name": "A", "valeu": "1"}]})
    with pytest.raises(AssertionError, match="valeu"):
        assert_valid(rendered.one("Deployment"), "1.37")
    rendered = render({"podSecurityContext": {"runAsUser": "root"}})
    with pytest.raises(AssertionError, match="runAsUser"):
        assert_valid(rendered.one("Deployment"), "1.37")
