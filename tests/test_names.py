"""Everything has one name: it is imported as `dragoman.…`, in a checkout and installed, also beside others named as our folders."""

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.system.harness.server import ROOT, Event
from tests.wheels import build_wheel, unpack

FOLDERS = ("server", "model", "export")
PACKAGES = ("attention", "bulk", "cli", "client", "inference", "load", "v1")
OLD_NAMES = ("client.sync", "export.bundle", "model.checkpoint", "protos.generation_pb2", "protos.dragoman.v1.generation_pb2")
OTHERS = ("server.config", "client", "protos", "tests", "benchmarks", "deploy", *FOLDERS)
DECOYS = ("client", "server", "model", "export", "protos", "load", "errors")
TEXT = "A dog runs through the snow."
CALLER = """
import sys
from dragoman import Client

with Client(sys.argv[1]) as client:
    print(client.generate(sys.argv[2], model="en-de").text)
"""
IMPORT_EACH = """
import importlib, json, sys
failures = {}
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failures[name] = f"{type(error).__name__}: {error}"
print(json.dumps(failures))
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(wheel, tmp_path_factory.mktemp("installed"))


def failed_imports(names: tuple[str, ...], cwd: Path, path: Path) -> dict[str, str]:
    """Import names in a process of their own and return the errors of those that fail."""
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(path)}
    command = [sys.executable, "-c", IMPORT_EACH, *names]
    return json.loads(subprocess.run(command, cwd=cwd, env=environment, capture_output=True, check=True).stdout)


def test_a_checkout_has_no_second_name() -> None:
    """The working directory comes first on the path, so the folders can be found; they name the right import."""
    failures = failed_imports((*OLD_NAMES, *FOLDERS), ROOT, ROOT)
    assert set(failures) == {*OLD_NAMES, *FOLDERS}
    assert all(f"import dragoman.{name} instead" in failures[name] for name in FOLDERS)


def test_an_installation_has_no_second_name(installed: Path, tmp_path: Path) -> None:
    failures = failed_imports((*OLD_NAMES, *OTHERS), tmp_path, installed)
    assert set(failures) == {*OLD_NAMES, *OTHERS}
    assert all(error.startswith("ModuleNotFoundError") for error in failures.values())


def test_a_wheel_has_every_module_once_and_what_callers_need(wheel: Path, installed: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert not [info.filename for info in archive.infolist() if info.external_attr >> 28 == 0o12]  # no links
        names = archive.namelist()
    assert {name.split("/")[0] for name in names if not name.startswith("dragoman-")} == {"dragoman"}
    names = [name for name in names if name.startswith("dragoman/")]
    assert len(names) == len(set(names))
    places = [(ROOT / folder, folder) for folder in FOLDERS] + [(ROOT / "dragoman" / package, package) for package in PACKAGES]
    expected = {f"dragoman/{name}/{path.relative_to(folder)}" for folder, name in places for path in folder.rglob("*.py")}
    expected |= {f"dragoman/{path.name}" for path in (ROOT / "dragoman").glob("*.py")}
    assert {name for name in names if name.endswith(".py")} == expected
    contracts = ("v1/generation", "v1/repository", "inference/inference")
    others = {f"dragoman/{name}{ending}" for name in contracts for ending in (".proto", "_pb2.pyi")}
    others.add("dragoman/py.typed")
    console = ROOT / "server/protocols/console/assets"
    others |= {f"dragoman/server/protocols/console/assets/{path.name}" for path in console.iterdir()}
    others |= {"dragoman/attention/page.css", "dragoman/attention/page.js", "dragoman/load/page.html"}
    others.add("dragoman/model/training/example.toml")
    assert "dragoman/server/protocols/console/assets/index.html" in others
    assert {name for name in names if not name.endswith(".py")} == others
    assert (installed / "dragoman/v1/generation.proto").read_text() == (ROOT / "protos/dragoman/v1/generation.proto").read_text()


def test_no_folder_is_linked_but_into_the_package() -> None:
    """Git, ruff and grep find each file once; Python and mypy follow the links."""
    links = {path.name for path in (ROOT / "dragoman").iterdir() if path.is_symlink()}
    assert links == set(FOLDERS) and all((ROOT / "dragoman" / name).resolve() == ROOT / name for name in links)


@pytest.mark.e2e
def test_an_installation_serves_and_asks_where_others_have_the_names_of_our_folders(
    installed: Path, shipped_bundle: Callable[[str], Path], tmp_path: Path
) -> None:
    """Outside the checkout, with decoys on the path and in the working directory."""
    here, on_path = tmp_path / "here", tmp_path / "on_path"
    for folder in (here, on_path):
        folder.mkdir()
        for name in DECOYS:
            (folder / f"{name}.py").write_text(f"raise SystemExit('the decoy {name} was imported')\n")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (installed, on_path)))}

    def run(*arguments: object) -> str:
        command = [sys.executable, *map(str, arguments)]
        done = subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    places = run("-c", "import dragoman, dragoman.server.main as m; print(dragoman.__file__, m.__file__)").split()
    assert all(name.startswith(str(installed)) for name in places)
    ports = ("--host", "127.0.0.1", "--port", "0", "--metrics-port", "0")
    command = [sys.executable, "-m", "dragoman", "serve", "--models", str(shipped_bundle("en-de")), *ports]
    with subprocess.Popen(command, cwd=here, env=environment, text=True, stderr=subprocess.PIPE) as server:
        try:
            assert server.stderr is not None
            events = (json.loads(line) for line in server.stderr if line.startswith("{"))
            address = next(f"127.0.0.1:{event['port']}" for event in events if event["event"] == Event.SERVING)
            translated = run("-m", "dragoman", "translate", "--server", address, "--model", "en-de", TEXT)
            assert translated.strip() and run("-c", CALLER, address, TEXT) == translated
            run("-m", "dragoman", "load", "--server", address, "--model", "en-de", "--concurrency", 1, "--requests", 3)
            server.send_signal(signal.SIGTERM)
            server.communicate(timeout=60)
            assert server.returncode == 0
        finally:
            server.kill()
