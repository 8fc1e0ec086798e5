"""The load generator outside of a checkout, among files that have the names of ours, and with its own packages alone."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 120
DECOYS = ("client", "server", "model", "export", "protos", "load", "worker", "crew")

# As `sitecustomize` it is in every process, the senders too.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"not of the extra: {{name}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that has the package as a wheel would put it there: real files in place of the links."""
    folder = tmp_path_factory.mktemp("site:packages")  # no PYTHONPATH can name it
    ignored = shutil.ignore_patterns("__pycache__", "pretrained")
    shutil.copytree(ROOT / "dragoman", folder / "dragoman", ignore=ignored)
    return folder


@pytest.fixture
def decoys(tmp_path: Path) -> Path:
    """A folder of modules and packages that must not be imported."""
    folder = tmp_path / "decoys"
    for name in DECOYS:
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(f"raise RuntimeError('the decoy {name} was imported')\n")
    (folder / "model.py").write_text("raise RuntimeError('the decoy model.py was imported')\n")
    return folder


def run(site: Path, folder: Path, name: str, *arguments: object, path: str = "") -> str:
    """Run a command of the installed package in a folder, as its script in `bin` would; return what it printed."""
    start = f"import sys; sys.path[:0] = {['', str(site)]!r}; from dragoman.cli.main import main; main()"
    environment = {key: value for key, value in os.environ.items() if not key.startswith("DRAGOMAN_")} | {"PYTHONPATH": path}
    command = [sys.executable, "-c", start, name, *map(str, arguments)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("is_on_path", [False, True])
def test_files_of_the_same_names_are_left_alone(fake_server, site: Path, decoys: Path, is_on_path: bool) -> None:
    """The working directory is on the path, as an empty string: that is how `python -m` and `python -c` have it."""
    arguments = ("--server", fake_server.address, "--concurrency", 2, "--requests", 10, "--processes", 2, "--output", "r.json")
    out = run(site, decoys, "load", *arguments, path=str(decoys) if is_on_path else "")
    assert "errors: none" in out and len(fake_server.service.requests) == 10
    run(site, decoys, "load-compare", "--help", path=str(decoys) if is_on_path else "")


def closure(requirements: list[str]) -> set[str]:
    """Return the names of distributions and of all that they need themselves, as they are installed here."""
    found: set[str] = set()
    waiting = [re.split(r"[\s<>=!~;\[(]", text)[0] for text in requirements]
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name not in found:
            found.add(name)
            needed = importlib.metadata.requires(name) or []
            waiting += [
                re.split(r"[\s<>=!~;\[(]", text)[0] for text in needed if "extra ==" not in text and "sys_platform" not in text
            ]
    return found


def others(extra: str) -> set[str]:
    """Return the top-level modules installed here that neither the base install nor an extra brings."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    brought = closure(project["dependencies"] + project["optional-dependencies"][extra])
    return {
        module
        for module, names in importlib.metadata.packages_distributions().items()
        if not {name.lower().replace("_", "-") for name in names} & brought and module not in sys.stdlib_module_names
    } - {"dragoman"}


def test_it_imports_what_the_extra_brings_and_nothing_else(fake_server, site: Path, tmp_path: Path) -> None:
    names = others("load")
    assert {"structlog", "zmq", "prometheus_client", "tokenizers", "onnxruntime", "torch"} <= names
    block = tmp_path / "block"
    block.mkdir()
    (block / "sitecustomize.py").write_text(BLOCKER.format(names=names))
    probe = f"import sys; sys.path.insert(0, {str(site)!r}); import structlog"
    blocked = subprocess.run([sys.executable, "-c", probe], env=os.environ | {"PYTHONPATH": str(block)}, capture_output=True)
    assert blocked.returncode == 1 and b"not of the extra: structlog" in blocked.stderr
    results = [tmp_path / "first.json", tmp_path / "second.json"]
    for result in results:
        arguments = ("--concurrency", 1, "--duration", 3, "--warmup", 0, "--output", result, "--report", tmp_path / "page.html")
        run(site, tmp_path, "load", "--server", fake_server.address, *arguments, path=str(block))
    run(site, tmp_path, "load-compare", *results, path=str(block))
