"""What a command says and does where packages are missing: each run has loaded nothing before."""

import json
import re
import tomllib
from importlib.metadata import PackageNotFoundError, distribution, packages_distributions
from pathlib import Path

import pytest

from dragoman import extras
from dragoman.extras import EXTRAS, extras_for, install_command

ROOT = Path(__file__).resolve().parents[2]
PRETRAINED = ROOT / "model/pretrained/en-de"
# Where the module's name is not the package's.
PACKAGES = {
    "grpc_reflection": "grpcio-reflection",
    "grpc_status": "grpcio-status",
    "huggingface_hub": "huggingface-hub",
    "onnx_ir": "onnx-ir",
    "prometheus_client": "prometheus-client",
    "pydantic_settings": "pydantic-settings",
    "zmq": "pyzmq",
}
TRAINING = """
name = "tiny"
data = { source = "two", target = "more", validation_source = "two", validation_target = "more" }
[training]
max_steps = 1
"""
# Command: the modules that each of its runs needs (of several together it names the first it wants), and the extras they are of.
NEEDED = {
    "serve --models {0}/bundle": (
        ("grpc_reflection", "grpc_status", "msgspec", "numpy", "prometheus_client", "pydantic", "structlog", "tokenizers", "zmq"),
        "[server]",
    ),
    "load --rate 1": (("msgspec",), "[load]"),
    "load-compare {0}/two {0}/more": (("msgspec", "numpy"), "[load]"),
    "evaluate --source {0}/two --reference {0}/more --server 127.0.0.1:1": (("sacrebleu",), "[evaluate]"),
    "evaluate --source {0}/two --reference {0}/more --bundle {0}/bundle": (("msgspec", "tokenizers"), "[server,evaluate]"),
    "evaluate --source {0}/two --reference {0}/more --checkpoint {1}": (("sacrebleu", "torch", "safetensors"), "[train]"),
    "train {0}/training.toml --output {0}/run": (("torch", "safetensors"), "[train]"),
    "attention --checkpoint {1} a --output {0}/out.png": (("torch", "safetensors", "matplotlib"), "[train]"),
    "perplexity --checkpoint {1} --target {0}/two": (("torch", "safetensors"), "[train]"),
    "average {1} --output {0}/out": (("torch", "safetensors"), "[train]"),
    "add-tokens {1} {0}/two --output {0}/out --vocab-size 9000": (("torch tokenizers", "safetensors tokenizers"), "[train]"),
    "nearest {0}/more --reference {0}/two --output {0}/out": (("sacrebleu",), "[evaluate]"),
    "export {1} {0}/out": (("torch", "safetensors"), "[server,export]"),
}
CASES = [(command, module, extra) for command, (modules, extra) in NEEDED.items() for module in modules]


def base_modules() -> set[str]:
    """Top-level modules of what a plain installation has: the packages of pyproject.toml that are not extra, and theirs."""
    pending = list(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"])
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, a training configuration that can be used, and a bundle that cannot."""
    folder = tmp_path_factory.mktemp("installs")
    (folder / "two").write_text("a dog\na cat\n")
    (folder / "more").write_text("ein Hund\neine Katze\n")
    (folder / "training.toml").write_text(TRAINING)
    (folder / "bundle").mkdir()
    (folder / "bundle/bundle.json").write_text('{"format_version": 1}')
    return folder


@pytest.fixture(scope="module")
def results(isolated, folder: Path) -> dict[tuple[str, str], dict]:
    """What became of each command without each of its modules."""
    cases = [{"arguments": command.format(folder, PRETRAINED).split(), "blocked": module.split()} for command, module, _ in CASES]
    return dict(zip([case[:2] for case in CASES], isolated(cases), strict=True))


@pytest.mark.parametrize(("command", "module", "extra"), CASES)
def test_a_package_that_is_missing_is_told_with_how_to_install_it(results, command: str, module: str, extra: str) -> None:
    result = results[command, module]
    assert (result["code"], result["out"]) == (2, "")
    *_, last = result["err"].splitlines()  # before it may stand what was found to be right
    assert re.match(rf"dragoman: this command needs ({module.replace(' ', '|')}), which is not installed: ", last)
    assert last.endswith(f"pip install --editable '.{extra}'") and "Traceback" not in result["err"]


def test_a_plain_installation_asks_servers(isolated, server: str, folder: Path) -> None:
    asks = [
        ["translate", "--model", "loud", "a dog"],
        ["translate", "--model", "loud", "--in", f"{folder}/two", "--out", f"{folder}/out.txt"],
        ["models"],
        ["score", "--model", "loud", "--source", f"{folder}/two", "--target", f"{folder}/more"],
        ["health"],
    ]
    cases = [{"arguments": [*arguments, "--server", server], "allowed": sorted(base_modules())} for arguments in asks]
    for arguments, result in zip(asks, isolated(cases), strict=True):
        assert (result["code"], result["err"]) == (0, ""), arguments
    assert (folder / "out.txt").read_text() == "A DOG\nA CAT\n"


def test_a_plain_installation_draws_a_page_of_a_servers_attention(isolated, server: str, folder: Path) -> None:
    asked = ["attention", "--model", "loud", "--server", server, "a dog", "ein Hund", "--layer", "0", "--output"]
    cases = [{"arguments": [*asked, f"{folder}/drawn.{suffix}"], "allowed": sorted(base_modules())} for suffix in ("html", "png")]
    page, picture = isolated(cases)
    assert page["code"] == 0 and (folder / "drawn.html").read_text().startswith("<!DOCTYPE html>")
    assert picture["code"] == 2 and "this command needs matplotlib" in picture["err"] and "'.[train]'" in picture["err"]
    assert not (folder / "drawn.png").exists()


def test_a_plain_installation_says_what_serving_needs(isolated, folder: Path) -> None:
    case = {"arguments": ["serve", "--models", f"{folder}/bundle"], "allowed": sorted(base_modules())}
    [result] = isolated([case])
    assert result["code"] == 2 and result["err"].count("\n") == 1 and "'.[cpu]'" in result["err"]


def test_arguments_of_an_evaluation_are_checked_before_anything_heavy_is_loaded(isolated, folder: Path) -> None:
    texts = f"evaluate --source {folder}/two --reference {folder}/more"
    wrong = {
        texts: "exactly one",
        f"{texts} --bundle a --checkpoint b": "exactly one",
        f"evaluate --source {folder}/nowhere --reference {folder}/more --checkpoint {PRETRAINED}": "nowhere",
        f"{texts} --checkpoint {folder}/nowhere": "nowhere/config.json",
        f"{texts} --bundle {folder}/nowhere": "nowhere",
        f"{texts} --bundle {folder}/bundle": "bundle.json",
        f"{texts} --checkpoint {PRETRAINED} --length-penalty 2": "--length-penalty",
        f"{texts} --checkpoint {PRETRAINED} --ca x": "--ca",
        f"{texts} --server a --ca {folder}/nowhere": "nowhere",
        f"{texts} --server a --key {folder}/nowhere": "--key",
        f"{texts} --server=": "--server",
    }
    results = isolated([{"arguments": command.split()} for command in wrong])
    for (command, named), result in zip(wrong.items(), results, strict=True):
        assert result["code"] == 2 and named in result["err"], command
        assert not {"torch", "onnxruntime", "sacrebleu"} & set(result["modules"]), command


def test_the_extras_are_those_of_the_project() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, modules in EXTRAS.items():
        packages = {
            re.match(r"[\w-]+", requirement)[0] for requirement in declared[extra] if not requirement.startswith("dragoman[")
        }
        brought = {PACKAGES.get(module, module) for module in modules}
        assert packages == ({*packages} if extra == "tracing" else brought), extra


@pytest.mark.parametrize(
    ("command", "module", "extras"),
    [
        ("serve", "onnxruntime", ("cpu",)),
        ("export a b", "onnx", ("server", "export")),
        ("export a b", "onnxruntime", ("cpu", "export")),
        ("export a b", "sacrebleu", ("server", "export", "evaluate")),
        ("evaluate --bundle=a", "onnxruntime", ("cpu", "evaluate")),
        ("train a", "matplotlib", ("train",)),
        ("translate a", "numpy", ("server",)),
        ("translate a", "nonsense", None),
        ("", "torch", ("train",)),
    ],
)
def test_the_extras_of_a_command_are_all_named(command: str, module: str, extras: tuple[str, ...] | None) -> None:
    assert extras_for(command.split(), module) == extras


def test_a_build_of_the_runtime_is_not_put_over_another(monkeypatch: pytest.MonkeyPatch) -> None:
    assert extras_for(["serve"], "structlog") == ("server",)
    monkeypatch.setattr(extras, "find_spec", lambda name: None)
    assert extras_for(["serve"], "structlog") == ("cpu",)


class Installed:
    """A distribution that says how it was installed."""

    def __init__(self, direct_url: object) -> None:
        self._text = None if direct_url is None else json.dumps(direct_url)

    def read_text(self, name: str) -> str | None:
        return self._text if name == "direct_url.json" else None


@pytest.mark.parametrize(
    ("direct_url", "place"),
    [
        (None, "dragoman[cpu]"),
        ({"url": "file:///a%20b/dragoman-0.1.0-py3-none-any.whl", "archive_info": {}}, "/a b/dragoman-0.1.0-py3-none-any.whl[cpu]"),
        ({"url": "file:///src/dragoman", "dir_info": {}}, "/src/dragoman[cpu]"),
        (
            {"url": "https://a.example/dragoman-0.1.0.whl", "archive_info": {}},
            "dragoman[cpu] @ https://a.example/dragoman-0.1.0.whl",
        ),
        (
            {"url": "https://a.example/dragoman", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "dragoman[cpu] @ git+https://a.example/dragoman@abc",
        ),
        ({"neither": "nor"}, "dragoman[cpu]"),
        ([], "dragoman[cpu]"),
    ],
)
def test_the_hint_is_true_for_how_it_was_installed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, direct_url: object, place: str
) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "dragoman/extras.py"))
    monkeypatch.setattr(extras, "distribution", lambda name: Installed(direct_url))
    assert install_command("cpu").endswith(f"pip install '{place}'")


def test_a_wheel_in_the_working_folder_is_named_as_it_is_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(extras, "__file__", str(tmp_path / "elsewhere/dragoman/extras.py"))
    url = (tmp_path / "dragoman-0.1.0-py3-none-any.whl").as_uri()
    monkeypatch.setattr(extras, "distribution", lambda name: Installed({"url": url, "archive_info": {}}))
    monkeypatch.chdir(tmp_path)
    assert install_command("cpu", "export").endswith("pip install 'dragoman-0.1.0-py3-none-any.whl[cpu,export]'")


def test_what_is_not_installed_at_all_is_asked_of_the_index(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "__file__", str(tmp_path / "dragoman/extras.py"))
    monkeypatch.setattr(extras, "distribution", missing)
    assert install_command("cpu").endswith("pip install 'dragoman[cpu]'")


def test_a_checkout_is_installed_again_from_anywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(ROOT)
    assert install_command("cpu").endswith("pip install --editable '.[cpu]'")
    monkeypatch.chdir(tmp_path)
    assert install_command("cpu").endswith(f"pip install --editable '{ROOT}[cpu]'")


def test_the_pip_of_this_environment_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    monkeypatch.setattr(extras.sys, "executable", str(tmp_path / "bin/python"))
    monkeypatch.setattr(extras.shutil, "which", lambda name: str(tmp_path / "bin" / name))
    assert install_command("cpu").startswith("pip install ")
    monkeypatch.setattr(extras.shutil, "which", lambda name: f"/usr/bin/{name}")
    assert install_command("cpu").startswith(f"{tmp_path}/bin/python -m pip install ")
    monkeypatch.chdir(tmp_path)
    assert install_command("cpu").startswith("bin/python -m pip install ")
