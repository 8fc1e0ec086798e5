"""Models as the chart brings them: their files, the stores they are pulled from, and the signatures they need."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from dragoman.cli import main as dragoman
from dragoman.server.models.discovery import FoundVersion
from dragoman.server.models.model_file import ModelFile, read_model_file
from dragoman.server.models.policy import NO_OVERRIDES, wanted
from tests.deploy.conftest import Render, Rendered, Values, manual_blocks

DIGEST = "ab" * 32
STORE: Values = {"models.source": "store", "models.store.addresses": [{"address": "s3://models/production"}]}
WHOLE_FILE = {
    "versions": {"only": ["3", "4-rc.1"], "default": "stable", "sticky": "caller"},
    "labels": {"stable": "3", "canary": "4-rc.1"},
    "weights": {"canary": 0.05, "3": 0},
    "settings": {
        "num_threads": 2,
        "replicas": 2,
        "device": "cpu",
        "gpu_memory_gib": 1.5,
        "max_slots": 32,
        "max_slots_per_request": 8,
        "max_waiting_requests": 1000000,
        "max_waiting_tokens": 100000000,
        "max_priority": -3,
        "is_ready_needed": False,
        "one_sentence": True,
        "split": "sentences",
        "glossary": "house-style",
        "keep_loaded": "1.5h",
    },
    "swap": {"mode": "restart", "probation_seconds": 90, "max_error_rate": 0.001, "max_latency_factor": 2.5},
}


def files_of(rendered: Rendered) -> dict[str, Any]:
    """Return the files of models of a release, by name, as the server's TOML parser reads them."""
    return {name: tomllib.loads(text) for name, text in (rendered.find("ConfigMap:dragoman-model-files data") or {}).items()}


def test_server_reads_the_file_of_a_model_as_the_values_say(render: Render, tmp_path: Path) -> None:
    (text,) = render({"models.files": {"en-de": WHOLE_FILE}}).find("ConfigMap:dragoman-model-files data").values()
    (tmp_path / "en-de.toml").write_text(text)
    read = read_model_file(tmp_path / "en-de.toml")
    assert read == ModelFile.model_validate(WHOLE_FILE) and read.settings.keep_loaded == 5400
    assert {name for name, value in read.settings if value is None} == set(), "WHOLE_FILE has every setting"
    name = "M2M-100.de_" + "x" * 117  # the longest that a model may have
    files = {"en-de": {"versions": {"latest": 2, "default": None}, "labels": {}, "swap": None}, "en-fr": {}, "de-en": None}
    found = files_of(render({"models.files": files | {name: {"labels": {"A.b_c-1": "v1.2.9"}}}}))
    assert found == {"en-de.toml": {"versions": {"latest": 2}}, f"{name}.toml": {"labels": {"A.b_c-1": "v1.2.9"}}}


def test_changed_files_reach_running_pods_without_a_rollout(render: Render) -> None:
    rendered, other = (render({"models.files": {"en-de": {"versions": {"latest": n}}}}) for n in (1, 2))
    assert rendered.find("Deployment") == other.find("Deployment") and files_of(rendered) != files_of(other)
    folder = rendered.find("env DRAGOMAN_MODEL_FILES")
    mount = {"name": "model-files", "mountPath": folder, "readOnly": True}  # changes would not arrive through a subPath
    assert rendered.find("container volumeMounts model-files") == mount
    assert rendered.find("pod volumes model-files configMap name") == "dragoman-model-files"


def test_each_address_is_pulled_before_the_start_into_the_folder_of_models(render: Render) -> None:
    addresses = [{"address": f"oci://registry.example/en-de@sha256:{DIGEST}"}, {"address": "https://models.example/a.tar.gz"}]
    addresses[1]["sha256"] = DIGEST
    store = {"addresses": addresses, "cacheGib": 2.5, "silenceSeconds": 60}
    rendered = render({"models": {"source": "store", "store": store}, "gpu.enabled": True})
    first, second = rendered.find("pod initContainers")
    options = ["--cache-gib=2.5", "--silence=60"]
    assert first["args"] == ["pull", addresses[0]["address"], "/models", *options]
    assert second["args"] == ["pull", addresses[1]["address"], "/models", *options, f"--sha256={DIGEST}"]
    assert first["image"] == rendered.find("container image") and "command" not in first
    assert first["securityContext"] == rendered.find("container securityContext")
    assert first["resources"]["limits"] == {"cpu": "4", "memory": "16Gi"}, "no GPU is asked for to pull"
    assert {mount["mountPath"] for mount in first["volumeMounts"] if not mount.get("readOnly")} == {"/models", "/tmp"}
    assert rendered.find("container volumeMounts models readOnly") is True
    assert rendered.find("pod volumes models emptyDir") == {"sizeLimit": "8Gi"}
    claimed = render(STORE | {"models.store.claimName": "models"})
    assert claimed.find("pod volumes models persistentVolumeClaim") == {"claimName": "models"}


def test_credentials_are_given_to_the_pull_alone(render: Render) -> None:
    secret = {"valueFrom": {"secretKeyRef": {"name": "token", "key": "token"}}}
    env = [{"name": "DRAGOMAN_STORE_TOKEN"} | secret, {"name": "DOCKER_CONFIG", "value": "/etc/dragoman/store"}]
    spec = {"env": env, "envFrom": [{"secretRef": {"name": "a"}}]}
    rendered = render(STORE | {"models.store.secretName": "registry", "models.store.containerSpec": spec})
    (pull,) = rendered.find("pod initContainers")
    assert pull["env"] == env and pull["envFrom"] == [{"secretRef": {"name": "a"}}]
    assert {"name": "store", "mountPath": "/etc/dragoman/store", "readOnly": True} in pull["volumeMounts"]
    assert not {variable["name"] for variable in env} & rendered.find("env").keys()
    assert rendered.find("container envFrom") is None and rendered.find("container volumeMounts store") is None


@pytest.mark.parametrize(
    ("kind", "volume"),
    [("configMapName", {"configMap": {"name": "keys"}}), ("secretName", {"secret": {"secretName": "keys", "defaultMode": 0o440}})],
)
def test_pull_and_server_require_the_same_signatures(render: Render, kind: str, volume: Values) -> None:
    address = [{"address": "http://127.0.0.1/a"}]  # a signed bundle may come without TLS
    rendered = render({"models.source": "store", "models.store.addresses": address, f"models.signatures.{kind}": "keys"})
    (pull,) = rendered.find("pod initContainers")
    context = typer.main.get_command(dragoman.app).commands["pull"].make_context("pull", pull["args"][1:])  # type: ignore[attr-defined]
    assert context.params["address"] == "http://127.0.0.1/a" and Path(context.params["folder"]) == Path("/models")
    assert (context.params["cache_gib"], context.params["silence"]) == (8, 30)
    assert str(context.params["require_signatures"]) == rendered.find("env DRAGOMAN_REQUIRE_SIGNATURES") == "/etc/dragoman/keys"
    for container in (pull, rendered.find("container")):
        assert {"name": "keys", "mountPath": "/etc/dragoman/keys", "readOnly": True} in container["volumeMounts"]
    assert rendered.find("pod volumes keys") == {"name": "keys"} | volume


def test_rollout_of_the_manual_goes_as_it_says(render: Render) -> None:
    """Version 3 serves; 4 comes beside it, gets a tenth, then all."""
    found, decided = [FoundVersion(name, Path(name), (1, 1, number)) for number, name in enumerate(("3", "4"))], []
    for values in (block for block in manual_blocks() if "en-de" in block.get("models", {}).get("files", {})):
        file = ModelFile.model_validate(files_of(render({"models.files": values["models"]["files"]}))["en-de.toml"])
        target = wanted(found, file, {}, NO_OVERRIDES)
        assert not target.problems
        decided.append(({version.name for version in target.versions}, target.shares))
    assert decided == [({"3", "4"}, {"3": 1}), ({"3", "4"}, {"3": 0.9, "4": 0.1}), ({"3", "4"}, {"4": 1})]
