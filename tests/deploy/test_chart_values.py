"""Values that the chart refuses: each is named, so that a typo does not pass in silence."""

import json
import re
from typing import Any

import pytest

from tests.deploy.conftest import CHART, Refused, Render, Values, manual_blocks

ROUTE = {"enabled": True, "parentRefs": [{"name": "gateway"}]}
PEER = [{"podSelector": {}}]
SHA = "0" * 64
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
    ({"config.metrics_host": "127.0.0.1", "probes.type": "http"}, "the kubelet cannot probe"),
    ({"config.metrics_host": "localhost", "metrics.podMonitor.enabled": True}, "nobody can scrape"),
    ({"metrics.serviceMonitor.enabled": True, "metrics.podMonitor.enabled": True}, "counted twice"),
    ({"metrics.serviceMonitor.enabled": True, "service.type": "LoadBalancer"}, "metrics.serviceMonitor"),
    ({"strategy.rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0%"}}, "nothing could ever be replaced"),
    ({"service.grpcPort": 8501}, "are the same"),
    ({"service.httpPort": 8500}, "httpPort is that of gRPC or of the metrics"),
    ({"service.httpPort": 8501, "config.http_host": "localhost"}, "httpPort is that of gRPC or of the metrics"),
    ({"grpcRoute.enabled": True}, r"grpcRoute\.parentRefs"),
    ({"httpRoute.enabled": True}, r"httpRoute\.parentRefs"),
    ({"grpcRoute": ROUTE | {"rules": [{"timeouts": {"request": "10s"}}]}}, r"no timeouts; use grpcRoute\.kind: HTTPRoute"),
    ({"grpcRoute": ROUTE | {"rules": TWICE}}, "has the backend translation/dragoman:8500 twice"),
    ({"grpcRoute": ROUTE | {"rules": [{"backends": [{"weight": 0}]}]}}, "weight 0 answers nobody"),
    ({"httpRoute": ROUTE, "config.http": False}, "httpRoute: nobody outside of the pod reaches HTTP"),
    ({"resources.requests": None, "autoscaling.type": "hpa"}, r"autoscaling\.cpu: needs resources\.requests\.cpu"),
    ({"autoscaling": {"type": "hpa", "minReplicas": 11}}, "minReplicas is more than maxReplicas"),
    ({"autoscaling.type": "keda"}, "serverAddress"),
    (
        {"autoscaling.type": "hpa"}
        | {f"autoscaling.{name}.enabled": False for name in ("queueSeconds", "requestsWaiting", "slotsInUse", "cpu")},
        "enable queueSeconds, requestsWaiting, slotsInUse or cpu",
    ),
    ({"podDisruptionBudget.maxUnavailable": None}, "set minAvailable or maxUnavailable"),
]


NAMED = [({path.split("/")[0]: value}, re.split(r"[./]", path)[-1]) for path, value in SCHEMA]


@pytest.mark.parametrize(("values", "reason"), [*NAMED, *TEMPLATES])
def test_wrong_value_is_refused_and_named(render: Render, values: Values, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        render(values)


def test_cluster_without_image_volumes_is_refused(render: Render) -> None:
    reference = f"registry.example/models:3@sha256:{SHA}"
    with pytest.raises(Refused, match="image volumes"):
        render({"models": {"source": "oci", "oci": {"reference": reference}}}, version="1.30")


def test_examples_of_the_manual_are_accepted(render: Render) -> None:
    known = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"].keys()
    examples = [values for values in manual_blocks() if values.keys() <= known]
    names = {key for values in examples for key in values}
    assert names >= {"models", "grpcRoute", "httpRoute", "tls", "gpu", "networkPolicy", "extraInitContainers"}
    assert all(render(values).all("Deployment") for values in examples)
