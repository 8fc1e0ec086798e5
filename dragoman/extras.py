"""The optional dependencies: which packages each has, which of them a command needs, and how to add them to this installation."""

import json
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from importlib.util import find_spec
from pathlib import Path
from typing import Final

# Extra: the modules that its packages bring, as pyproject.toml has them.
EXTRAS: Final = {
    "server": (
        "aiohttp",
        "grpc_reflection",
        "grpc_status",
        "lxml",
        "msgspec",
        "numpy",
        "prometheus_client",
        "pydantic",
        "pydantic_settings",
        "zmq",
        "sentencepiece",
        "structlog",
        "tokenizers",
        "turbohtml",
    ),
    "cpu": ("onnxruntime",),
    "signing": ("cryptography",),
    "stores": ("obstore", "oras", "requests", "urllib3"),
    "bulk": ("pyarrow",),
    "ray": ("ray",),
    "tracing": ("opentelemetry",),
    "load": ("msgspec", "numpy"),
    "report": ("jinja2", "matplotlib"),
    "evaluate": ("sacrebleu",),
    "train": ("matplotlib", "msgspec", "numpy", "pydantic", "safetensors", "sentencepiece", "tokenizers", "torch"),
    "import": ("huggingface_hub", "langcodes", "msgspec", "numpy", "safetensors", "sentencepiece", "tokenizers", "torch"),
    "export": ("onnx", "onnx_ir", "safetensors", "torch"),
}
# Extras that bring others.
_INCLUDED: Final = {
    "cpu": ("server",),
    "stores": ("server", "signing"),
    "bulk": ("stores",),
    "ray": ("bulk",),
    "report": ("load",),
    "train": ("evaluate",),
}
_COMMANDS: Final = {
    "serve": ("cpu",),
    "gpu-check": ("cpu",),
    "bulk": ("cpu", "bulk"),
    "pull": ("stores",),
    "sign": ("server", "signing"),
    "export": ("cpu", "export"),
    "import": ("import",),
    "train": ("train",),
    "average": ("train",),
    "attention": ("train",),
    "perplexity": ("train",),
    "add-tokens": ("train",),
    "nearest": ("evaluate",),
    "load": ("load",),
    "load-compare": ("load",),
}


def extras_for(arguments: Sequence[str], module: str) -> tuple[str, ...] | None:
    """Return the extras that a command needs; None if the module is in none of them all.

    Args:
        arguments: The command and its arguments, as in `sys.argv[1:]`.
        module: What it did not find, the top-level name.
    """
    if not any(module in modules for modules in EXTRAS.values()):
        return None
    wanted = _COMMANDS.get(arguments[0], ()) if arguments else ()
    if arguments[:1] == ["evaluate"]:
        given = {argument.partition("=")[0] for argument in arguments}
        wanted = ("train",) if "--checkpoint" in given else ("cpu", "evaluate") if "--bundle" in given else ("evaluate",)
    if module not in _modules(wanted):
        wanted = (*wanted, next(extra for extra, modules in EXTRAS.items() if module in modules))
    # Where one build of ONNX Runtime is there, the other must not be put over it.
    return tuple("server" if extra == "cpu" and module != "onnxruntime" and _has_runtime() else extra for extra in wanted)


def install_command(*extras: str) -> str:
    """Return the command that adds extras to this installation, whatever it was made from: a checkout, a wheel or an index."""
    suffix = f"[{','.join(extras)}]"
    root = Path(__file__).parents[1]
    if (root / "pyproject.toml").is_file():
        place = "." if root == Path.cwd() else str(root)
        return f"{_pip()} install --editable {shlex.quote(place + suffix)}"
    try:
        place = _origin(distribution("dragoman"), suffix)
    except PackageNotFoundError:
        place = f"dragoman{suffix}"
    return f"{_pip()} install {shlex.quote(place)}"


def own_version() -> str:
    """Return the version of Dragoman; `unknown` where it is run from a folder of its source."""
    return installed_version("dragoman") or "unknown"


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _modules(extras: Sequence[str]) -> Iterator[str]:
    for extra in extras:
        yield from EXTRAS[extra]
        yield from _modules(_INCLUDED.get(extra, ()))


def _has_runtime() -> bool:
    try:
        return find_spec("onnxruntime") is not None
    except (ImportError, ValueError):
        return False


def _origin(installed: Distribution, suffix: str) -> str:
    """Return what to install: what PEP 610 says this was installed from, with the extras."""
    try:
        direct = json.loads(installed.read_text("direct_url.json") or "null")
        url = direct["url"]
        if "vcs_info" in direct:
            url = f"{direct['vcs_info']['vcs']}+{url}@{direct['vcs_info']['commit_id']}"
    except (OSError, ValueError, KeyError, TypeError):  # from an index, or it does not say
        return f"dragoman{suffix}"
    if not url.startswith("file://"):
        return f"dragoman{suffix} @ {url}"
    from urllib.parse import urlsplit
    from urllib.request import url2pathname

    path = Path(url2pathname(urlsplit(url).path))
    try:
        return f"{path.relative_to(Path.cwd())}{suffix}"
    except ValueError:
        return f"{path}{suffix}"


def _pip() -> str:
    """Return how to call the pip of this environment, which need not be the one that is active."""
    scripts = Path(sys.executable).parent
    pip = shutil.which("pip")
    if pip is not None and Path(pip).parent == scripts:
        return "pip"
    try:
        python = os.fspath(Path(sys.executable).relative_to(Path.cwd()))
    except ValueError:
        python = sys.executable
    return f"{shlex.quote(python)} -m pip"
