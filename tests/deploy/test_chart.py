"""Objects that the chart makes of its values: the life of a pod, security, scaling, GPUs, sources of models, and routes."""

import asyncio
import math
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.registry import CollectorRegistry

from dragoman.server import config as settings
from dragoman.server.config import ReadyRule
from dragoman.server.protocols.grpc.health import LIVENESS, OVERALL
from dragoman.server.service.service import CLOSE_SECONDS
from dragoman.server.telemetry.metrics import Metrics
from dragoman.server.workers.supervisor import STOP_SECONDS
from tests.deploy.conftest import CHART, Refused, Render, Values

SHA = "ab" * 32
CLAIM = {"source": "volume", "volume": {"persistentVolumeClaim": {"claimName": "bundles"}}, "subPath": "v3"}
IMAGE = {"source": "volume", "volume": {"image": {"reference": f"registry.example/models:3@sha256:{SHA}"}}}
GPU: Values = {"gpu.enabled": True}
TLS: Values = {"tls.enabled": True, "tls.secretName": "certificate", "tls.clientCA.secretName": "clients"}
PEERS: Values = {"networkPolicy": {"enabled": True, "clients": [{"podSelector": {}}], "monitoring": [{"podSelector": {}}]}}
OWN_METRICS: Values = {"metrics.auth.secretName": "scraper", "metrics.tls": {"enabled": True, "secretName": "own"}}
HPA: Values = {"autoscaling.type": "hpa"}
KEDA: Values = {"autoscaling.type": "keda", "autoscaling.keda.serverAddress": "http://prometheus:9090"}
GATEWAY = {"enabled": True, "parentRefs": [{"name": "gateway"}]}
TESTERS = {"headers": [{"name": "dragoman-canary", "value": "yes"}]}
TIMEOUTS = {"request": "0s", "backendRequest": "1m30s"}
US, OTHER = {"backendRefs": [{"name": "dragoman", "port": 8500}]}, {"name": "other", "namespace": "beside", "port": 9000}
MIRROR = {"type": "RequestMirror", "requestMirror": {"backendRef": {"name": "dragoman-canary", "port": 8500}}}
PASSED = {"matches": [{"path": {"type": "Exact", "value": "/v1/a"}}, TESTERS], "filters": [MIRROR], "timeouts": {"request": "0s"}}
READY, LIVE = ({"port": 9000, "service": service} for service in ("readiness", LIVENESS))


def rolling(surge: Any, unavailable: Any) -> dict[str, Any]:
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}


def port(name: str, number: int, protocol: str) -> dict[str, Any]:
    return {"name": name, "port": number, "targetPort": name, "appProtocol": protocol}


GRPC, HTTP = port("grpc", 8500, "kubernetes.io/h2c"), port("http", 8080, "http")


def pods_metric(name: str, target: str) -> dict[str, Any]:
    return {"type": "Pods", "pods": {"metric": {"name": name}, "target": {"type": "AverageValue", "averageValue": target}}}


def route(kind: str, rule: Values, expected: Values) -> tuple[Values, dict[str, Any]]:
    """Return a case of a rule and the rule of the route that it becomes; the kind HTTP is that of `httpRoute`."""
    name = "httpRoute" if kind == "HTTP" else "grpcRoute"
    values = GATEWAY | ({} if kind == "HTTP" else {"kind": kind}) | {"rules": [rule]}
    return {name: values}, {f"{'HTTPRoute' if kind == 'HTTP' else kind} spec rules": [expected]}


SCORE = {"service": "dragoman.v1.Generation", "method": "Score"}
SCORE_PATH = {"path": {"type": "Exact", "value": "/dragoman.v1.Generation/Score"}}
SHARES = [{"name": "dragoman", "port": 8500, "weight": 95}, OTHER | {"weight": 5}]
SERVICES = ("dragoman", "dragoman-headless")
STRATEGY, GRACE, BUDGET = "Deployment spec strategy", "pod terminationGracePeriodSeconds", "PodDisruptionBudget kind"
SCALING, TRIGGERS, FALLBACK = "HorizontalPodAutoscaler spec", "ScaledObject spec triggers", "ScaledObject spec fallback"
SCALERS = f"{SCALING} metrics"
SCRAPED, POD_SCRAPED = "ServiceMonitor spec endpoints 0", "PodMonitor spec podMetricsEndpoints 0"
FACTS: list[tuple[Values, dict[str, Any]]] = [
    ({}, {STRATEGY: rolling(1, 0), GRACE: 10 + 30 + 15, BUDGET: "PodDisruptionBudget", "env DRAGOMAN_WEIGHTS_CACHE": "off"}),
    ({}, {"container image": "dragoman:0.1.0", "container resources limits": {"cpu": "2", "memory": "2Gi"}}),
    ({}, {"pod automountServiceAccountToken": False, "Service:dragoman-headless spec clusterIP": "None"}),
    ({}, {"Service:dragoman-headless spec ports": [GRPC, HTTP]}),
    # --- rollouts and the end of a pod
    ({"drain": {"preStopSeconds": 0, "seconds": 2.5, "marginSeconds": 12}}, {GRACE: 15, "container lifecycle": None}),
    ({"drain.seconds": 3600}, {GRACE: 3625, "env DRAGOMAN_DRAIN_SECONDS": "3600"}),
    ({"strategy.type": "Recreate"}, {STRATEGY: {"type": "Recreate"}}),
    (GPU, {STRATEGY: rolling(0, 1)}),
    (GPU | {"strategy.rollingUpdate.maxSurge": 1}, {STRATEGY: rolling(1, 0)}),
    ({"strategy.rollingUpdate.maxSurge": "0%"}, {STRATEGY: rolling("0%", 1)}),
    ({"replicaCount": 1}, {BUDGET: None}),
    ({"replicaCount": 1, "autoscaling": {"type": "hpa", "minReplicas": 2}}, {BUDGET: "PodDisruptionBudget"}),
    ({"replicaCount": 3, "autoscaling": {"type": "hpa", "minReplicas": 1}}, {BUDGET: None}),
    # --- fields that are merged in
    (
        {"deploymentSpec": {"minReadySeconds": 10}, "podSpec": {"priorityClassName": "high", "topologySpreadConstraints": None}},
        {"Deployment spec minReadySeconds": 10, "pod priorityClassName": "high", "pod topologySpreadConstraints": None},
    ),
    (
        {"containerSpec": {"startupProbe": {"failureThreshold": 240}, "lifecycle": {"preStop": {"sleep": {"seconds": 3}}}}},
        {"container startupProbe failureThreshold": 240, "container startupProbe periodSeconds": 5}
        | {"container startupProbe grpc service": "readiness", "container lifecycle preStop sleep seconds": 3},
    ),
    (
        {"extraManifests": ["{apiVersion: v1, kind: Secret, metadata: {name: '{{ .Release.Name }}-x', namespace: translation}}"]},
        {"Secret metadata name": "dragoman-x"},
    ),
    # --- probes: HTTP where the kubelet's gRPC would need TLS
    ({"service.grpcPort": 9000}, {"container readinessProbe grpc": READY, "container livenessProbe grpc": LIVE}),
    (TLS, {f"container {probe}Probe httpGet": {"port": "metrics", "path": "/readyz"} for probe in ("startup", "readiness")}),
    (TLS, {"container livenessProbe httpGet": {"port": "metrics", "path": "/healthz"}}),
    *((TLS, {f"Service:{name} spec ports {protocol} appProtocol": "https"}) for name in SERVICES for protocol in ("grpc", "http")),
    (
        OWN_METRICS,
        {"container readinessProbe grpc service": "readiness", "Service:dragoman spec ports metrics appProtocol": "https"},
    ),
    (
        OWN_METRICS | {"probes.type": "http"},
        {
            f"container {probe}Probe httpGet": {"port": "metrics", "path": path, "scheme": "HTTPS"}
            for probe, path in (("readiness", "/readyz"), ("liveness", "/healthz"))
        },
    ),
    # --- ports and networks
    ({"config.http": False} | PEERS, {"env DRAGOMAN_HTTP_PORT": None}),
    ({"config.http_host": "127.0.0.1"} | PEERS, {"env DRAGOMAN_HTTP_PORT": "8080"}),
    (
        PEERS | {"networkPolicy.monitoring": [{"namespaceSelector": {}}]},
        {
            "NetworkPolicy spec policyTypes": ["Ingress", "Egress"],
            "NetworkPolicy spec egress": [],
            "NetworkPolicy spec ingress": [
                {"ports": [{"port": name, "protocol": "TCP"} for name in ("grpc", "http")], "from": [{"podSelector": {}}]},
                {"ports": [{"port": "metrics", "protocol": "TCP"}], "from": [{"namespaceSelector": {}}]},
            ],
        },
    ),
    # --- monitors
    (
        {"metrics.monitor": {"kind": "ServiceMonitor", "endpoint": {"interval": "30s"}}},
        {SCRAPED: {"port": "metrics", "path": "/metrics", "interval": "30s", "scrapeTimeout": "10s"}},
    ),
    (
        OWN_METRICS | {"metrics.monitor.kind": "ServiceMonitor"},
        {
            f"{SCRAPED} scheme": "https",
            f"{SCRAPED} authorization": {"type": "Bearer", "credentials": {"name": "scraper", "key": "token"}},
            f"{SCRAPED} tlsConfig": {"serverName": "dragoman.translation.svc", "ca": {"secret": {"name": "own", "key": "ca.crt"}}},
        },
    ),
    (
        OWN_METRICS | {"metrics.monitor": {"kind": "PodMonitor", "endpoint": {"tlsConfig": {"serverName": "other"}}}},
        {f"{POD_SCRAPED} tlsConfig serverName": "other", f"{POD_SCRAPED} authorization credentials name": "scraper"},
    ),
    # --- autoscaling, by the CPU only where there is no GPU
    (
        HPA | {"autoscaling.targets.queueSeconds": 0.25},
        {
            "Deployment spec replicas": None,
            f"{SCALERS} 0": pods_metric("dragoman_estimated_queue_seconds", "0.25"),
            f"{SCALERS} 1": pods_metric("dragoman_num_requests_waiting", "16"),
            f"{SCALERS} 2": pods_metric("dragoman_slots_in_use", "24"),
            f"{SCALERS} 3 type": "Resource",
            "HorizontalPodAutoscaler spec behavior scaleDown stabilizationWindowSeconds": 300,
            "HorizontalPodAutoscaler spec behavior scaleUp stabilizationWindowSeconds": 0,
        },
    ),
    (HPA | GPU | {"autoscaling.targets.cpuPercent": 70}, {f"{SCALERS} 3 resource target averageUtilization": 70}),
    (HPA | {"autoscaling.targets": {"queueSeconds": 0, "slotsInUse": 0}}, {f"{SCALERS} 1 type": "Resource", f"{SCALERS} 2": None}),
    (HPA | {"autoscaling.spec.behavior.scaleUp.selectPolicy": "Min"}, {f"{SCALING} behavior scaleUp selectPolicy": "Min"}),
    (KEDA | {"autoscaling.spec.fallback.replicas": 7}, {FALLBACK: {"failureThreshold": 4, "replicas": 7}}),
    (KEDA | GPU, {f"{TRIGGERS} 2 type": "prometheus", f"{TRIGGERS} 3": None}),
    *(
        (HPA | {"config": config}, {f"{SCALERS} 2": pods_metric("dragoman_slots_in_use", target)})
        for config, target in (
            ({"max_slots": 256}, "96"),
            ({"max_slots": 16, "replicas": 4}, "24"),
            ({"max_slots": 1}, "1"),
            ({"max_slots": None, "replicas": 0}, "24"),
        )
    ),
    (KEDA | {"config.max_slots": 256, "autoscaling.targets.slotsInUse": 10}, {f"{TRIGGERS} 2 metadata threshold": "10"}),
    # --- GPUs
    (
        GPU | {"podSpec.runtimeClassName": "nvidia", "nodeSelector": {"a": "b"}},
        {
            "container image": "dragoman:0.1.0-cuda",
            "container resources limits": {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 1},
            "pod tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
            "pod runtimeClassName": "nvidia",
            "pod nodeSelector": {"a": "b"},
            "env DRAGOMAN_DEVICE": "cuda",  # not auto, which would compute on the CPU
        },
    ),
    (GPU | {"config.device": "cuda:1", "image.tag": "a"}, {"env DRAGOMAN_DEVICE": "cuda:1", "container image": "dragoman:a"}),
    # --- models and weights
    (
        {"models": CLAIM},
        {
            "container volumeMounts models": {"name": "models", "mountPath": "/models", "readOnly": True, "subPath": "v3"},
            "pod volumes models persistentVolumeClaim": {"claimName": "bundles", "readOnly": True},
        },
    ),
    (
        {"models": IMAGE},
        {"pod volumes models image": {"reference": f"registry.example/models:3@sha256:{SHA}", "pullPolicy": "IfNotPresent"}},
    ),
    (
        {"weightsCache": {"enabled": True, "sizeLimit": "9Gi"}},
        {
            "env DRAGOMAN_WEIGHTS_CACHE": "/weights",
            "container volumeMounts weights": {"name": "weights", "mountPath": "/weights"},
            "pod volumes weights emptyDir": {"sizeLimit": "9Gi"},
        },
    ),
    # --- routes
    (
        {"service.httpPort": 80, "grpcRoute": GATEWAY | {"kind": "HTTPRoute"}, "httpRoute": GATEWAY}
        | {"httpRoute.hostnames": ["mt.example"], "httpRoute.annotations": {"a": "b"}},
        {
            "HTTPRoute:dragoman-http spec rules": [{"backendRefs": [{"name": "dragoman", "port": 80}]}],
            "HTTPRoute:dragoman spec rules": [US],
            "HTTPRoute:dragoman-http spec hostnames": ["mt.example"],
            "HTTPRoute:dragoman-http metadata annotations": {"a": "b"},
        },
    ),
    route("GRPCRoute", {"filters": [MIRROR]}, US | {"filters": [MIRROR]}),
    route("GRPCRoute", {"matches": [TESTERS], "backends": [OTHER]}, {"matches": [TESTERS], "backendRefs": [OTHER]}),
    route("GRPCRoute", {"backends": [{"weight": 95}, OTHER | {"weight": 5}]}, {"backendRefs": SHARES}),
    route("GRPCRoute", {"matches": [{"method": SCORE}]}, US | {"matches": [{"method": {"type": "Exact"} | SCORE}]}),
    route("HTTPRoute", {"timeouts": TIMEOUTS}, US | {"timeouts": TIMEOUTS}),
    route("HTTPRoute", {"matches": [{"method": SCORE} | TESTERS]}, US | {"matches": [SCORE_PATH | TESTERS]}),
    route("HTTP", PASSED | {"backends": [OTHER]}, PASSED | {"backendRefs": [OTHER]}),
]


@pytest.mark.parametrize(("values", "facts"), FACTS, ids=[",".join(values) for values, _ in FACTS])
def test_values_become_fields_of_objects(render: Render, values: Values, facts: dict[str, Any]) -> None:
    rendered = render(values)
    assert {path: rendered.find(path) for path in facts} == facts


def test_linter_of_helm_finds_nothing(configuration: Any) -> None:
    import helm_sdkpy

    result = asyncio.run(helm_sdkpy.Lint(configuration()).run(str(CHART)))
    # Severities: 1 is a remark (no icon), 2 a warning, 3 an error.
    assert [str(message) for message in result["Messages"] or () if message["Severity"] > 1] + (result["Errors"] or []) == []


def test_grace_period_covers_the_end_of_the_server(render: Render) -> None:
    """The last bytes, the end of the connections, and the engines told to stop and then killed."""
    after_drain = 2 * CLOSE_SECONDS + 2 * STOP_SECONDS
    for seconds in (0, 2.5, 30):
        rendered = render({"drain.seconds": seconds, "drain.marginSeconds": math.ceil(after_drain) + 1})
        pre_stop = rendered.find("container lifecycle preStop sleep seconds")
        assert rendered.find(GRACE) >= pre_stop + float(rendered.find("env DRAGOMAN_DRAIN_SECONDS")) + after_drain
    with pytest.raises(Refused, match="marginSeconds"):
        render({"drain.marginSeconds": math.ceil(after_drain) - 1})


def test_versions_of_kubernetes_wait_before_sigterm_or_are_refused(render: Render) -> None:
    for version, handler in (("1.30", {"sleep": {"seconds": 10}}), ("1.29", {"exec": {"command": ["sleep", "10"]}})):
        assert render(version=version).find("container lifecycle preStop") == handler
    for values, version, reason in (({}, "1.26", "kubeVersion"), ({"models": IMAGE}, "1.30", "image volumes")):
        with pytest.raises(Refused, match=reason):
            render(values, version=version)


@pytest.mark.parametrize("rule", ["any", "all", "en-de", "en-de, en-fr"])
def test_server_reads_every_variable_as_the_values_say(render: Render, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    wanted = {"max_message_bytes": 16777216, "max_connection_age_seconds": 0.5, "console": False, "log_level": "debug"}
    wanted |= {"max_waiting_tokens": 1000000, "http_allowed_hosts": ["a.example", "b"], "ready_when": rule}
    ports = {"grpcPort": 9000, "httpPort": 9002, "metricsPort": 9001}
    rendered = render({"config": wanted, "service": ports, "drain.seconds": 7})
    for name, value in rendered.find("env").items():
        monkeypatch.setenv(name, value)
    config = settings.load({})
    read = config.model_dump()
    assert {name: read[name] for name in wanted} == wanted | {"http_allowed_hosts": ("a.example", "b")}
    assert (read["port"], read["http_port"], read["metrics_port"]) == (9000, 9002, 9001)
    assert (read["drain_seconds"], read["models"], config.ready_rule) == (7, Path("/models"), ReadyRule.parse(rule))
    assert rendered.find("container readinessProbe grpc service") == "readiness" and "readiness" in OVERALL


def test_secrets_are_mounted_whole_where_variables_name_their_files(render: Render) -> None:
    metrics = {"metrics.auth.secretName": "scraper", "metrics.tls.enabled": True}
    rendered = render(TLS | metrics | {"auth": {"secretName": "tokens", "key": "callers"}})
    files = {
        "client-ca": ("clients", {"TLS_CLIENT_CA": "ca.crt"}),
        "tls": ("certificate", {"TLS_CERTIFICATE": "tls.crt", "TLS_KEY": "tls.key"}),
        "auth": ("tokens", {"AUTH_TOKENS_FILE": "callers"}),
        "metrics-auth": ("scraper", {"METRICS_TOKEN_FILE": "token"}),
        "metrics-tls": ("certificate", {"METRICS_TLS_CERTIFICATE": "tls.crt", "METRICS_TLS_KEY": "tls.key"}),
    }
    for name, (secret, variables) in files.items():
        folder = f"/etc/dragoman/{name}"
        assert rendered.find(f"pod volumes {name} secret secretName") == secret
        # Changes of a secret do not arrive through a subPath.
        assert rendered.find(f"container volumeMounts {name}") == {"name": name, "mountPath": folder, "readOnly": True}
        assert all(rendered.find(f"env DRAGOMAN_{key}") == f"{folder}/{file}" for key, file in variables.items())


def test_pods_satisfy_the_restricted_standard_and_write_nowhere(render: Render) -> None:
    rendered = render({"models": {"source": "store", "store": {"addresses": [{"address": "s3://models"}]}}})
    pod = rendered.find("pod")
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"] + pod["initContainers"]:
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True and "privileged" not in context
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable == ({"/tmp"} if container["name"] == "dragoman" else {"/tmp", "/models"})
    kinds = {kind for volume in pod["volumes"] for kind in volume.keys() - {"name"}}
    assert kinds == {"emptyDir", "configMap"} and not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


def test_ports_of_services_and_policies_are_those_of_the_pods(render: Render) -> None:
    rendered = render({"service.httpPort": 9002} | PEERS)
    numbers = {port["name"]: port["containerPort"] for port in rendered.find("container ports")}
    assert numbers == {"grpc": 8500, "http": 9002, "metrics": 8501}
    for service in rendered.all("Service"):
        assert all(numbers[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    assert {port["port"] for rule in rendered.find("NetworkPolicy spec ingress") for port in rule["ports"]} == numbers.keys()
    for config in ({"config.http": False}, {"config.http_host": "127.0.0.1"}, {"config.host": "::1"}):
        closed = render(config | PEERS)
        for ports in (closed.find("container ports"), *(closed.find(f"Service:{name} spec ports") for name in SERVICES)):
            assert "http" not in {port["name"] for port in ports}
        assert "http" not in {port["port"] for rule in closed.find("NetworkPolicy spec ingress") for port in rule["ports"]}


def test_keda_queries_the_metrics_of_the_pods_of_the_release(render: Render) -> None:
    rendered = render(KEDA, release="mt")
    assert rendered.all("HorizontalPodAutoscaler") == []
    assert rendered.find("ScaledObject spec scaleTargetRef") == {"name": "mt-dragoman"}
    queue, waiting, slots, cpu = rendered.find(TRIGGERS)
    pods = '{namespace="translation",pod=~"mt-dragoman-[a-z0-9]+-[a-z0-9]+"}'
    assert queue["metadata"]["query"] == f"sum(max by (pod) (dragoman_estimated_queue_seconds{pods}))"
    assert waiting["metadata"]["query"] == f"sum(dragoman_num_requests_waiting{pods})"
    assert slots["metadata"]["query"] == f"sum(dragoman_slots_in_use{pods})"
    assert queue["metadata"]["ignoreNullValues"] == waiting["metadata"]["ignoreNullValues"] == "false"
    assert cpu == {"type": "cpu", "metricType": "Utilization", "metadata": {"value": "80"}}
    names = {"dragoman_estimated_queue_seconds", "dragoman_num_requests_waiting", "dragoman_slots_in_use"}
    assert names <= Metrics(CollectorRegistry()).labels.keys()


def test_dashboards_arrive_as_they_are_in_the_files(render: Render) -> None:
    rendered = render({"metrics.dashboards.enabled": True})
    dashboards = {path.name: path.read_text() for path in (CHART / "files/dashboards").glob("*.json")}
    maps = [item for item in rendered.all("ConfigMap") if "dashboard" in item["metadata"]["name"]]
    assert {name: text for item in maps for name, text in item["data"].items()} == dashboards
    assert all(item["metadata"]["labels"]["grafana_dashboard"] == "1" for item in maps)
