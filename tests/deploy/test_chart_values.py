"""Values that the chart does not take: a typo must not pass in silence."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HTTP_ROUTE = {"enabled": True, "parentRefs": [{"name": "gateway"}]}


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"replicas": 3}, "replicas"),
        ({"replicaCount": "three"}, "replicaCount"),
        ({"replicaCount": -1}, "replicaCount"),
        ({"image": {"digest": "latest"}}, "digest"),
        ({"image": {"pullPolicy": "Sometimes"}}, "pullPolicy"),
        ({"config": {"max_slot": 1}}, "max_slot"),
        ({"config": {"max_slots": 0}}, "max_slots"),
        ({"config": {"max_slots": "many"}}, "max_slots"),
        ({"config": {"log_level": "loud"}}, "log_level"),
        ({"config": {"port": 1}}, "port"),
        ({"config": {"drain_seconds": 1}}, "drain_seconds"),
        ({"config": {"latency_buckets": ["a"]}}, "latency_buckets"),
        ({"models": {"source": "s3"}}, "source"),
        ({"models": {"source": "download", "download": {"archives": [{"url": "https://x/a"}]}}}, "sha256"),
        ({"models": {"source": "download", "download": {"archives": [{"url": "file:///a", "sha256": "0" * 64}]}}}, "url"),
        ({"models": {"source": "download", "download": {"archives": [{"url": "https://x/a", "sha256": "0"}]}}}, "sha256"),
        ({"models": {"source": "store", "store": {"addresses": [{"address": "/models"}]}}}, "address"),
        ({"models": {"source": "store", "store": {"addresses": [{"address": "ftp://models/a"}]}}}, "address"),
        ({"models": {"source": "store", "store": {"addresses": [{"address": "s3://"}]}}}, "address"),
        ({"models": {"source": "store", "store": {"addresses": [{"address": "s3://user:secret@models"}]}}}, "address"),
        ({"models": {"source": "store", "store": {"addresses": [{"address": "https://models.example/a?token=b"}]}}}, "address"),
        ({"models": {"source": "store", "store": {"addresses": [{"address": "oci://registry.example/en-de"}]}}}, "address"),
        ({"models": {"source": "store", "store": {"addresses": [{"address": "https://models.example/a.tar.gz"}]}}}, "sha256"),
        ({"models": {"source": "store", "store": {"addresses": ["s3://models"]}}}, "addresses"),
        ({"models": {"store": {"cacheGib": 0}}}, "cacheGib"),
        ({"models": {"store": {"env": [{"value": "a"}]}}}, "env"),
        ({"models": {"files": {"en de": {}}}}, "en de"),
        ({"models": {"files": {"en-de": {"version": {"latest": 1}}}}}, "version"),
        ({"models": {"files": {"en-de": {"versions": {"latest": 0}}}}}, "latest"),
        ({"models": {"files": {"en-de": {"versions": {"only": [3]}}}}}, "only"),
        ({"models": {"files": {"en-de": {"labels": {"stable": 3}}}}}, "stable"),
        ({"models": {"files": {"en-de": {"labels": {"my stable": "3"}}}}}, "my stable"),
        ({"models": {"files": {"en-de": {"weights": {"canary": 10}}}}}, "canary"),
        ({"models": {"files": {"en-de": {"settings": {"max_slotz": 1}}}}}, "max_slotz"),
        ({"models": {"files": {"en-de": {"settings": {"keep_loaded": "a while"}}}}}, "keep_loaded"),
        ({"models": {"files": {"en-de": {"settings": {"device": "gpu"}}}}}, "device"),
        ({"models": {"files": {"en-de": {"swap": {"mode": "now"}}}}}, "mode"),
        ({"models": {"signatures": {"keys": "a"}}}, "keys"),
        ({"config": {"models_poll_seconds": -1}}, "models_poll_seconds"),
        ({"config": {"model_files": "/models"}}, "model_files"),
        ({"config": {"require_signatures": "/keys"}}, "require_signatures"),
        ({"drain": {"seconds": -1}}, "seconds"),
        ({"probes": {"type": "exec"}}, "type"),
        ({"service": {"grpcPort": 70000}}, "grpcPort"),
        ({"service": {"type": "ExternalName"}}, "type"),
        ({"tls": {"enabled": "yes"}}, "enabled"),
        ({"gpu": {"count": 0}}, "count"),
        ({"gpu": {"enabled": True, "count": 2}}, "count"),
        ({"networkPolicy": {"enabled": True}}, "(?s)clients.*monitoring|monitoring.*clients"),
        ({"networkPolicy": {"enabled": True, "clients": [{"podSelector": {}}]}}, "monitoring"),
        ({"networkPolicy": {"enabled": True, "monitoring": [{"podSelector": {}}]}}, "clients"),
        ({"networkPolicy": {"enabled": True, "clients": [{}], "monitoring": [{"podSelector": {}}]}}, "clients"),
        # A key with nothing after it takes the chart's own list away, too.
        ({"networkPolicy": {"enabled": True, "clients": None, "monitoring": [{"podSelector": {}}]}}, "clients"),
        ({"networkPolicy": {"enabled": True, "clients": [{"podSelector": {}}], "monitoring": None}}, "monitoring"),
        ({"networkPolicy": {"clients": [{"namespaceSelector": {}, "podSelectr": {}}]}}, "podSelectr"),
        ({"gpu": {"enabled": True, "count": None}}, "count"),
        ({"strategy": {"rollingUpdate": {"maxSurge": "1"}}}, "maxSurge"),
        ({"models": {"source": "oci", "oci": {"reference": "registry.example/models:3"}}}, "reference"),
        ({"models": {"source": "oci", "oci": {"reference": "registry.example/models@sha256:abc"}}}, "reference"),
        ({"grpcRoute": {"rules": [{"backends": [{"weight": -1}]}]}}, "weight"),
        ({"grpcRoute": {"rules": [{"matches": [{"method": {"method": "Generate"}}]}]}}, "service"),
        ({"grpcRoute": {"rules": [{"match": []}]}}, "match"),
        ({"service": {"httpPort": 0}}, "httpPort"),
        ({"config": {"http_port": 8080}}, "http_port"),
        ({"httpRoute": {"rules": [{"backends": [{"weight": -1}]}]}}, "weight"),
        ({"httpRoute": {"rules": [{"matches": [{"path": {"type": "Exact", "value": "v1"}}]}]}}, "value"),
        ({"httpRoute": {"rules": [{"matches": [{"headers": [{"name": "a"}]}]}]}}, "value"),
        ({"httpRoute": {"rules": [{"timeouts": {"request": "soon"}}]}}, "request"),
        ({"httpRoute": {"kind": "HTTPRoute"}}, "kind"),
        ({"grpcRoute": {"kind": "HTTPRoute", "rules": [{"timeouts": {"request": "soon"}}]}}, "request"),
        ({"metrics": {"prometheusRule": {"runbookPrefix": "docs"}}}, "runbookPrefix"),
        ({"metrics": {"prometheusRule": {"matchers": "dragoman"}}}, "matchers"),
        ({"metrics": {"prometheusRule": {"matchers": 'job="a'}}}, "matchers"),
        ({"metrics": {"prometheusRule": {"matchers": 'job="a",'}}}, "matchers"),
        ({"metrics": {"prometheusRule": {"matchers": 'job="a"} or up{job="b"'}}}, "matchers"),
        ({"autoscaling": {"type": "vpa"}}, "type"),
        ({"autoscaling": {"queueSeconds": {"target": 0}}}, "target"),
        ({"autoscaling": {"cpu": {"targetUtilization": 150}}}, "targetUtilization"),
        ({"autoscaling": {"behavior": {"scaleUp": {"policies": [{"type": "Nodes", "value": 1, "periodSeconds": 1}]}}}}, "type"),
        ({"metrics": {"serviceMonitor": {"interval": "often"}}}, "interval"),
        ({"tmp": {"sizeLimit": "big"}}, "sizeLimit"),
        ({"topologySpread": [{"maxSkew": 1}]}, "topologyKey"),
        ({"podLabels": {"a": 1}}, "podLabels"),
        ({"extraEnv": [{"value": "1"}]}, "extraEnv"),
        # What a schema cannot say, the templates do.
        ({"models": {"source": "pvc"}}, r"models\.pvc\.claimName"),
        ({"models": {"source": "oci"}}, r"models\.oci\.reference"),
        ({"models": {"source": "download"}}, r"models\.download\.archives"),
        ({"models": {"source": "store"}}, r"models\.store\.addresses"),
        (
            {"models": {"source": "store", "store": {"addresses": [{"address": "http://models.example/a"}]}}},
            "must have a sha256 or be",
        ),
        ({"models": {"signatures": {"configMapName": "a", "secretName": "b"}}}, "not both"),
        (
            {"models": {"files": {"en-de": {"versions": {"latest": 1, "only": ["3"]}}}}},
            "files.en-de.versions: latest and only are both",
        ),
        (
            {"models": {"files": {"en-de": {"weights": {"3": 0.7, "4": 0.7}}}}},
            r"files.en-de.weights: are 1.4 together, more than 1",
        ),
        ({"tls": {"enabled": True}}, r"tls\.secretName"),
        ({"tls": {"clientCA": {"secretName": "a"}}}, r"needs tls\.enabled"),
        ({"metrics": {"auth": {"secretName": "A B"}}}, "secretName"),
        ({"metrics": {"tls": {"enabled": True}}}, r"metrics\.tls\.secretName"),
        ({"config": {"metrics_host": "127.0.0.1"}, "probes": {"type": "http"}}, "the kubelet cannot probe"),
        ({"config": {"metrics_host": "localhost"}, "metrics": {"podMonitor": {"enabled": True}}}, "nobody can scrape"),
        ({"metrics": {"serviceMonitor": {"enabled": True}, "podMonitor": {"enabled": True}}}, "counted twice"),
        ({"grpcRoute": {"enabled": True}}, r"grpcRoute\.parentRefs"),
        (
            {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "a"}], "rules": [{"timeouts": {"request": "10s"}}]}},
            "a GRPCRoute has no timeouts",
        ),
        (
            {
                "grpcRoute": {
                    "enabled": True,
                    "parentRefs": [{"name": "a"}],
                    "rules": [{"backends": [{"weight": 95}, {"weight": 5}]}],
                }
            },
            "has the backend translation/dragoman:8500 twice",
        ),
        (
            {"grpcRoute": {"enabled": True, "parentRefs": [{"name": "a"}], "rules": [{"backends": [{"weight": 0}]}]}},
            "weight 0 answers nobody",
        ),
        ({"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": 0}}}, "nothing could ever be replaced"),
        ({"strategy": {"rollingUpdate": {"maxSurge": 0, "maxUnavailable": "0%"}}}, "nothing could ever be replaced"),
        (
            {"gpu": {"enabled": True, "resources": {"requests": None}}, "autoscaling": {"type": "hpa", "cpu": {"enabled": True}}},
            r"autoscaling\.cpu: needs gpu\.resources\.requests\.cpu",
        ),
        ({"service": {"grpcPort": 8501}}, "are the same"),
        ({"service": {"httpPort": 8500}}, "httpPort is that of gRPC or of the metrics"),
        ({"service": {"httpPort": 8501}}, "httpPort is that of gRPC or of the metrics"),
        ({"service": {"httpPort": 8501}, "config": {"http_host": "localhost"}}, "httpPort is that of gRPC or of the metrics"),
        ({"httpRoute": {"enabled": True}}, r"httpRoute\.parentRefs"),
        ({"httpRoute": HTTP_ROUTE, "config": {"http": False}}, "httpRoute: nobody outside of the pod reaches HTTP"),
        ({"httpRoute": HTTP_ROUTE, "config": {"http_host": "127.0.0.1"}}, "httpRoute: nobody outside of the pod reaches HTTP"),
        ({"httpRoute": HTTP_ROUTE | {"rules": [{"backends": [{"weight": 0}]}]}}, "httpRoute.rules: .* weight 0 answers nobody"),
        (
            {"httpRoute": HTTP_ROUTE | {"rules": [{"backends": [{"weight": 95}, {"weight": 5}]}]}},
            "httpRoute.rules: .* has the backend translation/dragoman:8080 twice",
        ),
        ({"autoscaling": {"type": "hpa", "minReplicas": 11}}, "minReplicas is more than maxReplicas"),
        ({"autoscaling": {"type": "keda"}}, "serverAddress"),
        (
            {
                "autoscaling": {
                    "type": "hpa",
                    "queueSeconds": {"enabled": False},
                    "requestsWaiting": {"enabled": False},
                    "slotsInUse": {"enabled": False},
                    "cpu": {"enabled": False},
                }
            },
            "enable queueSeconds, requestsWaiting, slotsInUse or cpu",
        ),
        ({"podDisruptionBudget": {"minAvailable": 1}}, "set minAvailable or maxUnavailable"),
        ({"podDisruptionBudget": {"maxUnavailable": None}}, "set minAvailable or maxUnavailable"),
    ],
)
def test_a_wrong_value_is_refused_and_named(
    render: Callable[..., Any], refused: type[Exception], values: dict[str, Any], reason: str
) -> None:
    with pytest.raises(refused, match=reason):
        render(values)


def test_the_manuals_examples_are_taken(render: Callable[..., Any], root: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
    known = json.loads((root / "deploy/helm/dragoman/values.schema.json").read_text(encoding="utf-8"))["properties"]
    blocks = re.findall(r"```yaml\n(.*?)```", (root / "docs/kubernetes.md").read_text(encoding="utf-8"), re.DOTALL)
    examples = [values for values in map(yaml.safe_load, blocks) if values.keys() <= known.keys()]
    assert {key for values in examples for key in values} >= {
        "models",
        "grpcRoute",
        "httpRoute",
        "tls",
        "gpu",
        "networkPolicy",
        "extraInitContainers",
    }
    for values in examples:
        assert render(values).all("Deployment")


def test_a_cluster_that_is_too_old_is_refused(render: Callable[..., Any], refused: type[Exception]) -> None:
    with pytest.raises(refused, match="kubeVersion"):
        render(version="1.26")


def test_a_chart_without_rules_or_dashboards_says_so(helm: Any, refused: type[Exception]) -> None:
    for folder, values in (("rules", {"prometheusRule": {"enabled": True}}), ("dashboards", {"dashboards": {"enabled": True}})):
        files = {path: path.read_bytes() for path in (helm.chart / "files" / folder).iterdir()}
        try:
            for path in files:
                path.unlink()
            with pytest.raises(refused, match=f"files/{folder}"):
                helm.render({"metrics": values})
        finally:
            for path, content in files.items():
                path.write_bytes(content)
