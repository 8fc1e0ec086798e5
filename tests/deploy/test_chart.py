"""What the chart promises, on what Helm makes of it."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.registry import CollectorRegistry

from dragoman.server import config as settings
from dragoman.server.core.core import CLOSE_SECONDS
from dragoman.server.core.readiness import ReadyRule
from dragoman.server.faces.grpc.health import LIVENESS, OVERALL
from dragoman.server.supervisor import STOP_SECONDS
from dragoman.server.telemetry.metrics import Metrics

Render = Callable[..., Any]
TLS = {"tls": {"enabled": True, "secretName": "certificate", "clientCA": {"secretName": "clients"}}}
# What the margin must cover: the last bytes, the end of the connections, and the engines told to stop and then killed.
SECONDS_AFTER_DRAIN = 2 * CLOSE_SECONDS + 2 * STOP_SECONDS


def test_helms_linter_finds_nothing(helm: Any) -> None:
    assert helm.lint() == []


def test_helms_linter_would_find_something(helm: Any) -> None:
    assert helm.lint("replicaCount: many\n")


# --- the life of a pod


@pytest.mark.parametrize(
    ("drain", "seconds"),
    [({}, 10 + 30 + 15), ({"preStopSeconds": 0, "seconds": 2.5, "marginSeconds": 12}, 15), ({"seconds": 3600}, 3625)],
)
def test_grace_period_is_pre_stop_and_drain_and_margin(render: Render, drain: dict[str, Any], seconds: int) -> None:
    rendered = render({"drain": drain})
    grace = rendered.pod["terminationGracePeriodSeconds"]
    assert grace == seconds
    pre_stop = rendered.container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert grace >= pre_stop + float(rendered.environment["DRAGOMAN_DRAIN_SECONDS"]) + SECONDS_AFTER_DRAIN


def test_no_margin_that_is_allowed_is_shorter_than_the_end_of_the_server(render: Render, refused: type[Exception]) -> None:
    least = math.ceil(SECONDS_AFTER_DRAIN)
    render({"drain": {"marginSeconds": least + 1}})
    with pytest.raises(refused, match="marginSeconds"):
        render({"drain": {"marginSeconds": least - 1}})


def test_a_grace_period_that_would_cut_requests_off_is_refused(render: Render, refused: type[Exception]) -> None:
    assert render({"drain": {"terminationGracePeriodSeconds": 55}}).pod["terminationGracePeriodSeconds"] == 55
    assert render({"drain": {"terminationGracePeriodSeconds": 90}}).pod["terminationGracePeriodSeconds"] == 90
    with pytest.raises(refused, match="54 is less than preStopSeconds"):
        render({"drain": {"terminationGracePeriodSeconds": 54}})


def test_pods_wait_before_sigterm_on_every_version_of_kubernetes(render: Render) -> None:
    assert render(version="1.30").container["lifecycle"]["preStop"] == {"sleep": {"seconds": 10}}
    assert render(version="1.29").container["lifecycle"]["preStop"] == {"exec": {"command": ["sleep", "10"]}}
    assert "lifecycle" not in render({"drain": {"preStopSeconds": 0}}).container


def test_a_rollout_never_takes_a_pod_before_its_successor_is_ready(render: Render) -> None:
    strategy = render().one("Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


@pytest.mark.parametrize(
    ("values", "surge", "unavailable"),
    [
        ({"gpu": {"enabled": True}}, 0, 1),
        ({"gpu": {"enabled": True}, "strategy": {"rollingUpdate": {"maxSurge": 1}}}, 1, 0),
        ({"gpu": {"enabled": True}, "strategy": {"rollingUpdate": {"maxUnavailable": 0}}}, 1, 0),
        ({"gpu": {"enabled": True}, "strategy": {"rollingUpdate": {"maxUnavailable": "50%"}}}, 0, "50%"),
        ({"gpu": {"enabled": True}, "strategy": {"rollingUpdate": {"maxUnavailable": "0%"}}}, 1, "0%"),
        ({"strategy": {"rollingUpdate": {"maxSurge": "0%"}}}, "0%", 1),
        ({"strategy": {"rollingUpdate": {"maxSurge": 0}}}, 0, 1),
        ({"strategy": {"rollingUpdate": {"maxUnavailable": 2}}}, 1, 2),
        ({"strategy": {"rollingUpdate": None}}, 1, 0),
    ],
)
def test_a_rollout_needs_no_gpu_that_is_not_there_and_always_goes_on(
    render: Render, values: dict[str, Any], surge: Any, unavailable: Any
) -> None:
    strategy = render(values).one("Deployment")["spec"]["strategy"]
    assert strategy == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": surge, "maxUnavailable": unavailable}}


def test_notes_warn_of_a_rollout_with_a_pause_where_there_is_one(render: Render) -> None:
    gpu, one = {"gpu": {"enabled": True}}, {"replicaCount": 1}
    pause = "a rollout ends it before the next one has its GPU"
    assert pause in render(gpu | one).notes
    assert pause in render(gpu | one | {"strategy": {"type": "Recreate"}}).notes
    assert pause not in render(gpu | one | {"strategy": {"rollingUpdate": {"maxSurge": 1}}}).notes
    assert pause not in render(gpu).notes and pause not in render(one).notes


def test_recreate_has_no_limits_of_a_rollout(render: Render) -> None:
    assert render({"strategy": {"type": "Recreate"}}).one("Deployment")["spec"]["strategy"] == {"type": "Recreate"}


def test_probes_ask_for_health_that_the_server_tells(render: Render) -> None:
    container = render({"service": {"grpcPort": 9000}}).container
    assert container["startupProbe"]["grpc"] == container["readinessProbe"]["grpc"] == {"port": 9000, "service": "readiness"}
    assert container["livenessProbe"]["grpc"] == {"port": 9000, "service": LIVENESS}
    assert "readiness" in OVERALL


def test_probes_are_http_where_grpc_would_need_tls(render: Render) -> None:
    container = render(TLS).container
    assert container["startupProbe"]["httpGet"] == container["readinessProbe"]["httpGet"] == {"port": "metrics", "path": "/readyz"}
    assert container["livenessProbe"]["httpGet"] == {"port": "metrics", "path": "/healthz"}


@pytest.mark.parametrize("rule", ["any", "all", "en-de", "en-de, en-fr"])
def test_the_rule_of_readiness_reaches_the_server_that_the_probes_ask(
    render: Render, monkeypatch: pytest.MonkeyPatch, rule: str
) -> None:
    rendered = render({"config": {"ready_when": rule}})
    monkeypatch.setenv("DRAGOMAN_READY_WHEN", rendered.environment["DRAGOMAN_READY_WHEN"])
    assert settings.load({"models": "bundles"}).ready_rule == ReadyRule.parse(rule)
    assert rendered.container["readinessProbe"]["grpc"]["service"] == "readiness"
    assert "DRAGOMAN_READY_WHEN" not in render().environment, "the server's own default, which keeps healthy models serving"


# --- settings


def test_the_server_takes_every_variable_as_it_was_meant(render: Render, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wanted = {
        "max_message_bytes": 16777216,
        "max_connection_age_seconds": 0.5,
        "max_waiting_tokens": 1000000,
        "warmup": False,
        "log_level": "debug",
        "ready_when": "en-de,en-fr",
        "latency_buckets": [0.0005, 1, 20.5],
    }
    ports = {"grpcPort": 9000, "httpPort": 9002, "metricsPort": 9001}
    rendered = render({"config": wanted, "service": ports, "drain": {"seconds": 7}})
    for name, value in rendered.environment.items():
        monkeypatch.setenv(name, value)
    read = settings.load({}).model_dump()
    assert {name: read[name] for name in wanted} == wanted | {"latency_buckets": (0.0005, 1.0, 20.5)}
    assert (read["port"], read["http_port"], read["metrics_port"]) == (9000, 9002, 9001)
    assert (read["drain_seconds"], read["models"]) == (7, Path("/models"))


def test_files_that_variables_name_are_mounted(render: Render) -> None:
    metrics = {"auth": {"secretName": "scraper"}, "tls": {"enabled": True}}
    rendered = render(TLS | {"auth": {"secretName": "tokens", "key": "callers"}, "metrics": metrics})
    mounts = {mount["mountPath"] for mount in rendered.container["volumeMounts"]}
    paths = {name: value for name, value in rendered.environment.items() if value.startswith("/etc/")}
    assert paths.pop("DRAGOMAN_MODEL_FILES") in mounts
    assert paths == {
        "DRAGOMAN_TLS_CERTIFICATE": "/etc/dragoman/tls/tls.crt",
        "DRAGOMAN_TLS_KEY": "/etc/dragoman/tls/tls.key",
        "DRAGOMAN_TLS_CLIENT_CA": "/etc/dragoman/client-ca/ca.crt",
        "DRAGOMAN_AUTH_TOKENS_FILE": "/etc/dragoman/auth/callers",
        "DRAGOMAN_METRICS_TOKEN_FILE": "/etc/dragoman/metrics-auth/token",
        "DRAGOMAN_METRICS_TLS_CERTIFICATE": "/etc/dragoman/metrics-tls/tls.crt",
        "DRAGOMAN_METRICS_TLS_KEY": "/etc/dragoman/metrics-tls/tls.key",
    }
    assert {str(Path(path).parent) for path in paths.values()} <= mounts


def test_a_secret_is_mounted_whole_so_that_its_changes_arrive(render: Render) -> None:
    metrics = {"auth": {"secretName": "scraper"}, "tls": {"enabled": True}}
    rendered = render(TLS | {"auth": {"secretName": "tokens"}, "metrics": metrics})
    secrets = {volume["name"]: volume["secret"]["secretName"] for volume in rendered.pod["volumes"] if "secret" in volume}
    assert secrets == {
        "tls": "certificate",
        "client-ca": "clients",
        "auth": "tokens",
        "metrics-auth": "scraper",
        "metrics-tls": "certificate",
    }
    mounts = {mount["name"]: mount for mount in rendered.container["volumeMounts"]}
    assert all(mounts[name]["readOnly"] and "subPath" not in mounts[name] for name in secrets)


def test_probes_speak_https_where_the_metrics_port_does_and_show_no_token(render: Render) -> None:
    metrics = {"auth": {"secretName": "scraper"}, "tls": {"enabled": True, "secretName": "own"}}
    container = render({"metrics": metrics, "probes": {"type": "http"}}).container
    assert container["readinessProbe"]["httpGet"] == {"port": "metrics", "path": "/readyz", "scheme": "HTTPS"}
    assert container["livenessProbe"]["httpGet"] == {"port": "metrics", "path": "/healthz", "scheme": "HTTPS"}
    assert "grpc" in render({"metrics": metrics}).container["readinessProbe"]


@pytest.mark.parametrize("kind", ["ServiceMonitor", "PodMonitor"])
def test_monitors_show_the_token_and_trust_the_authority(render: Render, kind: str) -> None:
    monitor = {f"{kind[0].lower()}{kind[1:]}": {"enabled": True}}

    def endpoint(**metrics: Any) -> dict[str, Any]:
        spec = render({"metrics": monitor | metrics}).one(kind)["spec"]
        (found,) = spec["endpoints" if kind == "ServiceMonitor" else "podMetricsEndpoints"]
        return {name: found.get(name) for name in ("scheme", "tlsConfig", "authorization")}

    assert endpoint() == {"scheme": None, "tlsConfig": None, "authorization": None}
    found = endpoint(auth={"secretName": "scraper"}, tls={"enabled": True, "secretName": "own"})
    assert found["authorization"] == {"type": "Bearer", "credentials": {"name": "scraper", "key": "token"}}
    assert found["scheme"] == "https"
    assert found["tlsConfig"]["serverName"].endswith(".translation.svc")
    assert found["tlsConfig"]["ca"] == {"secret": {"name": "own", "key": "ca.crt"}}
    found = endpoint(
        auth={"secretName": "scraper", "scrapeKey": "newest"},
        tls={"enabled": True, "secretName": "own", "serverName": "metrics.example", "ca": {"secretName": "authority", "key": "ca"}},
    )
    assert found["authorization"]["credentials"]["key"] == "newest"
    assert found["tlsConfig"] == {"serverName": "metrics.example", "ca": {"secret": {"name": "authority", "key": "ca"}}}


def test_service_says_what_the_metrics_port_speaks(render: Render) -> None:
    def protocol(values: dict[str, Any]) -> str:
        ports = {port["name"]: port for port in render(values).one("Service", "dragoman")["spec"]["ports"]}
        return str(ports["metrics"]["appProtocol"])

    assert protocol({}) == "http"
    assert protocol({"metrics": {"tls": {"enabled": True, "secretName": "own"}}}) == "https"


def test_notes_name_what_lies_open(render: Render) -> None:
    assert "may read the metrics" in render().notes
    peers = [{"podSelector": {}}]
    assert "may read the metrics" not in render({"networkPolicy": {"enabled": True, "clients": peers, "monitoring": peers}}).notes
    assert "may read the metrics" not in render({"metrics": {"auth": {"secretName": "scraper"}}}).notes
    assert "tokens travel unencrypted" in render({"auth": {"secretName": "tokens"}}).notes
    assert "token for the metrics travels unencrypted" in render({"metrics": {"auth": {"secretName": "scraper"}}}).notes
    assert "unencrypted" not in render(TLS | {"auth": {"secretName": "tokens"}}).notes


def test_every_setting_of_the_values_is_the_servers_and_no_other_is_taken(root: Path) -> None:
    schema = json.loads((root / "deploy/helm/dragoman/values.schema.json").read_text())
    taken = schema["properties"]["config"]["properties"]
    set_by_the_chart = {"models", "model_files", "require_signatures", "drain_seconds", "weights_cache"}
    set_by_the_chart |= {"port", "http_port", "metrics_port"}
    set_by_the_chart |= {"tls_certificate", "tls_key", "tls_client_ca", "auth_tokens_file"}
    set_by_the_chart |= {"metrics_token_file", "metrics_tls_certificate", "metrics_tls_key"}
    assert taken.keys() == settings.ServerConfig.model_fields.keys() - set_by_the_chart, "run make chart"


# --- security


@pytest.mark.parametrize(
    "values", [{}, {"models": {"source": "download", "download": {"archives": [{"url": "https://x/a", "sha256": "0" * 64}]}}}]
)
def test_pods_satisfy_the_restricted_standard_and_write_nowhere(render: Render, values: dict[str, Any]) -> None:
    pod = render(values).pod
    assert pod["securityContext"]["runAsNonRoot"] is True and pod["securityContext"]["runAsUser"] > 0
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in pod["containers"] + pod.get("initContainers", []):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False and context["capabilities"] == {"drop": ["ALL"]}
        assert context["readOnlyRootFilesystem"] is True and "privileged" not in context
        writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert writable == ({"/tmp"} if container["name"] == "dragoman" else {"/tmp", "/models"})
    kinds = {kind for volume in pod["volumes"] for kind in volume.keys() - {"name"}}
    assert kinds <= {"emptyDir", "configMap", "secret", "persistentVolumeClaim", "image"}
    assert not {"hostNetwork", "hostPID", "hostIPC"} & pod.keys()


def test_weights_are_shared_on_a_disk_of_the_pods_own_or_not_at_all(render: Render) -> None:
    def variable(pod: dict[str, Any]) -> str:
        return str(next(entry["value"] for entry in pod["containers"][0]["env"] if entry["name"] == "DRAGOMAN_WEIGHTS_CACHE"))

    assert variable(render().pod) == "off"
    pod = render({"weightsCache": {"enabled": True, "sizeLimit": "9Gi"}}).pod
    mount = next(mount for mount in pod["containers"][0]["volumeMounts"] if mount["mountPath"] == variable(pod))
    volume = next(volume for volume in pod["volumes"] if volume["name"] == mount["name"])
    assert volume["emptyDir"] == {"sizeLimit": "9Gi"} and not mount.get("readOnly")


def test_pods_get_no_token_and_no_variables_of_services(render: Render) -> None:
    rendered = render()
    assert rendered.pod["automountServiceAccountToken"] is False
    assert rendered.one("ServiceAccount")["automountServiceAccountToken"] is False
    assert rendered.pod["enableServiceLinks"] is False


def test_network_policy_lets_in_who_is_named_and_nobody_out(render: Render) -> None:
    shop, prometheus = ({"podSelector": {"matchLabels": {"app": app}}} for app in ("shop", "prometheus"))
    policy = {"enabled": True, "clients": [shop], "monitoring": [prometheus]}
    spec = render({"networkPolicy": policy}).one("NetworkPolicy")["spec"]
    assert spec["policyTypes"] == ["Ingress", "Egress"] and spec["egress"] == []
    assert spec["ingress"] == [
        {"ports": [{"port": "grpc", "protocol": "TCP"}, {"port": "http", "protocol": "TCP"}], "from": [shop]},
        {"ports": [{"port": "metrics", "protocol": "TCP"}], "from": [prometheus]},
    ]


# --- services


def test_clients_find_every_pod_and_proxies_learn_that_it_is_http2(render: Render) -> None:
    rendered = render()
    headless, main = rendered.one("Service", "dragoman-headless")["spec"], rendered.one("Service", "dragoman")["spec"]
    assert headless["clusterIP"] == "None" and "clusterIP" not in main
    assert "publishNotReadyAddresses" not in headless
    grpc = {"name": "grpc", "port": 8500, "targetPort": "grpc", "appProtocol": "kubernetes.io/h2c"}
    http = {"name": "http", "port": 8080, "targetPort": "http", "appProtocol": "http"}
    assert headless["ports"] == [grpc, http] and main["ports"][:2] == [grpc, http]
    with_tls = render(TLS)
    assert {port["appProtocol"] for service in with_tls.all("Service") for port in service["spec"]["ports"][:2]} == {"https"}


def test_every_port_of_a_service_and_a_policy_is_one_of_the_pods(render: Render) -> None:
    peers = [{"podSelector": {}}]
    rendered = render({"networkPolicy": {"enabled": True, "clients": peers, "monitoring": peers}, "service": {"httpPort": 9002}})
    named = {port["name"]: port["containerPort"] for port in rendered.container["ports"]}
    assert named == {"grpc": 8500, "http": 9002, "metrics": 8501}
    for service in rendered.all("Service"):
        assert all(named[port["targetPort"]] == port["port"] for port in service["spec"]["ports"])
    admitted = [port["port"] for rule in rendered.one("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]]
    assert sorted(admitted) == sorted(named)


@pytest.mark.parametrize(("config", "variable"), [({"http": False}, None), ({"http_host": "127.0.0.1"}, "8080")])
def test_without_http_or_within_the_pod_alone_nobody_is_led_to_it(
    render: Render, config: dict[str, Any], variable: str | None
) -> None:
    peers = [{"podSelector": {}}]
    rendered = render({"config": config, "networkPolicy": {"enabled": True, "clients": peers, "monitoring": peers}})
    ports = [port["name"] for service in rendered.all("Service") for port in service["spec"]["ports"]]
    ports += [port["name"] for port in rendered.container["ports"]]
    ports += [port["port"] for rule in rendered.one("NetworkPolicy")["spec"]["ingress"] for port in rule["ports"]]
    assert "http" not in ports and "grpc" in ports
    assert "HTTP" not in rendered.notes and rendered.environment.get("DRAGOMAN_HTTP_PORT") == variable


def test_a_setting_taken_back_leaves_http_on(render: Render) -> None:
    assert "http" in {port["name"] for port in render({"config": {"http": None}}).container["ports"]}


def test_each_pod_is_scraped_once(render: Render) -> None:
    rendered = render({"metrics": {"serviceMonitor": {"enabled": True}}})
    monitor = rendered.one("ServiceMonitor")["spec"]
    wanted = monitor["selector"]["matchLabels"].items()
    selected = [service for service in rendered.all("Service") if wanted <= service["metadata"]["labels"].items()]
    ports = [port["name"] for service in selected for port in service["spec"]["ports"]]
    assert ports.count(monitor["endpoints"][0]["port"]) == 1


def test_a_service_that_is_reached_from_outside_does_not_show_metrics(render: Render) -> None:
    service = render({"service": {"type": "LoadBalancer"}}).one("Service", "dragoman")
    assert [port["name"] for port in service["spec"]["ports"]] == ["grpc", "http"]


def test_notes_name_the_addresses(render: Render) -> None:
    notes = render().notes
    assert "dragoman.translation.svc:8500" in notes and "dns:///dragoman-headless.translation.svc:8500" in notes
    assert "HTTP on port 8080" in notes and "curl http://127.0.0.1:8080/v1/models" in notes
    assert "https://dragoman.translation.svc:8080/v1/models" in render(TLS).notes


# --- scaling


def declared_metrics() -> set[str]:
    registry = CollectorRegistry()
    Metrics(registry, (1.0,))
    return {metric.name for metric in registry.collect()}


def test_autoscaler_reads_the_servers_metrics_and_the_cpu_for_want_of_them(render: Render) -> None:
    rendered = render({"autoscaling": {"type": "hpa", "queueSeconds": {"target": 0.25}}})
    spec = rendered.one("HorizontalPodAutoscaler")["spec"]
    pods = {metric["pods"]["metric"]["name"]: metric["pods"]["target"] for metric in spec["metrics"] if "pods" in metric}
    assert pods == {
        "dragoman_estimated_queue_seconds": {"type": "AverageValue", "averageValue": "0.25"},
        "dragoman_num_requests_waiting": {"type": "AverageValue", "averageValue": "16"},
        "dragoman_slots_in_use": {"type": "AverageValue", "averageValue": "24"},
    }
    assert pods.keys() <= declared_metrics()
    assert [metric["type"] for metric in spec["metrics"]] == ["Pods", "Pods", "Pods", "Resource"]
    assert spec["behavior"]["scaleDown"]["stabilizationWindowSeconds"] == 300
    assert spec["behavior"]["scaleUp"]["stabilizationWindowSeconds"] == 0
    assert "replicas" not in rendered.one("Deployment")["spec"], "else each rollout would undo the scaling"


@pytest.mark.parametrize(
    ("config", "given", "target"),
    [
        ({}, None, 24),
        ({"max_slots": 256}, None, 96),
        ({"max_slots": 16, "replicas": 4}, None, 24),
        ({"max_slots": 1}, None, 1),
        ({"max_slots": None, "replicas": 0}, None, 24),
        ({"max_slots": 256}, 10, 10),
    ],
)
def test_slots_are_scaled_by_what_a_pod_has(render: Render, config: dict[str, Any], given: int | None, target: int) -> None:
    scaling = {"slotsInUse": {"target": given}, "keda": {"serverAddress": "http://prometheus:9090"}}
    spec = render({"autoscaling": {"type": "hpa"} | scaling, "config": config}).one("HorizontalPodAutoscaler")["spec"]
    targets = {metric["pods"]["metric"]["name"]: metric["pods"]["target"] for metric in spec["metrics"] if "pods" in metric}
    assert targets["dragoman_slots_in_use"] == {"type": "AverageValue", "averageValue": str(target)}
    spec = render({"autoscaling": {"type": "keda"} | scaling, "config": config}).one("ScaledObject")["spec"]
    assert spec["triggers"][2]["metadata"]["threshold"] == str(target)
    assert settings.ServerConfig.model_fields["max_slots"].default == 64, "which the chart repeats"


@pytest.mark.parametrize(("is_on", "wanted"), [(None, 0), (True, 1), (False, 0)])
def test_gpu_nodes_are_not_scaled_by_the_cpu_unless_asked_to(render: Render, is_on: bool | None, wanted: int) -> None:
    scaling = {"cpu": {"enabled": is_on}, "keda": {"serverAddress": "http://prometheus:9090"}}
    values = {"gpu": {"enabled": True}, "autoscaling": {"type": "hpa"} | scaling}
    metrics = render(values).one("HorizontalPodAutoscaler")["spec"]["metrics"]
    assert [metric["type"] for metric in metrics] == ["Pods"] * 3 + ["Resource"] * wanted
    triggers = render(values | {"autoscaling": {"type": "keda"} | scaling}).one("ScaledObject")["spec"]["triggers"]
    assert [trigger["type"] for trigger in triggers] == ["prometheus"] * 3 + ["cpu"] * wanted


def test_keda_asks_for_the_same_of_this_releases_pods(render: Render) -> None:
    keda = {"serverAddress": "http://prometheus:9090"}
    rendered = render({"autoscaling": {"type": "keda", "keda": keda}}, release="mt")
    assert rendered.all("HorizontalPodAutoscaler") == []
    spec = rendered.one("ScaledObject")["spec"]
    queue, waiting, slots, cpu = spec["triggers"]
    pods = '{namespace="translation",pod=~"mt-dragoman-[a-z0-9]+-[a-z0-9]+"}'
    assert queue["metadata"]["query"] == f"sum(max by (pod) (dragoman_estimated_queue_seconds{pods}))"
    assert waiting["metadata"]["query"] == f"sum(dragoman_num_requests_waiting{pods})"
    assert slots["metadata"]["query"] == f"sum(dragoman_slots_in_use{pods})"
    assert slots["metadata"]["threshold"] == "24"
    assert queue["metadata"]["ignoreNullValues"] == waiting["metadata"]["ignoreNullValues"] == "false"
    assert cpu == {"type": "cpu", "metricType": "Utilization", "metadata": {"value": "80"}}
    assert spec["scaleTargetRef"] == {"name": "mt-dragoman"}


@pytest.mark.parametrize(
    ("values", "is_there"),
    [
        ({}, True),
        ({"replicaCount": 1}, False),
        ({"replicaCount": 1, "autoscaling": {"type": "hpa", "minReplicas": 2}}, True),
        ({"replicaCount": 3, "autoscaling": {"type": "hpa", "minReplicas": 1}}, False),
        ({"podDisruptionBudget": {"enabled": False}}, False),
    ],
)
def test_a_disruption_budget_where_a_pod_can_be_spared(render: Render, values: dict[str, Any], is_there: bool) -> None:
    assert bool(render(values).all("PodDisruptionBudget")) is is_there


# --- GPU, models, monitoring


def test_gpu_nodes_get_the_image_with_cuda_and_the_gpu(render: Render) -> None:
    rendered = render({"gpu": {"enabled": True, "runtimeClassName": "nvidia"}, "nodeSelector": {"a": "b"}})
    assert rendered.container["image"] == "dragoman:0.1.0-cuda"
    assert rendered.container["resources"]["limits"] == {"cpu": "4", "memory": "16Gi", "nvidia.com/gpu": 1}
    assert render().container["resources"]["limits"] == {"cpu": "2", "memory": "2Gi"}
    assert rendered.pod["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    assert rendered.environment["DRAGOMAN_DEVICE"] == "cuda", "not auto, which would compute on the CPU"
    assert render({"gpu": {"enabled": True}, "config": {"device": "cuda:1"}}).environment["DRAGOMAN_DEVICE"] == "cuda:1"
    assert "DRAGOMAN_DEVICE" not in render().environment
    assert rendered.pod["runtimeClassName"] == "nvidia" and rendered.pod["nodeSelector"] == {"a": "b"}
    assert render({"gpu": {"enabled": True}, "image": {"tag": "mine"}}).container["image"] == "dragoman:mine"


def test_models_are_mounted_read_only_from_where_the_values_say(render: Render) -> None:
    claim = render({"models": {"source": "pvc", "pvc": {"claimName": "bundles", "subPath": "v3"}}})
    assert {"name": "models", "mountPath": "/models", "readOnly": True, "subPath": "v3"} in claim.container["volumeMounts"]
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "bundles", "readOnly": True}} in claim.pod["volumes"]
    reference = f"registry.example/models:3@sha256:{'ab' * 32}"
    image = render({"models": {"source": "oci", "oci": {"reference": reference}}})
    assert {"name": "models", "image": {"reference": reference, "pullPolicy": "IfNotPresent"}} in image.pod["volumes"]
    assert all(mount["name"] != "models" for mount in render().container["volumeMounts"])


def test_a_changed_list_of_archives_replaces_the_pods(render: Render) -> None:
    def annotations(sha256: str) -> dict[str, str]:
        archives = [{"url": "https://models.example/a.tar", "sha256": sha256}]
        values = {"models": {"source": "download", "download": {"archives": archives}}}
        found: dict[str, str] = render(values).one("Deployment")["spec"]["template"]["metadata"]["annotations"]
        return found

    assert annotations("0" * 64) == annotations("0" * 64) != annotations("1" * 64)


def test_dashboards_arrive_as_they_are_in_the_files(render: Render, helm: Any) -> None:
    rendered = render({"metrics": {"dashboards": {"enabled": True}}})
    dashboards = {path.name: path.read_text() for path in (helm.chart / "files/dashboards").glob("*.json")}
    maps = [item for item in rendered.all("ConfigMap") if "dashboard" in item["metadata"]["name"]]
    assert {name: text for item in maps for name, text in item["data"].items()} == dashboards
    assert all(item["metadata"]["labels"]["grafana_dashboard"] == "1" for item in maps)


def test_common_labels_are_everywhere_and_cannot_break_the_selectors(render: Render) -> None:
    rendered = render({"commonLabels": {"team": "language", "app.kubernetes.io/name": "other"}})
    for item in rendered.objects:
        assert item["metadata"]["labels"]["team"] == "language"
        assert item["metadata"]["labels"]["app.kubernetes.io/name"] == "dragoman"
