"""What the Dockerfiles promise, and that what they install is pinned and is what the project asks for."""

import json
import re
import subprocess
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

KINDS = ("cpu", "cuda")
PINNED_IMAGE = re.compile(r"[\w./-]+:\d+\.\d+\.\d+[\w.-]*@sha256:[0-9a-f]{64}")


@dataclass
class Stage:
    """One stage: what it starts from, and its instructions."""

    name: str
    base: str
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, instruction: str) -> list[str]:
        return [text for name, text in self.steps if name == instruction]

    def last(self, instruction: str) -> str:
        return self.all(instruction)[-1]


class Dockerfile:
    """A Dockerfile, read line by line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        text = re.sub(r"^\s*#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        lines = re.sub(r"\s*\\\n\s*", " ", text).splitlines()
        self.arguments: dict[str, str] = {}
        self.stages: dict[str, Stage] = {}
        for line in filter(None, lines):
            instruction, _, rest = line.partition(" ")
            if instruction == "FROM":
                base, name = re.fullmatch(r"(\S+) AS (\S+)", rest).groups()  # type: ignore[union-attr]
                self.stages[name] = Stage(name, base)
            elif self.stages:
                list(self.stages.values())[-1].steps.append((instruction, rest.strip()))
            else:
                name, _, value = rest.partition("=")
                self.arguments[name] = value

    def image_of(self, stage: Stage) -> list[Stage]:
        """Return the stages whose layers are in a stage's image."""
        base = self.stages.get(stage.base)
        return [*(self.image_of(base) if base else []), stage]


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def dockerfile(root: Path, kind: str) -> Dockerfile:
    return Dockerfile(root / f"deploy/docker/{kind}.Dockerfile")


@pytest.fixture
def server(dockerfile: Dockerfile) -> Stage:
    return dockerfile.stages["bare"]


def environment(stage: Stage) -> dict[str, str]:
    return {name: value.strip('"') for text in stage.all("ENV") for name, value in re.findall(r'(\w+)=("[^"]*"|\S+)', text)}


def test_every_stage_starts_from_a_pinned_image_or_another_stage(dockerfile: Dockerfile) -> None:
    for stage in dockerfile.stages.values():
        if stage.base not in dockerfile.stages:
            assert stage.base == "${PYTHON_IMAGE}"
    assert PINNED_IMAGE.fullmatch(dockerfile.arguments["PYTHON_IMAGE"])


def test_the_last_stage_is_the_server_with_models(dockerfile: Dockerfile) -> None:
    last = list(dockerfile.stages.values())[-1]
    assert (last.name, last.base) == ("baked", "bare")
    assert last.steps == [("COPY", "--from=bundles /models /models")], "nothing else is changed: the same user, the same entry"


def test_the_server_runs_as_a_user_that_is_a_number_and_not_root(server: Stage) -> None:
    user, _, group = server.last("USER").partition(":")
    assert int(user) > 0 and int(group) > 0
    position = [name for name, _ in server.steps].index("USER")
    assert not {"RUN", "COPY", "ADD"} & {name for name, _ in server.steps[position:]}, "all files belong to root"


def test_sigterm_reaches_the_server(server: Stage) -> None:
    assert server.last("STOPSIGNAL") == "SIGTERM"
    assert json.loads(server.last("ENTRYPOINT")) == ["/opt/dragoman/bin/dragoman"], "no shell in between"
    assert json.loads(server.last("CMD")) == ["serve"]


def test_health_is_asked_by_a_command_that_exists(server: Stage) -> None:
    options, _, command = server.last("HEALTHCHECK").partition(" CMD ")
    assert {"--interval", "--timeout", "--start-period", "--retries"} <= {part.partition("=")[0] for part in options.split()}
    program, name, *arguments = json.loads(command)
    assert program == json.loads(server.last("ENTRYPOINT"))[0]
    assert name in typer.main.get_command(dragoman.app).commands
    assert arguments == ["--server", f"127.0.0.1:{settings.ServerConfig.model_fields['port'].default}"]


def test_no_pytorch_gets_into_the_servers_image(dockerfile: Dockerfile) -> None:
    layers = dockerfile.image_of(dockerfile.stages["baked"])
    sources = {re.match(r"--from=(\S+)", text).group(1) for stage in layers for text in stage.all("COPY") if "--from" in text}  # type: ignore[union-attr]
    assert sources == {"packages", "bundles"}
    bundles = [text for stage in layers for text in stage.all("COPY") if text.startswith("--from=bundles")]
    assert bundles == ["--from=bundles /models /models"]
    assert not [text for stage in layers for text in stage.all("RUN") if "pip" in text]
    packages = dockerfile.stages["packages"]
    assert "find_spec('torch') is not None" in packages.last("RUN"), "the build itself fails with PyTorch"
    assert "export" not in " ".join(packages.all("RUN"))


def test_whatever_any_stage_installs_or_builds_has_a_checksum_or_is_there_already(dockerfile: Dockerfile, kind: str) -> None:
    locks = {"wheel": "build", "packages": kind, "bundles": "export"}
    for stage in dockerfile.stages.values():
        commands = re.findall(r"pip (install|wheel|download) ([^&]+)", " ".join(stage.all("RUN")))
        assert bool(commands) is (stage.name in locks), stage.name
        for what, options in commands:
            assert ("--require-hashes" in options and "-r /tmp/requirements.txt" in options) or (
                "--no-deps" in options and "--no-index" in options
            ), (stage.name, what, options)
            assert what != "wheel" or "--no-build-isolation" in options, "else the build system comes from anywhere"
    for name, lock in locks.items():
        assert f"deploy/docker/requirements-{lock}.txt /tmp/requirements.txt" in dockerfile.stages[name].all("COPY")


def test_the_image_has_a_bill_of_what_is_in_it_and_of_nothing_else(dockerfile: Dockerfile) -> None:
    commands = dockerfile.stages["packages"].all("RUN")
    bill = next(index for index, command in enumerate(commands) if "cyclonedx-py environment" in command)
    assert "--output-file /opt/dragoman/sbom.cdx.json /opt/dragoman/bin/python" in commands[bill]
    assert not any("/opt/dragoman/bin/pip" in command for command in commands[bill:]), "what is changed later would not be in it"
    copied = [text for stage in dockerfile.image_of(dockerfile.stages["baked"]) for text in stage.all("COPY")]
    assert not any("/tools" in text for text in copied), "what writes it is not in the image"


def test_the_image_says_what_it_is(server: Stage) -> None:
    labels = set(re.findall(r"org\.opencontainers\.image\.([\w.]+)=", server.last("LABEL")))
    assert labels >= {"title", "description", "version", "revision", "licenses", "base.name"}


def test_only_tmp_is_written(server: Stage) -> None:
    variables = environment(server)
    assert variables["HOME"] == "/tmp" and variables["PYTHONDONTWRITEBYTECODE"] == "1"
    assert variables["ORT_DISABLE_TELEMETRY"] == "1"
    assert variables["DRAGOMAN_MODELS"] == "/models"
    assert not server.all("VOLUME"), "a volume would be writable although the root is not"


def test_what_cuda_keeps_fits_into_the_charts_folder_of_temporary_files(root: Path) -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed: make setup")
    size = yaml.safe_load((root / "deploy/helm/dragoman/values.yaml").read_text())["tmp"]["sizeLimit"]
    variables = environment(Dockerfile(root / "deploy/docker/cuda.Dockerfile").stages["bare"])
    assert variables["CUDA_CACHE_PATH"].startswith("/tmp/")
    assert int(variables["CUDA_CACHE_MAXSIZE"]) <= int(size.removesuffix("Mi")) * 2**20 // 2


def test_variables_of_the_image_are_settings(server: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {name: value for name, value in environment(server).items() if name.startswith("DRAGOMAN_")}
    for name, value in ours.items():
        monkeypatch.setenv(name, value)
    read = settings.load({})
    assert read.models == Path("/models")
    exposed = {int(port) for port in server.last("EXPOSE").split()}
    fields = settings.ServerConfig.model_fields  # tests set a port of HTTP themselves
    assert exposed == {read.port, fields["http_port"].default, read.metrics_port}


def test_what_is_copied_is_there_and_is_not_ignored(root: Path, dockerfile: Dockerfile, kind: str) -> None:
    ignore = (root / f"deploy/docker/{kind}.Dockerfile.dockerignore").read_text().splitlines()
    kept = [line[1:].removesuffix("/**") for line in ignore if line.startswith("!")]
    copied = [
        source
        for stage in dockerfile.stages.values()
        for text in stage.all("COPY")
        if "--from" not in text
        for source in text.split()[:-1]
    ]
    assert copied
    for source in copied:
        assert (root / source.removeprefix("./")).exists(), source
        assert any(Path(source).match(pattern) or Path(source).is_relative_to(pattern) for pattern in kept), source


def test_the_wheel_is_built_from_the_package_and_everything_it_links_to(root: Path, dockerfile: Dockerfile) -> None:
    links = [path for path in (root / "dragoman").rglob("*") if path.is_symlink()]
    folders = {"dragoman"} | {path.resolve().relative_to(root.resolve()).parts[0] for path in links}
    texts = dockerfile.stages["wheel"].all("COPY")
    copied = {text for text in texts if text.count(" ") == 1 and not text.startswith("deploy/docker/requirements-")}
    assert copied == {f"{folder} ./{folder}" for folder in folders}
    ignored = dockerfile.path.with_name(f"{dockerfile.path.name}.dockerignore").read_text().splitlines()
    assert {f"!{folder}/**" for folder in folders} <= set(ignored)


def locked(root: Path, kind: str) -> dict[str, tuple[Version, int]]:
    """Return the version of each package of a lock file, and how many checksums it has."""
    text = (root / f"deploy/docker/requirements-{kind}.txt").read_text().replace("\\\n", " ")
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, version = re.match(r"([\w.-]+)==(\S+)", line).groups()  # type: ignore[union-attr]
            found[canonicalize_name(name)] = (Version(version), line.count("--hash=sha256:"))
    return found


def asked_for(project: dict[str, Any], extra: str) -> Iterator[Requirement]:
    """Yield what an extra brings, that of the project's other extras that it names included."""
    for text in project["optional-dependencies"][extra]:
        wanted = Requirement(text)
        if wanted.name == project["name"]:
            for other in sorted(wanted.extras):
                yield from asked_for(project, other)
        else:
            yield wanted


@pytest.mark.parametrize(("kind", "extra"), [("cpu", "cpu"), ("cuda", "gpu")])
def test_locks_hold_what_the_project_asks_for_in_the_tested_versions(root: Path, kind: str, extra: str) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    found = locked(root, kind)
    extras = [requirement for each in (extra, "tracing", "stores", "detect") for requirement in asked_for(project, each)]
    for wanted in [*map(Requirement, project["dependencies"]), *extras]:
        version, _ = found.get(canonicalize_name(wanted.name), (None, 0))
        assert version is not None and version in wanted.specifier, f"{wanted}: run make locks"
    tested = dict(line.split("==") for line in (root / "constraints.txt").read_text().splitlines())
    versions = {canonicalize_name(name): Version(version) for name, version in tested.items()}
    for name, (version, num_hashes) in found.items():
        assert num_hashes > 0, name
        assert versions.get(name, version) == version, f"{name}: run make locks"
    assert not {"torch", "onnx", "transformers", "cyclonedx-bom"} & found.keys()
    assert ("onnxruntime-gpu" in found, "onnxruntime" in found) == (kind == "cuda", kind == "cpu")


def test_build_stages_have_locks_of_what_they_ask_for(root: Path) -> None:
    content = tomllib.loads((root / "pyproject.toml").read_text())
    project, asked = content["project"], (root / "deploy/docker/requirements-build.in").read_text().splitlines()
    assert set(content["build-system"]["requires"]) <= set(asked), "requirements-build.in repeats the build system"
    wanted = {
        "build": [Requirement(line) for line in asked if not line.startswith("#")],
        "export": [*map(Requirement, project["dependencies"]), *asked_for(project, "cpu"), *asked_for(project, "export")],
    }
    for lock, requirements in wanted.items():
        found = locked(root, lock)
        assert all(num_hashes > 0 for _, num_hashes in found.values())
        for requirement in requirements:
            version, _ = found.get(canonicalize_name(requirement.name), (None, 0))
            assert version is not None and version in requirement.specifier, f"{requirement}: run make locks"
    assert "torch" in locked(root, "export") and "cyclonedx-bom" in locked(root, "build")


def test_locking_writes_nothing_that_was_not_asked_for(root: Path) -> None:
    for kind in (*KINDS, "export", "build"):
        text = (root / f"deploy/docker/requirements-{kind}.txt").read_text()
        assert "://" not in text and "--index" not in text and "--find-links" not in text
    assert subprocess.run(["bash", "-n", root / "deploy/docker/locks.sh"], timeout=30).returncode == 0
