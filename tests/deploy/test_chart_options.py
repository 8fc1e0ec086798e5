"""Options of the chart against the schemas of Kubernetes, and values that it refuses by name."""

import itertools
import json
import re
from typing import Any

import pytest

from tests.deploy.conftest import CHART, NEWEST, Refused, Render, Values, assert_valid, manual_blocks, program
from tests.deploy.test_chart import CLAIM, GATEWAY, GPU, HPA, KEDA, OWN_METRICS, PEERS, SHA, TLS

DNS = {"to": [{"namespaceSelector": {}}], "ports": [{"port": 53, "protocol": "UDP"}]}
RELABELED = {"relabelings": [{"action": "labeldrop", "regex": "pod_ip"}]}
MONITOR = {"kind": "ServiceMonitor", "labels": {"release": "prometheus"}, "endpoint": RELABELED}
ARCHIVE = {"address": "https://models.example/a.tar.gz", "sha256": SHA}
STORE = {"addresses": [{"address": f"oci://models.example/a@sha256:{SHA}"}], "claimName": "models", "secretName": "registry"}
STORE |= {"containerSpec": {"image": "dragoman:pull", "env": [{"name": "A", "value": "b"}], "resources": None}}
# Values whose effects are not tested one by one, in sets that go together.
OPTIONS: dict[str, Values] = {
    "names": {"nameOverride": "mt", "fullnameOverride": "translator", "commonLabels": {"team": "language"}, "replicaCount": 0}
    | {"image": {"repository": "registry.example/mt/dragoman", "digest": f"sha256:{SHA}", "pullPolicy": "Always"}}
    | {"imagePullSecrets": [{"name": "registry"}], "serviceAccount": {"name": "mt", "annotations": {"role": "arn"}}},
    "rollout": {"strategy": {"type": "Recreate", "rollingUpdate": None}, "podDisruptionBudget": {"minAvailable": "50%"}}
    | {"podDisruptionBudget.maxUnavailable": None, "probes.type": "grpc", "drain.preStopSeconds": 0},
    "percentages": {"strategy.rollingUpdate": {"maxSurge": "25%", "maxUnavailable": 1}, "serviceAccount.create": False},
    "settings": {"config": {"max_connection_age_seconds": None, "num_threads": 4, "keepalive_seconds": 0.25}}
    | {"models.files": {"en-de": {"versions": {"latest": 2}, "weights": {"4": 0.1}}, "en-fr": None}}
    | {"models.signatures.secretName": "keys", "tmp": {"medium": "Memory", "sizeLimit": "64Mi"}},
    "services": {"service": {"type": "NodePort", "headless": {"enabled": False}, "annotations": {"a": "b"}, "appProtocol": "grpc"}},
    "archives": {"models.source": "store", "models.store.addresses": [ARCHIVE], "service.headless.annotations": {"a": "b"}},
    "pods": {
        "nodeSelector": {"pool": "cpu"},
        "tolerations": [{"key": "a", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
    }
    | {"topologySpread": [{"topologyKey": "zone", "maxSkew": 2, "whenUnsatisfiable": "DoNotSchedule", "minDomains": 2}]}
    | {"podLabels": {"a": "b"}, "podAnnotations": {"c": "d"}, "resources": {"requests": {"cpu": 4, "memory": "4Gi"}}},
    "extras": {"extraEnv": [{"name": "OMP_NUM_THREADS", "value": "1"}], "extraEnvFrom": [{"secretRef": {"name": "more"}}]}
    | {"extraVolumes": [{"name": "a", "emptyDir": {}}], "extraVolumeMounts": [{"name": "a", "mountPath": "/a"}]}
    | {"extraInitContainers": [{"name": "first", "image": "busybox"}], "extraContainers": [{"name": "beside", "image": "busybox"}]},
    "rules": {
        "metrics.prometheusRule": {"enabled": True, "labels": {"a": "b"}, "runbookPrefix": "https://a", "matchers": 'job="a"'}
    }
    | {"metrics.dashboards": {"enabled": True, "annotations": {"folder": "Dragoman"}}, "topologySpread": []},
    "CPUs": KEDA
    | PEERS
    | TLS
    | OWN_METRICS
    | {"networkPolicy.egress": [DNS], "models": {"source": "store", "store": STORE}}
    | {"metrics.monitor": MONITOR, "models.signatures.configMapName": "keys", "weightsCache.enabled": True}
    | {"metrics.prometheusRule.enabled": True, "grpcRoute": GATEWAY, "httpRoute": GATEWAY},
    "GPUs": GPU | HPA | {"models": CLAIM, "metrics.monitor": MONITOR | {"kind": "PodMonitor"}, "service.type": "LoadBalancer"},
    "GPUs without limits": {"gpu": {"enabled": True, "resources": {"requests": None, "limits": None}}},
}


CASES = [*itertools.product(OPTIONS, [NEWEST]), *itertools.product(("CPUs", "GPUs"), ("1.27", "1.30", "1.33"))]


@pytest.mark.parametrize(("name", "version"), CASES)
def test_options_are_accepted(render: Render, name: str, version: str) -> None:
    assert render(OPTIONS[name], release="mt", version=version).all("Deployment")


# Refused values: each is named, so that a typo does not pass in silence.

PEER = [{"podSelector": {}}]
TARGETS = ("queueSeconds", "requestsWaiting", "slotsInUse", "cpuPercent")
TWICE = [{"backends": [{"weight": 95}, {"weight": 5}]}]
# A value that the schema refuses, which names the last part of its path, or of that after the slash.
SCHEMA: list[tuple[str, Any]] = [
    ("replicas", 3),
    ("replicaCount", "three"),
    ("image.pullPolicy", "Sometimes"),
    ("config.max_slots", 0),
    ("config.http_port", 8080),
    ("models.volume", {"emptyDir": {}, "nfs": {}}),
    ("autoscaling.targets.slotsInUse", "many"),
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
    (PEERS | {"models.source": "store", "models.store.addresses": [{"address": "s3://models"}]}, "networkPolicy.egress"),
    ({"models.source": "volume"}, r"models\.volume: needed"),
    ({"models": {"source": "volume", "volume": {"image": {"reference": "registry.example/models:3"}}}}, "must be NAME@sha256"),
    ({"models.source": "store"}, r"models\.store\.addresses"),
    ({"models.source": "store", "models.store.addresses": [{"address": "http://models.example/a"}]}, "must have a sha256 or be"),
    ({"models.signatures": {"configMapName": "a", "secretName": "b"}}, "not both"),
    ({"models.files.en-de.versions": {"latest": 1, "only": ["3"]}}, "files.en-de.versions: latest and only are both"),
    ({"models.files.en-de.weights": {"3": 0.7, "4": 0.7}}, r"files.en-de.weights: are 1.4 together, more than 1"),
    ({"podSpec.terminationGracePeriodSeconds": 54}, "54 is less than preStopSeconds"),
    ({"tls.enabled": True}, r"tls\.secretName"),
    ({"tls.clientCA.secretName": "a"}, r"needs tls\.enabled"),
    ({"tls": {"enabled": True, "secretName": "a"}, "probes.type": "grpc"}, "gRPC probes speak no TLS"),
    ({"metrics.tls.enabled": True}, r"metrics\.tls\.secretName"),
    ({"config.host": "127.0.0.1", "probes.type": "http"}, "the kubelet cannot probe"),
    ({"config.metrics_host": "localhost", "metrics.monitor.kind": "PodMonitor"}, "nobody can scrape"),
    ({"metrics.monitor.kind": "ServiceMonitor", "service.type": "LoadBalancer"}, "use kind: PodMonitor"),
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
    ({"resources.requests": None, "autoscaling.type": "hpa"}, r"cpuPercent: needs resources\.requests\.cpu"),
    ({"autoscaling": {"type": "hpa", "minReplicas": 11}}, "minReplicas is more than maxReplicas"),
    ({"autoscaling.type": "keda"}, "serverAddress"),
    (HPA | {f"autoscaling.targets.{name}": 0 for name in TARGETS}, "at least one must be above 0"),
    ({"podDisruptionBudget.maxUnavailable": None}, "set minAvailable or maxUnavailable"),
]
# Values that are gone, and a part of the replacement that is named.
REMOVED: list[tuple[Values, str]] = [
    ({"config": {"warmup": False}}, "warmup.*removed: a model is always warmed up before it is ready"),
    ({"models": {"source": "image", "pvc": {"claimName": "a"}}}, r"models\.volume\.persistentVolumeClaim"),
    ({"models.download.archives": []}, r"models\.source: store"),
    ({"probes.startup.failureThreshold": 9}, r"containerSpec\.startupProbe"),
    ({"metrics.serviceMonitor.enabled": True}, r"metrics\.monitor with kind: ServiceMonitor"),
    ({"autoscaling.cpu.enabled": False}, r"autoscaling\.targets\.cpuPercent"),
    ({"gpu.runtimeClassName": "nvidia"}, r"podSpec\.runtimeClassName"),
    ({"minReadySeconds": 5}, r"deploymentSpec\.minReadySeconds"),
    ({"podSpec.containers": []}, "extraContainers"),
    ({"containerSpec.env": []}, "extraEnv"),
]


NAMED = [({path.split("/")[0]: value}, re.split(r"[./]", path)[-1]) for path, value in SCHEMA]


@pytest.mark.parametrize(("values", "reason"), [*NAMED, *TEMPLATES, *REMOVED])
def test_wrong_value_is_refused_and_named(render: Render, values: Values, reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        render(values)


def test_examples_of_the_manual_are_valid(render: Render) -> None:
    known = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"].keys()
    examples = [values for values in manual_blocks() if values.keys() <= known]
    names = {key for values in examples for key in values}
    assert names >= {"models", "grpcRoute", "httpRoute", "tls", "gpu", "networkPolicy", "extraInitContainers"}
    assert all(render(values).all("Deployment") for values in examples)
    (job,) = [content for content in manual_blocks() if content.get("kind") == "Job"]
    assert_valid(job, NEWEST)


def test_generated_files_are_current(capsys: pytest.CaptureFixture[str]) -> None:
    assert program("helm/generate.py").main(["--check"]) == 0, capsys.readouterr().out + "run: make chart"
