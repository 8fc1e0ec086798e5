"""`dragoman` as callers see it: the names it offers, what they cost, what type checkers make of them."""

import ast
import asyncio
import importlib
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import venv
from importlib.metadata import version
from pathlib import Path

import pytest

import dragoman
import dragoman.client

ROOT = Path(__file__).resolve().parents[2]
CALLER = Path(__file__).parent / "caller"
HEAVY = ("grpc", "google", "typer", "rich", "click", "torch", "numpy", "onnxruntime", "asyncio", "dragoman.client", "dragoman.v1")
# What the client may import beside Python's own, with what grpcio itself needs; and its files that print, which need more.
LIBRARIES = ("grpc", "grpc_health", "google", "typing_extensions", "dragoman")
PRINTING_LIBRARIES = (*LIBRARIES, "rich", "markdown_it", "mdurl", "pygments", "typer", "click", "shellingham")
GOOGLE = ("google._upb", "google.protobuf", "google.rpc")
PRINTING = {"repository_table", "models_table", "progress", "translate"}

BLOCKER = """
import importlib, json, sys
allowed, modules = json.loads(sys.argv[1]), json.loads(sys.argv[2])

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in sys.stdlib_module_names and name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
for module in modules:
    importlib.import_module(module)
print(json.dumps(sorted(sys.modules)))
"""


def run(*arguments: str, cwd: Path = ROOT, python: str = sys.executable, path: str = str(ROOT)) -> str:
    """Run Python, on the code of this checkout where nothing else is said, and return what it writes."""
    env = {**os.environ, "PYTHONPATH": path, "GRPC_VERBOSITY": "NONE"}
    done = subprocess.run([python, *arguments], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def loaded_by(program: str) -> set[str]:
    return set(run("-c", f"{program}\nimport sys\nprint(*sys.modules)").split())


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def test_import_of_the_package_loads_nothing_heavy() -> None:
    assert not [name for name in loaded_by("import dragoman") for heavy in HEAVY if is_within(name, heavy)]


def test_name_that_needs_no_grpc_loads_none() -> None:
    assert "grpc" not in loaded_by("from dragoman import Search, InputError, __version__")


@pytest.mark.parametrize("name", sorted({*dragoman.__all__} - {"__version__", "FinishReason"}))
def test_public_name_is_what_its_home_calls_it(name: str) -> None:
    public = getattr(dragoman, name)
    assert public.__name__ == name and public.__doc__
    assert getattr(importlib.import_module(public.__module__), name) is public


def test_each_public_name_is_loaded_and_typed_alike() -> None:
    tree = ast.parse(inspect.getsource(dragoman))
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    loaded = {name: f"dragoman.{module}" for module, names in dragoman._HOMES.items() for name in names}
    assert typed == loaded
    assert sorted({*typed, "__version__"}) == dragoman.__all__


def test_version_is_that_of_the_package() -> None:
    assert dragoman.__version__ == version("dragoman")


def test_names_can_be_listed_and_unknown_ones_are_missed() -> None:
    assert set(dragoman.__all__) <= set(dir(dragoman))
    assert not hasattr(dragoman, "nobody")
    with pytest.raises(ImportError, match="cannot import name 'clients'"):
        exec("from dragoman import clients")


def test_star_gives_the_public_names_alone() -> None:
    names: dict[str, object] = {}
    exec("from dragoman import *", names)
    assert set(names) - {"__builtins__"} == set(dragoman.__all__)


@pytest.mark.parametrize("package", ["cli", "client", "export", "load", "model", "server", "v1"])
def test_packages_are_still_found_beside_the_names(package: str) -> None:
    assert run("-c", f"from dragoman import Client, {package}\nprint({package}.__name__)") == f"dragoman.{package}\n"


def test_every_error_of_a_call_is_public() -> None:
    errors = importlib.import_module("dragoman.client.errors")
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.CallError)}
    assert kinds <= set(dragoman.__all__)


def test_client_imports_what_its_installation_has_and_no_more() -> None:
    modules = {module.name for module in pkgutil.iter_modules(dragoman.client.__path__)}
    assert modules > PRINTING
    for names, allowed in ((modules - PRINTING, LIBRARIES), (PRINTING, PRINTING_LIBRARIES)):
        paths = [f"dragoman.client.{name}" for name in sorted(names)]
        loaded = json.loads(run("-c", BLOCKER, json.dumps(allowed), json.dumps(paths)))
        google = {name for name in loaded if is_within(name, "google") and name.count(".") > 0}
        assert all(any(is_within(name, package) for package in GOOGLE) for name in google), google
        assert not [name for name in loaded if re.match(r"dragoman\.(server|export|load|cli)\b", name)]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with the package in its site-packages, as a wheel leaves it: the code and `py.typed`, no settings of ours."""
    folder = tmp_path_factory.mktemp("installation")
    venv.create(folder, symlinks=True)
    [site] = folder.glob("lib/python*/site-packages")
    (site / "libraries.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")

    def ignore(place: str, names: list[str]) -> list[str]:
        return [name for name in names if (Path(place) / name).is_file() and not name.endswith((".py", ".pyi", "py.typed"))]

    shutil.copytree(ROOT / "dragoman", site / "dragoman", ignore=ignore)
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def check_types(installation: Path, tmp_path_factory: pytest.TempPathFactory):
    """Check a program of the caller's as strictly as mypy can, and return what it says."""
    pytest.importorskip("mypy", reason="needs the extra `dev`")
    folder = tmp_path_factory.mktemp("caller")

    def check_types(name: str, *options: str) -> list[str]:
        shutil.copy(CALLER / name, folder)
        options = ("--config-file=", "--strict", "--show-error-codes", "--no-pretty", "--no-error-summary", *options)
        places = ("--python-executable", str(installation), "--cache-dir", str(folder / "cache"))
        env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
        command = [sys.executable, "-m", "mypy", *options, *places, name]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert done.stderr == ""
        return done.stdout.splitlines()

    return check_types


def test_strict_caller_finds_every_expression_typed(check_types) -> None:
    assert check_types("program.py", "--disallow-any-expr") == []


@pytest.mark.parametrize("document", ["README.md", "docs/client.md"])
def test_documented_examples_are_typed(check_types, tmp_path: Path, document: str) -> None:
    examples = re.findall(r"^```python\n(.+?)^```", (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    assert examples
    for number, example in enumerate(examples):
        (tmp_path / f"example_{number}.py").write_text(example, encoding="utf-8")
        assert check_types(str(tmp_path / f"example_{number}.py"), "--disallow-any-expr") == []


def test_type_checker_tells_a_callers_mistakes(check_types) -> None:
    wanted = set()
    for number, line in enumerate((CALLER / "mistakes.py").read_text(encoding="utf-8").splitlines(), start=1):
        if comment := re.search(r"  # ([ER]): (.+)$", line):
            kind, text = comment.groups()
            wanted |= {(number, kind, one) for one in (text.split(", ") if kind == "E" else [text])}
    told = set()
    for line in check_types("mistakes.py"):
        if error := re.search(r":(\d+): error: .*\[([a-z-]+)\]$", line):
            told.add((int(error[1]), "E", error[2]))
        elif revealed := re.search(r':(\d+): note: Revealed type is "(.+)"$', line):
            told.add((int(revealed[1]), "R", revealed[2]))
    assert told == wanted


def test_callers_program_does_what_it_says(installation, server, tmp_path: Path) -> None:
    server.set_health("", True)
    told = json.loads(run(str(CALLER / "program.py"), server.target, cwd=tmp_path, python=str(installation), path=""))
    assert told == {
        "version": dragoman.__version__,
        "unary": ["AB", "eos", 3, 1.5, -0.5, 2],
        "log_probs": [[5, -0.25, 1]],
        "stream": [["AB", "CD"], "ABCD"],
        "many": ["A", "", "C"],
        "batch": ["A", "B"],
        "score": [-4.5, "0-0 1-1", 3],
        "models": ["en-de", "en-fr"],
        "defaults": [["de"], 4],
        "ready": [True, True],
        "error": ["NOT_FOUND", "model", None],
        "input_error": True,
        "async": ["AB", ["AB", "CD"], "ABCD", ["A", "", "C"], ["A"], -1.5, ["en-de", "en-fr"]],
    }


@pytest.mark.parametrize("name", ["Client", "AsyncClient", "dragoman"])
def test_example_of_a_docstring_runs(server, capsys: pytest.CaptureFixture[str], name: str) -> None:
    documented = dragoman if name == "dragoman" else getattr(dragoman, name)
    example = re.search(r"Example:\n((?:    .*\n|\n)+)", inspect.getdoc(documented) + "\n")[1]
    program = f"from dragoman import AsyncClient, Client\nasync def main():\n{textwrap.indent(textwrap.dedent(example), '    ')}"
    names: dict[str, object] = {}
    exec(program.replace('"localhost"', repr(server.target)), names)
    asyncio.run(names["main"]())
    assert capsys.readouterr().out.startswith("A DOG RUNS THROUGH THE SNOW.\n")
