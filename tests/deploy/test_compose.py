"""The compose file and Grafana's provisioning, against the files they name and the programs they start."""

import re
from typing import Any

import pytest

from dragoman.server.config import ServerConfig
from tests.deploy.conftest import ROOT, load

FOLDER = ROOT / "deploy/docker"


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    loaded: dict[str, Any] = load("docker/compose.yaml")["services"]
    return loaded


def test_server_and_load_generator_are_our_image_and_confined(services: dict[str, Any]) -> None:
    assert services.keys() == {"dragoman", "prometheus", "grafana", "load"}
    assert [service.get("profiles") for service in services.values()].count(["load"]) == 1 == len(services["load"]["profiles"])
    build = services["dragoman"]["build"]
    context = (FOLDER / build["context"]).resolve()
    assert (context / build["dockerfile"]).is_file() and (context / "dragoman/__init__.py").is_file()
    assert services["load"]["image"] == services["dragoman"]["image"]
    for name in ("dragoman", "load"):
        assert services[name]["read_only"] is True and services[name]["cap_drop"] == ["ALL"]
        assert services[name]["security_opt"] == ["no-new-privileges:true"]
        assert [mount.partition(":")[0] for mount in services[name]["tmpfs"]] == ["/tmp"]
    for name in ("prometheus", "grafana"):
        assert re.search(r":v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}$", services[name]["image"])


def test_ports_times_and_options_are_those_of_the_programs(services: dict[str, Any]) -> None:
    from typer.main import get_command

    from dragoman.load.command import app

    fields = ServerConfig.model_fields
    inner = {int(port.rsplit(":", 1)[1]) for port in services["dragoman"]["ports"]}
    assert inner == {fields[name].default for name in ("port", "http_port", "metrics_port")}
    assert all(port.startswith("127.0.0.1:") for service in services.values() for port in service.get("ports", []))
    assert int(services["dragoman"]["stop_grace_period"].removesuffix("s")) >= fields["drain_seconds"].default + 11
    for name in ("prometheus", "load"):
        assert services[name]["depends_on"] == {"dragoman": {"condition": "service_healthy"}}
    assert services["load"]["healthcheck"] == {"disable": True}
    name, *arguments = services["load"]["command"]
    params = get_command(app).make_context(name, list(arguments)).params
    assert (name, params["server"], list(params["metrics"])) == ("load", "dragoman:8500", ["http://dragoman:8501/metrics"])


def test_mounted_folders_hold_the_files_that_are_read(services: dict[str, Any]) -> None:
    mounts = [mount for service in services.values() for mount in service.get("volumes", [])]
    ours = [mount for mount in mounts if mount.startswith(".")]
    assert {mount.partition(":")[0] for mount in ours} == {*("../prometheus", "../grafana/provisioning", "../grafana/dashboards")}
    assert all(mount.endswith(":ro") and (FOLDER / mount.partition(":")[0]).is_dir() for mount in ours)
    volumes = {mount.partition(":")[0] for mount in mounts if mount not in ours}
    assert volumes == load("docker/compose.yaml")["volumes"].keys()
    assert "--config.file=/etc/prometheus/prometheus.yml" in services["prometheus"]["command"]
    assert "../prometheus:/etc/prometheus:ro" in services["prometheus"]["volumes"]
    (source,) = load("grafana/provisioning/datasources/prometheus.yaml")["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"] is True
    assert services["grafana"]["environment"][source["url"].removeprefix("$")] == "http://prometheus:9090"
    (provider,) = load("grafana/provisioning/dashboards/dragoman.yaml")["providers"]
    targets = {mount.split(":")[1] for mount in services["grafana"]["volumes"]}
    assert targets >= {provider["options"]["path"], "/etc/grafana/provisioning"}
