"""Everything has one name: it is imported as `dragoman.…`, in a checkout and installed."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.wheels import build_wheel, unpack

ROOT = Path(__file__).resolve().parents[1]
OLD_NAMES = (
    "client.sync",
    "export.bundle",
    "model.checkpoint",
    "protos.generation_pb2",
    "protos.dragoman.v1.generation_pb2",
    "server.config",
)
IMPORT_AS = "import importlib, sys; importlib.import_module(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(wheel, tmp_path_factory.mktemp("installed"))


def import_name(name: str, cwd: Path, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": "/usr/bin:/bin"} | ({} if path is None else {"PYTHONPATH": str(path)})
    command = [sys.executable, "-c", IMPORT_AS, name]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", [*OLD_NAMES, "server", "model", "export"])
def test_a_checkout_has_no_second_name(name: str) -> None:
    """The working directory comes first on the path, so the folders can be found; they refuse."""
    failed = import_name(name, ROOT, ROOT)
    assert (failed.returncode == 1 and "ImportError" in failed.stderr) or "ModuleNotFoundError" in failed.stderr, failed.stderr


def test_the_refusal_says_what_to_import() -> None:
    for name in ("server", "model", "export"):
        assert f"import dragoman.{name} instead" in import_name(name, ROOT, ROOT).stderr


@pytest.mark.parametrize("name", [*OLD_NAMES, "client", "server", "model", "export", "protos", "tests", "benchmarks", "deploy"])
def test_an_installation_has_no_second_name(name: str, installed: Path, tmp_path: Path) -> None:
    failed = import_name(name, tmp_path, installed)
    assert failed.returncode == 1 and "ModuleNotFoundError" in failed.stderr, failed.stderr


def test_a_wheel_installs_one_name(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"dragoman"}
    assert {name.split("/")[0] for name in names if not name.startswith("dragoman-")} == {"dragoman"}


def test_a_wheel_has_every_module_once_and_what_callers_need(wheel: Path, installed: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.startswith("dragoman/")]
        assert not [info.filename for info in archive.infolist() if info.external_attr >> 28 == 0o12]  # no links
    assert len(names) == len(set(names))
    folders = {"server": "server", "model": "model", "export": "export"}
    rooms = [(ROOT / folder, f"dragoman/{name}") for name, folder in folders.items()]
    rooms += [(ROOT / "dragoman" / room, f"dragoman/{room}") for room in ("attention", "cli", "client", "inference", "load", "v1")]
    expected = {f"{name}/{path.relative_to(folder)}" for folder, name in rooms for path in folder.rglob("*.py")}
    expected |= {f"dragoman/{path.name}" for path in (ROOT / "dragoman").glob("*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    contracts = ("v1/generation", "v1/repository", "inference/inference")
    others = {f"dragoman/{name}{ending}" for name in contracts for ending in (".proto", "_pb2.pyi")}
    others |= {"dragoman/py.typed", "dragoman/server/faces/http/openapi.json"}
    console = ROOT / "server/faces/http/console/assets"
    others |= {f"dragoman/server/faces/http/console/assets/{path.name}" for path in console.iterdir()}
    assert "dragoman/server/faces/http/console/assets/index.html" in others
    assert {name for name in names if not name.endswith(".py")} == others
    assert (installed / "dragoman/v1/generation.proto").read_text() == (ROOT / "protos/dragoman/v1/generation.proto").read_text()


def test_no_folder_is_linked_but_into_the_package() -> None:
    """Git, ruff and grep see each file once; Python and mypy follow the links."""
    links = {path.relative_to(ROOT) for path in (ROOT / "dragoman").iterdir() if path.is_symlink()}
    assert links == {Path("dragoman/server"), Path("dragoman/model"), Path("dragoman/export")}
    assert all((ROOT / link).resolve() == ROOT / link.name for link in links)
