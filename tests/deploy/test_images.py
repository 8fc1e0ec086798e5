"""The Dockerfiles, and the locks of the packages that they install."""

import json
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from dragoman.cli import main as dragoman
from dragoman.server import config as settings
from tests.deploy.conftest import ROOT, program

FOLDER = ROOT / "deploy/docker"
KINDS = ("cpu", "cuda")

Stages = dict[str, list[tuple[str, str]]]


@pytest.fixture(params=KINDS)
def stages(request: pytest.FixtureRequest) -> Stages:
    """Return the instructions of a Dockerfile, by stage; the first is `FROM` with the base image."""
    text = re.sub(r"^\s*#.*\n", "", (FOLDER / f"{request.param}.Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    found: Stages = {}
    for line in filter(None, re.sub(r"\s*\\\n\s*", " ", text).splitlines()):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            rest, _, name = rest.partition(" AS ")
            found[name] = []
        if found:
            found[name].append((instruction, rest.strip()))
    return found


def texts(stage: list[tuple[str, str]], instruction: str) -> list[str]:
    return [text for name, text in stage if name == instruction]


def test_server_is_confined_and_starts_as_the_program_does(stages: Stages, monkeypatch: pytest.MonkeyPatch) -> None:
    server = stages["bare"]
    assert all(texts(stage, "FROM")[0] in {*stages, "${PYTHON_IMAGE}"} for stage in stages.values())
    assert stages["baked"] == [("FROM", "bare"), ("COPY", "--from=bundles /models /models")], "the same user, the same entry"
    user, _, group = texts(server, "USER")[-1].partition(":")
    assert int(user) > 0 and int(group) > 0
    position = [name for name, _ in server].index("USER")
    assert not {"RUN", "COPY", "ADD"} & {name for name, _ in server[position:]}, "all files belong to root"
    assert texts(server, "STOPSIGNAL")[-1] == "SIGTERM" and json.loads(texts(server, "CMD")[-1]) == ["serve"]
    assert json.loads(texts(server, "ENTRYPOINT")[-1]) == ["/opt/dragoman/bin/dragoman"], "no shell in between"
    _, _, command = texts(server, "HEALTHCHECK")[-1].partition(" CMD ")
    entry, name, *arguments = json.loads(command)
    fields = settings.ServerConfig.model_fields  # tests set a port of HTTP themselves
    assert entry == "/opt/dragoman/bin/dragoman" and name in typer.main.get_command(dragoman.app).commands  # type: ignore[attr-defined]
    assert arguments == ["--server", f"127.0.0.1:{fields['port'].default}"]
    variables = {key: value.strip('"') for text in texts(server, "ENV") for key, value in re.findall(r'(\w+)=("[^"]*"|\S+)', text)}
    for variable, value in variables.items():
        if variable.startswith("DRAGOMAN_"):
            monkeypatch.setenv(variable, value)
    read = settings.load({})
    exposed = {int(port) for port in texts(server, "EXPOSE")[-1].split()}
    assert {read.host, read.http_host, read.metrics_host} == {"0.0.0.0"}
    assert read.models == Path("/models") and exposed == {read.port, fields["http_port"].default, read.metrics_port}
    assert variables["HOME"] == "/tmp" and not texts(server, "VOLUME"), "a volume would be writable although the root is not"


def test_packages_have_checksums_and_none_is_pytorch(stages: Stages) -> None:
    for name, stage in stages.items():
        commands = re.findall(r"pip (install|wheel|download) ([^&]+)", " ".join(texts(stage, "RUN")))
        assert bool(commands) is (name in ("wheel", "packages", "bundles")), name
        for kind, options in commands:
            is_locked = "--require-hashes" in options and "-r /tmp/requirements.txt" in options
            assert is_locked or ("--no-deps" in options and "--no-index" in options), (name, options)
            assert kind != "wheel" or "--no-build-isolation" in options, "else the build system comes from anywhere"
    assert "find_spec('torch') is not None" in texts(stages["packages"], "RUN")[-1], "the build itself fails with PyTorch"
    copied = " ".join(text for name in ("bare", "baked") for text in texts(stages[name], "COPY"))
    assert set(re.findall(r"--from=(\S+)", copied)) == {"packages", "bundles"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_folder_of_the_package_is_sent_to_the_build(kind: str) -> None:
    links = [path for path in (ROOT / "dragoman").rglob("*") if path.is_symlink()]
    folders = {"dragoman"} | {path.resolve().relative_to(ROOT.resolve()).parts[0] for path in links}
    assert {f"!{folder}/**" for folder in folders} <= set((FOLDER / f"{kind}.Dockerfile.dockerignore").read_text().splitlines())


def locked(kind: str) -> dict[str, Version]:
    """Return the version of each package of a lock file, all of which must have checksums."""
    text, found = (FOLDER / f"requirements-{kind}.txt").read_text(), {}
    assert "://" not in text and "--index" not in text and "--find-links" not in text
    for line in text.replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            name, version = re.match(r"([\w.-]+)==(\S+)", line).groups()  # type: ignore[union-attr]
            assert "--hash=sha256:" in line, name
            found[canonicalize_name(name)] = Version(version)
    return found


def asked_for(project: dict[str, Any], *extras: str) -> Iterator[Requirement]:
    """Yield the project's dependencies, those of its extras, and of the extras that these name."""
    yield from map(Requirement, project["dependencies"])
    for wanted in (Requirement(text) for extra in extras for text in project["optional-dependencies"][extra]):
        if wanted.name == project["name"]:
            yield from asked_for(project, *wanted.extras)
        else:
            yield wanted


@pytest.mark.parametrize("kind", [*KINDS, "cpu-ray", "cuda-ray", "build", "export"])
def test_locks_hold_every_requirement_in_the_tested_version(kind: str) -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = (FOLDER / "requirements-build.in").read_text().splitlines()
    assert set(content["build-system"]["requires"]) <= set(asked), "requirements-build.in repeats the build system"
    runtime = ("tracing", "stores", "detect")
    extras = {"cpu": ("cpu", *runtime), "cuda": ("gpu", *runtime), "export": ("cpu", "export")}
    extras |= {"cpu-ray": ("cpu", "ray"), "cuda-ray": ("gpu", "ray")}
    wanted = [Requirement(line) for line in asked if not line.startswith("#")]
    if kind != "build":
        wanted = list(asked_for(content["project"], *extras[kind]))
    found = locked(kind)
    for requirement in wanted:
        version = found.get(canonicalize_name(requirement.name))
        assert version is not None and version in requirement.specifier, f"{requirement}: run make locks"
    if kind in (*KINDS, "cpu-ray", "cuda-ray"):
        tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
        versions = {canonicalize_name(name): Version(version) for name, version in tested.items()}
        assert {name for name, version in found.items() if versions.get(name, version) != version} == set(), "run make locks"
        assert not {"torch", "onnx", "transformers", "cyclonedx-bom"} & found.keys()
        assert ("onnxruntime-gpu" in found, "onnxruntime" in found) == ("cuda" in kind, "cpu" in kind)
    else:
        assert {"export": "torch", "build": "cyclonedx-bom"}[kind] in found


def test_files_name_the_images_of_the_list_by_their_digests() -> None:
    digests = program("docker/digests.py")
    assert digests.main(["--check"]) == 0
    listed = {found[0] for found in digests.IMAGE.finditer(digests.LIST.read_text())}
    line = re.compile(r"^(?:ARG PYTHON_IMAGE=| *image: )(\S+/\S+)$", re.MULTILINE)
    named = {image for name in digests.USERS for image in line.findall((FOLDER / name).read_text())}
    assert named == listed and all("@sha256:" in image for image in listed)


def test_the_version_is_that_of_the_package_everywhere() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    for folder in ("deploy/helm/dragoman", "deploy/ray"):
        chart = yaml.safe_load((ROOT / folder / "Chart.yaml").read_text())
        assert (chart["version"], chart["appVersion"]) == (version, version)
    named = set()
    for path in [*(ROOT / "deploy").rglob("*.yaml"), *FOLDER.glob("*.Dockerfile")]:
        named |= set(re.findall(r"(?:dragoman:|ARG VERSION=)(\d+\.[\w.]*\d)", path.read_text()))
    assert named == {version}
    assert f"## {version}" in (ROOT / "CHANGELOG.md").read_text()
