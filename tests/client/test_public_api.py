"""`dragoman` for its callers: the names it offers, what they import, and what type checkers make of them."""

import ast
import asyncio
import importlib
import inspect
import os
import re
import subprocess
import sys
import textwrap
from importlib.metadata import version
from pathlib import Path

import pytest

import dragoman

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("grpc", "google", "typer", "rich", "click", "torch", "numpy", "onnxruntime", "asyncio", "dragoman.client", "dragoman.v1")


def run(program: str) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "GRPC_VERBOSITY": "NONE"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def is_within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def test_an_import_loads_no_more_than_it_needs() -> None:
    assert not [name for name in run("import dragoman, sys\nprint(*sys.modules)").split() if is_within(name, *HEAVY)]
    assert "grpc" not in run("from dragoman import Search, InputError, __version__\nimport sys\nprint(*sys.modules)").split()


def test_each_public_name_is_loaded_and_typed_alike() -> None:
    tree = ast.parse(inspect.getsource(dragoman))
    [block] = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    typed = {alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert sorted({*typed, "__version__"}) == dragoman.__all__ and set(dragoman.__all__) <= set(dir(dragoman))
    for name, module in typed.items():
        public = getattr(dragoman, name)
        assert public is getattr(importlib.import_module(module), name)
        assert name == "FinishReason" or (public.__name__ == name and public.__doc__)
    assert dragoman.__version__ == version("dragoman")
    names: dict[str, object] = {}
    exec("from dragoman import *", names)
    assert set(names) - {"__builtins__"} == set(dragoman.__all__)
    errors = importlib.import_module("dragoman.client.errors")
    kinds = {name for name, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, errors.CallError)}
    assert kinds <= set(dragoman.__all__)
    with pytest.raises(ImportError, match="cannot import name 'clients'"):
        exec("from dragoman import clients")
    packages = ("cli", "client", "export", "load", "model", "server", "v1")
    found = run(f"from dragoman import Client, {', '.join(packages)}\nprint(*(x.__name__ for x in ({', '.join(packages)})))")
    assert found.split() == [f"dragoman.{package}" for package in packages]


def test_the_blocking_client_is_the_one_for_asyncio() -> None:
    """`make client` has been run since `aio.py` or `Search` changed."""
    pytest.importorskip("unasync", reason="needs the extra `dev`")
    done = subprocess.run([sys.executable, "deploy/blocking_client.py", "--check"], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def check_types(tmp_path_factory: pytest.TempPathFactory):
    """Check a program with mypy, strictly."""
    pytest.importorskip("mypy", reason="needs the extra `dev`")
    folder = tmp_path_factory.mktemp("caller")

    def check_types(program: str, *options: str) -> list[str]:
        (folder / "program.py").write_text(program, encoding="utf-8")
        options = ("--config-file=", "--strict", "--show-error-codes", "--no-pretty", "--no-error-summary", *options)
        command = [sys.executable, "-m", "mypy", *options, "--follow-imports=silent", "program.py"]
        env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"MYPYPATH": str(ROOT)}
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
        assert done.stderr == "" and done.returncode in (0, 1)
        return [line for line in done.stdout.splitlines() if line.startswith("program.py:")]

    return check_types


@pytest.mark.parametrize("document", ["README.md", "docs/call.md"])
def test_documented_examples_are_typed(check_types, document: str) -> None:
    examples = re.findall(r"^```python\n(.+?)^```", (ROOT / document).read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    examples = [example for example in examples if "from dragoman" in example]  # not those of other clients
    assert examples
    for example in examples:
        assert check_types(example, "--disallow-any-expr") == []


@pytest.mark.parametrize("name", ["Client", "AsyncClient", "dragoman"])
def test_the_example_of_a_docstring_runs(server, capsys: pytest.CaptureFixture[str], name: str) -> None:
    documented = dragoman if name == "dragoman" else getattr(dragoman, name)
    example = re.search(r"Example:\n((?:    .*\n|\n)+)", inspect.getdoc(documented) + "\n")[1]
    program = f"from dragoman import AsyncClient, Client\nasync def main():\n{textwrap.indent(textwrap.dedent(example), '    ')}"
    names: dict[str, object] = {}
    exec(program.replace('"localhost"', repr(server.target)), names)
    asyncio.run(names["main"]())
    assert capsys.readouterr().out.startswith("A DOG RUNS THROUGH THE SNOW.\n")
