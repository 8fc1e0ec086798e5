"""Models as the chart brings them: what their files say, where they are pulled from, and who must have signed them."""

import json
import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from dragoman.cli import main as dragoman
from dragoman.export.manifest import check_name
from dragoman.server.repository.bundles import find_models
from dragoman.server.repository.found import FoundVersion
from dragoman.server.repository.model_file import ModelFile, read_model_file
from dragoman.server.repository.policy import NO_OVERRIDES, wanted
from tests.deploy.test_chart_options import VERSIONS, assert_valid

Render = Callable[..., Any]
STORE = {"models": {"source": "store", "store": {"addresses": [{"address": "s3://models/production"}]}}}
DIGEST = "ab" * 32
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
        "keep_loaded": "1.5h",
    },
    "swap": {"mode": "restart", "probation_seconds": 90, "max_error_rate": 0.001, "max_latency_factor": 2.5},
}


def files_of(rendered: Any) -> dict[str, str]:
    """Return the files of models of a release, by name."""
    (found,) = [item for item in rendered.all("ConfigMap") if item["metadata"]["name"].endswith("-model-files")]
    return dict(found.get("data") or {})


def test_the_server_reads_of_a_models_file_what_the_values_say(render: Render, tmp_path: Path) -> None:
    (text,) = files_of(render({"models": {"files": {"en-de": WHOLE_FILE}}})).values()
    path = tmp_path / "en-de.toml"
    path.write_text(text)
    read = read_model_file(path)
    wanted = ModelFile.model_validate(WHOLE_FILE)
    assert read == wanted and read.settings.keep_loaded == 5400
    assert {name for name, value in read.settings if value is None} == set(), "every setting that a file may have is among them"
    assert isinstance(tomllib.loads(text)["settings"]["max_waiting_tokens"], int)


def test_a_file_may_say_little_or_nothing(render: Render) -> None:
    files = {"en-de": {"versions": {"latest": 2, "default": None}, "labels": {}, "swap": None}, "en-fr": {}, "de-en": None}
    texts = files_of(render({"models": {"files": files}}))
    assert {name: tomllib.loads(text) for name, text in texts.items()} == {"en-de.toml": {"versions": {"latest": 2}}}
    assert files_of(render()) == {}


def test_names_that_a_model_can_have_are_taken_and_a_label_may_be_any_that_a_version_can_have(render: Render) -> None:
    name = "M2M-100.de_" + "x" * 117
    check_name(name)
    texts = files_of(render({"models": {"files": {name: {"labels": {"A.b_c-1": "v1.2.9"}}}}}))
    assert tomllib.loads(texts[f"{name}.toml"]) == {"labels": {"A.b_c-1": "v1.2.9"}}


def test_files_lie_beside_the_models_wherever_those_come_from_and_change_under_running_pods(render: Render) -> None:
    sources: list[dict[str, Any]] = [
        {},
        {"source": "pvc", "pvc": {"claimName": "models"}},
        {"source": "oci", "oci": {"reference": f"registry.example/models@sha256:{DIGEST}"}},
        STORE["models"],
    ]
    for source in sources:
        rendered, other = (render({"models": source | {"files": {"en-de": {"versions": {"latest": number}}}}}) for number in (1, 2))
        folder = rendered.environment["DRAGOMAN_MODEL_FILES"]
        (mount,) = [mount for mount in rendered.container["volumeMounts"] if mount["mountPath"] == folder]
        assert "subPath" not in mount, "else changes would not arrive"
        (volume,) = [volume for volume in rendered.pod["volumes"] if volume["name"] == mount["name"]]
        assert volume["configMap"]["name"] == "dragoman-model-files"
        assert rendered.one("Deployment") == other.one("Deployment") and files_of(rendered) != files_of(other)


def test_a_start_reads_the_files_as_they_are_mounted(render: Render, tmp_path: Path) -> None:
    (tmp_path / "models/tiny/1").mkdir(parents=True)
    (tmp_path / "models/tiny/1/bundle.json").write_text('{"name": "tiny"}')
    (tmp_path / "files").mkdir()
    for name, text in files_of(render({"models": {"files": {"tiny": {"labels": {"stable": "1"}}}}})).items():
        (tmp_path / "files" / name).write_text(text)
    (model,) = find_models(tmp_path / "models", tmp_path / "files")
    assert model.file.labels == {"stable": "1"}


# --- stores


def pulls(rendered: Any) -> list[dict[str, Any]]:
    return [container for container in rendered.pod.get("initContainers", []) if container["name"].startswith("models-")]


def test_each_address_is_pulled_before_the_start_into_what_the_server_reads(render: Render) -> None:
    addresses = [
        {"address": f"oci://registry.example/models/en-de@sha256:{DIGEST}"},
        {"address": "https://models.example/en-fr.tar.gz", "sha256": DIGEST},
    ]
    rendered = render({"models": {"source": "store", "store": {"addresses": addresses, "cacheGib": 2.5, "silenceSeconds": 60}}})
    first, second = pulls(rendered)
    options = ["--cache-gib=2.5", "--silence=60"]
    assert first["args"] == ["pull", addresses[0]["address"], "/models", *options]
    assert second["args"] == ["pull", addresses[1]["address"], "/models", *options, f"--sha256={DIGEST}"]
    assert first["image"] == rendered.container["image"] and "command" not in first
    assert first["securityContext"] == rendered.container["securityContext"]
    assert first["resources"] == rendered.container["resources"]
    writable = {mount["mountPath"]: mount for mount in first["volumeMounts"] if not mount.get("readOnly")}
    assert writable.keys() == {"/models", "/tmp"}
    (mount,) = [mount for mount in rendered.container["volumeMounts"] if mount["mountPath"] == "/models"]
    assert mount["readOnly"] and mount["name"] == writable["/models"]["name"]
    assert {"name": "models", "emptyDir": {"sizeLimit": "8Gi"}} in rendered.pod["volumes"]


def test_no_gpu_is_asked_for_to_pull(render: Render) -> None:
    (pull,) = pulls(render(STORE | {"gpu": {"enabled": True}}))
    assert pull["resources"]["limits"] == {"cpu": "4", "memory": "16Gi"}


def test_pods_may_share_what_was_pulled(render: Render) -> None:
    store = STORE["models"]["store"] | {"claimName": "models"}  # type: ignore[operator]
    rendered = render({"models": {"source": "store", "store": store}})
    assert {"name": "models", "persistentVolumeClaim": {"claimName": "models"}} in rendered.pod["volumes"]


def test_credentials_are_of_the_pull_alone(render: Render) -> None:
    secret = {"valueFrom": {"secretKeyRef": {"name": "token", "key": "token"}}}
    store: dict[str, Any] = STORE["models"]["store"] | {  # type: ignore[operator]
        "secretName": "registry",
        "env": [{"name": "DRAGOMAN_STORE_TOKEN"} | secret, {"name": "DOCKER_CONFIG", "value": "/etc/dragoman/store"}],
        "envFrom": [{"secretRef": {"name": "bucket"}}],
    }
    rendered = render({"models": {"source": "store", "store": store}})
    (pull,) = pulls(rendered)
    assert pull["env"] == store["env"] and pull["envFrom"] == store["envFrom"]
    (mount,) = [mount for mount in pull["volumeMounts"] if mount["mountPath"] == "/etc/dragoman/store"]
    assert mount["readOnly"]
    assert not {variable["name"] for variable in store["env"]} & {variable["name"] for variable in rendered.container["env"]}
    assert "envFrom" not in rendered.container
    assert "/etc/dragoman/store" not in {mount["mountPath"] for mount in rendered.container["volumeMounts"]}


def test_what_the_init_container_is_told_is_what_pull_takes(render: Render) -> None:
    command = typer.main.get_command(dragoman.app).commands.get("pull")  # type: ignore[attr-defined]
    if command is None:
        pytest.skip("this copy has no dragoman pull")
    values = {"source": "store", "store": {"addresses": [{"address": "http://127.0.0.1/a.tar", "sha256": DIGEST}]}}
    (pull,) = pulls(render({"models": values | {"signatures": {"secretName": "keys"}}}))
    context = command.make_context("pull", pull["args"][1:])
    assert context.params["address"] == "http://127.0.0.1/a.tar" and Path(context.params["folder"]) == Path("/models")
    assert (context.params["sha256"], context.params["cache_gib"], context.params["silence"]) == (DIGEST, 8, 30)
    assert Path(context.params["require_signatures"]) == Path("/etc/dragoman/keys")


ADDRESSES = st.one_of(
    st.sampled_from(["s3://models", "gs://b/a/b", "az://c/a", "https://h:8443/a", "http://127.0.0.1:80/a", "oci://h:5000/a/b:7"]),
    st.builds(lambda tag: f"oci://registry.example/en-de:{tag}", st.from_regex(r"\A[A-Za-z0-9_][A-Za-z0-9._-]{0,20}\Z")),
    st.builds(
        lambda path: f"s3://models/{path}", st.from_regex(r"\A[A-Za-z0-9/._-]{1,30}\Z").filter(lambda path: ".t" not in path)
    ),
)


@pytest.fixture(scope="module")
def address_schema(root: Path) -> Any:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed: make setup")
    schema = json.loads((root / "deploy/helm/dragoman/values.schema.json").read_text())
    return jsonschema.Draft7Validator(schema["properties"]["models"]["properties"]["store"]["properties"]["addresses"]["items"])


@pytest.fixture(scope="module")
def parse() -> Any:
    return pytest.importorskip("dragoman.server.stores.address", reason="this copy has no stores").Address.parse


@given(address=ADDRESSES)
def test_addresses_that_pull_takes_are_taken(address_schema: Any, parse: Callable[[str], object], address: str) -> None:
    parse(address)
    address_schema.validate({"address": address})


# --- signatures


@pytest.mark.parametrize(
    ("signatures", "volume"),
    [
        ({"configMapName": "keys"}, {"configMap": {"name": "keys"}}),
        ({"secretName": "keys"}, {"secret": {"secretName": "keys", "defaultMode": 0o440}}),
    ],
)
def test_who_pulls_and_who_serves_ask_for_the_same_signatures(
    render: Render, signatures: dict[str, str], volume: dict[str, Any]
) -> None:
    rendered = render({"models": STORE["models"] | {"signatures": signatures}})
    folder = rendered.environment["DRAGOMAN_REQUIRE_SIGNATURES"]
    (pull,) = pulls(rendered)
    assert f"--require-signatures={folder}" in pull["args"]
    for container in (pull, rendered.container):
        assert {"name": "keys", "mountPath": folder, "readOnly": True} in container["volumeMounts"]
    assert {"name": "keys"} | volume in rendered.pod["volumes"]


def test_signatures_are_asked_for_of_bundles_from_anywhere_and_only_where_there_are_keys(render: Render) -> None:
    assert "DRAGOMAN_REQUIRE_SIGNATURES" in render({"models": {"signatures": {"configMapName": "keys"}}}).environment
    (pull,) = pulls(render(STORE))
    assert "DRAGOMAN_REQUIRE_SIGNATURES" not in render(STORE).environment
    assert not any("signatures" in argument for argument in pull["args"])
    address = [{"address": "http://models.example/a"}]
    values = {"source": "store", "store": {"addresses": address}, "signatures": {"configMapName": "keys"}}
    assert pulls(render({"models": values})), "what is signed may come without TLS"


# --- the manual


def blocks(root: Path) -> list[dict[str, Any]]:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
    texts = re.findall(r"```yaml\n(.*?)```", (root / "docs/kubernetes.md").read_text(encoding="utf-8"), re.DOTALL)
    return [content for content in map(yaml.safe_load, texts) if isinstance(content, dict)]


def test_the_manuals_job_is_what_kubernetes_and_pull_take(root: Path, render: Render) -> None:
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: make setup")
    (job,) = [content for content in blocks(root) if content.get("kind") == "Job"]
    for version in VERSIONS:
        assert_valid(job, version)
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    (pull,) = pulls(render(STORE))
    assert container["args"] == pull["args"][:3] and container["securityContext"] == pull["securityContext"]
    assert {mount["mountPath"] for mount in container["volumeMounts"]} == {"/models", "/tmp"}
    assert pod["securityContext"]["runAsUser"] == render().pod["securityContext"]["runAsUser"], "who can write what pods can read"


def test_the_manuals_rollout_goes_as_it_says(root: Path, render: Render) -> None:
    """Version 3 serves; 4 comes beside it, gets a tenth, then all, and goes back by the file of the step before."""
    found = [FoundVersion(name, Path(name), (1, 1, number)) for number, name in enumerate(("3", "4"))]
    decided = []
    for values in (content for content in blocks(root) if "en-de" in content.get("models", {}).get("files", {})):
        text = files_of(render({"models": {"files": values["models"]["files"]}}))["en-de.toml"]
        target = wanted(found, ModelFile.model_validate(tomllib.loads(text)), {}, NO_OVERRIDES)
        assert not target.problems
        decided.append(({version.name for version in target.versions}, target.shares))
    assert decided == [({"3", "4"}, {"3": 1}), ({"3", "4"}, {"3": 0.9, "4": 0.1}), ({"3", "4"}, {"4": 1})]
