"""The Dockerfiles, and the locks of the packages that they install."""

import json
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from dragoman.cli import main as dragoman
from dragoman.server import config as settings
from tests.deploy.conftest import ROOT, load, program

FOLDER = ROOT / "deploy/docker"
KINDS = ("cpu", "cuda")
PINNED_IMAGE = re.compile(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}")


@dataclass
class Stage:
    """A stage with its base image and its instructions."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.steps if name == instruction]


class Dockerfile:
    """A Dockerfile, read line by line."""

    def __init__(self, path: Path) -> None:
        self.path, self.stages = path, dict[str, Stage]()
        text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        for line in filter(None, re.sub(r"\s*\\\n\s*", " ", text).splitlines()):
            instruction, _, rest = line.partition(" ")
            if instruction == "FROM":
                base, _, name = rest.partition(" AS ")
                self.stages[name] = stage = Stage(name, base)
            elif self.stages:
                stage.steps.append((instruction, rest.strip()))
            else:
                assert PINNED_IMAGE.fullmatch(rest.removeprefix("PYTHON_IMAGE=")), "the only argument"

    def image_of(self, stage: Stage) -> list[Stage]:
        """Return the stages whose layers are in a stage's image."""
        base = self.stages.get(stage.base)
        return [*(self.image_of(base) if base else []), stage]


@pytest.fixture(params=KINDS)
def dockerfile(request: pytest.FixtureRequest) -> Dockerfile:
    return Dockerfile(FOLDER / f"{request.param}.Dockerfile")


@pytest.fixture
def server(dockerfile: Dockerfile) -> Stage:
    return dockerfile.stages["bare"]


def environment(stage: Stage) -> dict[str, str]:
    return {name: value.strip('"') for text in stage.all("ENV") for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', text)}


def test_stages_start_from_a_pinned_image_and_the_last_adds_models_alone(dockerfile: Dockerfile) -> None:
    for stage in dockerfile.stages.values():
        assert stage.base in dockerfile.stages or stage.base == "${PYTHON_IMAGE}"
    last = list(dockerfile.stages.values())[-1]
    assert (last.name, last.base) == ("baked", "bare")
    assert last.steps == [("COPY", "--from=bundles /models /models")], "nothing else is changed: the same user, the same entry"


def test_server_runs_as_a_numbered_user_receives_sigterm_and_writes_only_tmp(server: Stage) -> None:
    user, _, group = server.all("USER")[-1].partition(":")
    assert int(user) > 0 and int(group) > 0
    position = [name for name, _ in server.steps].index("USER")
    assert not {"RUN", "COPY", "ADD"} & {name for name, _ in server.steps[position:]}, "all files belong to root"
    assert server.all("STOPSIGNAL")[-1] == "SIGTERM" and json.loads(server.all("CMD")[-1]) == ["serve"]
    assert json.loads(server.all("ENTRYPOINT")[-1]) == ["/opt/dragoman/bin/dragoman"], "no shell in between"
    variables = environment(server)
    assert variables["HOME"] == "/tmp" and variables["PYTHONDONTWRITEBYTECODE"] == "1"
    assert variables["ORT_DISABLE_TELEMETRY"] == "1" and variables["DRAGOMAN_MODELS"] == "/models"
    assert not server.all("VOLUME"), "a volume would be writable although the root is not"
    labels = set(re.findall(r"org\.opencontainers\.image\.([\w.]+)=", server.all("LABEL")[-1]))
    assert labels >= {"title", "description", "version", "revision", "licenses", "base.name"}


def test_health_variables_and_ports_are_those_of_the_program(server: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    options, _, command = server.all("HEALTHCHECK")[-1].partition(" CMD ")
    assert {"--interval", "--timeout", "--start-period", "--retries"} <= {part.partition("=")[0] for part in options.split()}
    program, name, *arguments = json.loads(command)
    assert program == json.loads(server.all("ENTRYPOINT")[-1])[0] and name in typer.main.get_command(dragoman.app).commands
    fields = settings.ServerConfig.model_fields  # tests set a port of HTTP themselves
    assert arguments == ["--server", f"127.0.0.1:{fields['port'].default}"]
    for variable, value in environment(server).items():
        if variable.startswith("DRAGOMAN_"):
            monkeypatch.setenv(variable, value)
    read = settings.load({})
    assert read.models == Path("/models")
    exposed = {int(port) for port in server.all("EXPOSE")[-1].split()}
    assert exposed == {read.port, fields["http_port"].default, read.metrics_port}


def test_no_pytorch_gets_into_the_image_of_the_server_and_its_contents_are_listed(dockerfile: Dockerfile) -> None:
    layers = dockerfile.image_of(dockerfile.stages["baked"])
    copied = [text for stage in layers for text in stage.all("COPY")]
    assert set(re.findall(r"--from=(\S+)", " ".join(copied))) == {"packages", "bundles"}
    assert [text for text in copied if text.startswith("--from=bundles")] == ["--from=bundles /models /models"]
    assert not any("/tools" in text for text in copied) and not [x for stage in layers for x in stage.all("RUN") if "pip" in x]
    commands = dockerfile.stages["packages"].all("RUN")
    assert "find_spec('torch') is not None" in commands[-1], "the build itself fails with PyTorch"
    assert "export" not in " ".join(commands)
    bill = next(index for index, command in enumerate(commands) if "cyclonedx-py environment" in command)
    assert "--output-file /opt/dragoman/sbom.cdx.json /opt/dragoman/bin/python" in commands[bill]
    assert not any("/opt/dragoman/bin/pip" in command for command in commands[bill:]), "later changes would not be in it"


def test_every_installed_package_has_a_checksum_or_is_there_already(dockerfile: Dockerfile) -> None:
    locks = {"wheel": "build", "packages": dockerfile.path.stem, "bundles": "export"}
    for stage in dockerfile.stages.values():
        commands = re.findall(r"pip (install|wheel|download) ([^&]+)", " ".join(stage.all("RUN")))
        assert bool(commands) is (stage.name in locks), stage.name
        for kind, options in commands:
            is_locked = "--require-hashes" in options and "-r /tmp/requirements.txt" in options
            assert is_locked or ("--no-deps" in options and "--no-index" in options), (stage.name, options)
            assert kind != "wheel" or "--no-build-isolation" in options, "else the build system comes from anywhere"
    for name, lock in locks.items():
        assert f"deploy/docker/requirements-{lock}.txt /tmp/requirements.txt" in dockerfile.stages[name].all("COPY")


def test_temporary_files_of_cuda_fit_into_the_folder_of_the_chart() -> None:
    variables = environment(Dockerfile(FOLDER / "cuda.Dockerfile").stages["bare"])
    size = load("helm/dragoman/values.yaml")["tmp"]["sizeLimit"]
    assert variables["CUDA_CACHE_PATH"].startswith("/tmp/")
    assert int(variables["CUDA_CACHE_MAXSIZE"]) <= int(size.removesuffix("Mi")) * 2**20 // 2


def test_copied_files_exist_are_not_ignored_and_hold_the_whole_package(dockerfile: Dockerfile) -> None:
    ignore = dockerfile.path.with_name(f"{dockerfile.path.name}.dockerignore").read_text().splitlines()
    kept = [line[1:].removesuffix("/**") for line in ignore if line.startswith("!")]
    texts = [text for stage in dockerfile.stages.values() for text in stage.all("COPY") if "--from" not in text]
    for source in (source for text in texts for source in text.split()[:-1]):
        assert (ROOT / source.removeprefix("./")).exists(), source
        assert any(Path(source).match(pattern) or Path(source).is_relative_to(pattern) for pattern in kept), source
    links = [path for path in (ROOT / "dragoman").rglob("*") if path.is_symlink()]
    folders = {"dragoman"} | {path.resolve().relative_to(ROOT.resolve()).parts[0] for path in links}
    texts = dockerfile.stages["wheel"].all("COPY")
    copied = {text for text in texts if text.count(" ") == 1 and not text.startswith("deploy/docker/requirements-")}
    assert copied == {f"{folder} ./{folder}" for folder in folders} and {f"!{folder}/**" for folder in folders} <= set(ignore)


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


@pytest.mark.parametrize("kind", [*KINDS, "build", "export"])
def test_locks_hold_every_requirement_in_the_tested_version(kind: str) -> None:
    content = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = (FOLDER / "requirements-build.in").read_text().splitlines()
    assert set(content["build-system"]["requires"]) <= set(asked), "requirements-build.in repeats the build system"
    runtime = ("tracing", "stores", "detect")
    extras = {"cpu": ("cpu", *runtime), "cuda": ("gpu", *runtime), "export": ("cpu", "export")}
    wanted = [Requirement(line) for line in asked if not line.startswith("#")]
    if kind != "build":
        wanted = list(asked_for(content["project"], *extras[kind]))
    found = locked(kind)
    for requirement in wanted:
        version = found.get(canonicalize_name(requirement.name))
        assert version is not None and version in requirement.specifier, f"{requirement}: run make locks"
    if kind in KINDS:
        tested = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines())
        versions = {canonicalize_name(name): Version(version) for name, version in tested.items()}
        assert {name for name, version in found.items() if versions.get(name, version) != version} == set(), "run make locks"
        assert not {"torch", "onnx", "transformers", "cyclonedx-bom"} & found.keys()
        assert ("onnxruntime-gpu" in found, "onnxruntime" in found) == (kind == "cuda", kind == "cpu")
    else:
        assert {"export": "torch", "build": "cyclonedx-bom"}[kind] in found


def test_files_name_the_images_of_the_list_by_their_digests() -> None:
    digests = program("docker/digests.py")
    assert digests.main(["--check"]) == 0
    listed = {found[0] for found in digests.IMAGE.finditer(digests.LIST.read_text())}
    line = re.compile(r"^(?:ARG PYTHON_IMAGE=| *image: )(\S+/\S+)$", re.MULTILINE)
    named = {image for name in digests.USERS for image in line.findall((FOLDER / name).read_text())}
    assert named == listed and all("@sha256:" in image for image in listed)
