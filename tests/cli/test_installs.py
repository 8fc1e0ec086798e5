"""Commands of installations that lack packages: what works, and how to install what is missing."""

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Collection
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dragoman import extras
from dragoman.extras import EXTRAS, extras_for, install_command
from tests.cli.conftest import ROOT, assert_refused, environment, score_with_attention

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PRETRAINED = ROOT / "model/pretrained/en-de"
# Where the module's name is not the package's.
PACKAGES = {"huggingface_hub": "huggingface-hub", "prometheus_client": "prometheus-client", "onnx_ir": "onnx-ir", "zmq": "pyzmq"}
PACKAGES |= {"grpc_reflection": "grpcio-reflection", "grpc_status": "grpcio-status", "pydantic_settings": "pydantic-settings"}
# In every process, those of senders too.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in {blocked!r} or ({allowed!r} and top not in {{*{allowed!r}, *sys.stdlib_module_names}}):
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def installed(*extras_: str) -> set[str]:
    """Return the top-level modules of an installation: of the project's packages with these extras, and of what they need."""
    pending = [*PROJECT["dependencies"], *(package for extra in extras_ for package in PROJECT["optional-dependencies"][extra])]
    found: set[str] = set()
    while pending:
        name = re.match(r"[\w.-]+", pending.pop())[0].lower().replace("_", "-")
        if name not in found:
            found.add(name)
            try:
                required = distribution(name).requires or []
            except PackageNotFoundError:  # of another platform
                continue
            pending += [requirement for requirement in required if "extra ==" not in requirement]
    brought = packages_distributions().items()
    return {module for module, names in brought if found & {name.lower().replace("_", "-") for name in names}} | {"dragoman"}


def run(folder: Path, *arguments: object, blocked: Collection[str] = (), allowed: Collection[str] = ()) -> Any:
    """Run a command without some modules, or with no other modules beside the standard library."""
    (folder / "site").mkdir(exist_ok=True)
    (folder / "site/sitecustomize.py").write_text(BLOCKER.format(blocked=[*blocked], allowed=[*allowed]))
    command = [sys.executable, "-m", "dragoman", *map(str, arguments)]
    path = environment(PYTHONPATH=str(folder / "site"))
    return subprocess.run(command, cwd=ROOT, env=path, capture_output=True, text=True, check=False, timeout=120)


@pytest.mark.parametrize(
    ("command", "module", "extra"),
    [
        ("serve --models %/bundle", "zmq", "[server]"),
        ("evaluate --source %/two --reference %/more --server 127.0.0.1:1", "sacrebleu", "[evaluate]"),
        ("evaluate --source %/two --reference %/more --bundle %/bundle", "tokenizers", "[server,evaluate]"),
        (f"attention --checkpoint {PRETRAINED} a --output %/out.png", "matplotlib", "[train]"),
        (f"average {PRETRAINED} --output %/out", "torch", "[train]"),
        (f"export {PRETRAINED} %/out", "torch", "[server,export]"),
    ],
)
def test_a_missing_package_is_told_with_how_to_install_it(files: Path, command: str, module: str, extra: str) -> None:
    ran = run(files, *(word.replace("%", str(files)) for word in command.split()), blocked=[module])
    *_, last = ran.stderr.splitlines()  # after what was found to be right
    assert (ran.returncode, ran.stdout) == (2, "") and "Traceback" not in ran.stderr
    assert last.startswith(f"dragoman: this command needs {module}, which is not installed: ")
    assert last.endswith(f"pip install --editable '.{extra}'")


def test_a_plain_installation_asks_servers_and_tells_what_else_needs(server: str, service, files: Path) -> None:
    service.score = score_with_attention
    pair = ("--source", files / "two", "--target", files / "more")
    model = ("--server", server, "--model", "loud")
    base = installed()
    for asked in (
        ("translate", *model, "--in", files / "two", "--out", files / "out.txt"),
        ("models", "--server", server),
        ("score", *model, *pair),
        ("health", "--server", server),
        ("attention", *model, "a dog", "ein Hund", "--layer", "0", "--output", files / "drawn.html"),
    ):
        ran = run(files, *asked, allowed=base)
        assert ran.returncode == 0 and (asked[0] == "attention" or ran.stderr == ""), ran.stderr
    assert (files / "out.txt").read_text() == "A DOG\nA CAT\n"
    ran = run(files, "attention", *model, "a", "b", "--output", files / "drawn.png", allowed=base)
    assert ran.returncode == 2 and "needs matplotlib" in ran.stderr and "'.[train]'" in ran.stderr
    assert not (files / "drawn.png").exists()
    ran = run(files, "serve", "--models", files / "bundle", allowed=base)
    assert_refused((ran.returncode, ran.stdout, ran.stderr), "'.[cpu]'")


def test_the_extras_are_those_of_the_project() -> None:
    for extra, modules in EXTRAS.items():
        declared = [text for text in PROJECT["optional-dependencies"][extra] if not text.startswith("dragoman[")]
        packages = {re.match(r"[\w-]+", text)[0] for text in declared}
        assert extra == "tracing" or packages == {PACKAGES.get(module, module) for module in modules}, extra


def test_the_extras_of_a_command_are_all_named(monkeypatch) -> None:
    for command, module, wanted in (
        ("serve", "onnxruntime", ("cpu",)),
        ("serve", "structlog", ("server",)),
        ("export a b", "onnx", ("server", "export")),
        ("export a b", "sacrebleu", ("server", "export", "evaluate")),
        ("evaluate --bundle=a", "onnxruntime", ("cpu", "evaluate")),
        ("evaluate --checkpoint a", "torch", ("train",)),
        ("evaluate --server a", "sacrebleu", ("evaluate",)),
        ("train a", "sacrebleu", ("train",)),
        ("import a b", "huggingface_hub", ("import",)),
        ("bulk a", "onnxruntime", ("cpu", "bulk")),
        ("bulk a", "obstore", ("server", "bulk")),
        ("bulk a --ray auto", "ray", ("server", "bulk", "ray")),
        ("translate a", "numpy", ("server",)),
        ("translate a", "nonsense", None),
        ("", "torch", ("train",)),
    ):
        assert extras_for(command.split(), module) == wanted
    monkeypatch.setattr(extras, "find_spec", lambda name: None)  # no build of the runtime that another would replace
    assert extras_for(["serve"], "structlog") == ("cpu",)


WHEEL = "dragoman-0.1.0-py3-none-any.whl"
GIT = {"url": "https://a.example/dragoman", "vcs_info": {"vcs": "git", "commit_id": "abc"}}


def test_the_hint_is_true_for_how_it_was_installed(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("cpu").endswith("pip install --editable '.[cpu]'")
    (tmp_path / "bin").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(extras.sys, "executable", str(tmp_path / "bin/python"))
    monkeypatch.setattr(extras.shutil, "which", lambda name: str(tmp_path / "bin" / name))
    assert install_command("cpu") == f"pip install --editable '{ROOT}[cpu]'"
    monkeypatch.setattr(extras.shutil, "which", lambda name: None)
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "elsewhere/dragoman/extras.py"))
    for direct_url, place in (
        (None, "dragoman[cpu]"),
        ({"url": f"file:///a%20b/{WHEEL}"}, f"/a b/{WHEEL}[cpu]"),
        ({"url": f"file://{tmp_path}/{WHEEL}"}, f"{WHEEL}[cpu]"),
        ({"url": f"https://a.example/{WHEEL}"}, f"dragoman[cpu] @ https://a.example/{WHEEL}"),
        (GIT, "dragoman[cpu] @ git+https://a.example/dragoman@abc"),
    ):
        made = SimpleNamespace(read_text=lambda name, told=direct_url: json.dumps(told))
        monkeypatch.setattr(extras, "distribution", lambda name, made=made: made)
        assert install_command("cpu") == f"bin/python -m pip install '{place}'"
