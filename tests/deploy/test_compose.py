"""The compose file and Grafana's provisioning, against the files they name and the programs they start."""

import re
from pathlib import Path
from typing import Any

import pytest

from dragoman.server.config import ServerConfig


@pytest.fixture(scope="module")
def folder(root: Path) -> Path:
    return root / "deploy/docker"


@pytest.fixture(scope="module")
def compose(folder: Path) -> dict[str, Any]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
    loaded: dict[str, Any] = yaml.safe_load((folder / "compose.yaml").read_text())
    return loaded


def test_all_four_are_there_and_the_load_only_on_request(compose: dict[str, Any]) -> None:
    assert compose["services"].keys() == {"dragoman", "prometheus", "grafana", "load"}
    assert compose["services"]["load"]["profiles"] == ["load"]
    assert all("profiles" not in service for name, service in compose["services"].items() if name != "load")


def test_the_server_is_built_from_a_file_that_is_there(compose: dict[str, Any], folder: Path) -> None:
    build = compose["services"]["dragoman"]["build"]
    context = (folder / build["context"]).resolve()
    assert (context / build["dockerfile"]).is_file() and (context / "dragoman/__init__.py").is_file()
    assert compose["services"]["load"]["image"] == compose["services"]["dragoman"]["image"]


def test_images_of_others_are_pinned(compose: dict[str, Any]) -> None:
    for name in ("prometheus", "grafana"):
        assert re.search(r":v?\d+\.\d+\.\d+@sha256:[0-9a-f]{64}$", compose["services"][name]["image"])


def test_ports_are_the_servers_own_and_open_to_this_machine_only(compose: dict[str, Any]) -> None:
    fields = ServerConfig.model_fields
    inner = {int(port.rsplit(":", 1)[1]) for port in compose["services"]["dragoman"]["ports"]}
    assert inner == {fields[name].default for name in ("port", "http_port", "metrics_port")}
    for service in compose["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


@pytest.mark.parametrize("name", ["dragoman", "load"])
def test_our_containers_are_read_only_and_without_capabilities(compose: dict[str, Any], name: str) -> None:
    service = compose["services"][name]
    assert service["read_only"] is True and service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    assert [mount.partition(":")[0] for mount in service["tmpfs"]] == ["/tmp"]


def test_the_server_gets_the_time_it_needs_to_drain(compose: dict[str, Any]) -> None:
    seconds = int(compose["services"]["dragoman"]["stop_grace_period"].removesuffix("s"))
    assert seconds >= ServerConfig.model_fields["drain_seconds"].default + 11


def test_who_needs_the_server_waits_for_its_health(compose: dict[str, Any]) -> None:
    for name in ("prometheus", "load"):
        assert compose["services"][name]["depends_on"] == {"dragoman": {"condition": "service_healthy"}}
    assert compose["services"]["load"]["healthcheck"] == {"disable": True}


def test_the_load_generator_knows_its_options(compose: dict[str, Any]) -> None:
    from typer.main import get_command

    from dragoman.load.command import app

    name, *arguments = compose["services"]["load"]["command"]
    assert name == "load"
    context = get_command(app).make_context("load", list(arguments))
    assert context.params["server"] == "dragoman:8500" and list(context.params["metrics"]) == ["http://dragoman:8501/metrics"]


def test_folders_that_are_mounted_are_the_projects_and_volumes_are_declared(compose: dict[str, Any], folder: Path) -> None:
    mounts = [mount for service in compose["services"].values() for mount in service.get("volumes", [])]
    ours = {mount.partition(":")[0] for mount in mounts if mount.startswith(".")}
    assert ours == {"../prometheus", "../grafana/provisioning", "../grafana/dashboards"}
    assert (folder / "../grafana/provisioning").is_dir()
    assert {mount.partition(":")[0] for mount in mounts if not mount.startswith(".")} == compose["volumes"].keys()
    assert all(mount.endswith(":ro") for mount in mounts if mount.startswith("."))


def test_grafana_finds_its_data_source_and_its_dashboards(compose: dict[str, Any], root: Path) -> None:
    yaml = pytest.importorskip("yaml")
    provisioning = root / "deploy/grafana/provisioning"
    grafana = compose["services"]["grafana"]
    (source,) = yaml.safe_load((provisioning / "datasources/prometheus.yaml").read_text())["datasources"]
    assert source["type"] == "prometheus" and source["isDefault"] is True
    variable = source["url"].removeprefix("$")
    assert grafana["environment"][variable] == "http://prometheus:9090"
    (provider,) = yaml.safe_load((provisioning / "dashboards/dragoman.yaml").read_text())["providers"]
    targets = {mount.split(":")[1] for mount in grafana["volumes"]}
    assert provider["options"]["path"] in targets and "/etc/grafana/provisioning" in targets


def test_prometheus_reads_the_configuration_that_is_mounted(compose: dict[str, Any]) -> None:
    service = compose["services"]["prometheus"]
    assert "--config.file=/etc/prometheus/prometheus.yml" in service["command"]
    assert "../prometheus:/etc/prometheus:ro" in service["volumes"]
