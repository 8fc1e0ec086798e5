"""The rules of CONTRIBUTING.md on imports, read off the source."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    path
    for folder in (
        "model",
        "export",
        "server",
        "dragoman/client",
        "dragoman/load",
        "dragoman/attention",
        "dragoman/bulk",
        "dragoman/cli",
    )
    for path in sorted((ROOT / folder).rglob("*.py"))
]
GRPC = ("server/main.py", "server/protocols/grpc/", "server/protocols/openinference/", "server/protocols/v1/")
GRPC += ("dragoman/client/", "dragoman/load/", "dragoman/cli/")
# Its messages over HTTP, in JSON.
MESSAGES = (*GRPC, "server/protocols/http/", "server/protocols/console/data.py")
# Library: the files and folders that may import it.
HOMES = {
    **dict.fromkeys(("grpc", "grpc_status", "grpc_health"), GRPC),
    "dragoman.v1": MESSAGES,
    "dragoman.inference": ("server/protocols/",),
    "aiohttp": (
        "server/protocols/http/",
        "server/protocols/console/",
        "server/protocols/libretranslate/",
        "server/protocols/openai/",
        "server/protocols/deepl/",
        "server/telemetry/admin.py",
    ),
    "google": (*MESSAGES, "server/telemetry/tracing.py", "model/text/sentencepiece.py", "export/graph_file.py"),
    "zmq": ("server/engine/process.py", "server/dispatch/link.py", "server/dispatch/remote.py"),
    "prometheus_client": (
        "server/main.py",
        "server/workers/frontend_process.py",
        "server/telemetry/",
        "dragoman/bulk/translator.py",
    ),
    "pyarrow": ("dragoman/bulk/",),
    "ray": ("dragoman/bulk/on_ray.py",),
    "obstore": ("server/stores/", "dragoman/bulk/storage.py"),
    "onnxruntime": ("server/runtime/", "export/session.py"),
    "onnx": ("export/",),
    "torch": ("model/", "export/", "dragoman/cli/training.py"),
    "opentelemetry": ("server/telemetry/tracing.py", "dragoman/client/settings.py"),
    "sentencepiece": ("model/text/",),
    "tokenizers": ("model/text/",),
    "transformers": ("model/importers/importing.py",),
    "lxml": ("server/service/formats/",),
    "turbohtml": ("server/service/markup.py",),
    **dict.fromkeys(("oras", "requests", "urllib3", "boto3", "botocore"), ("server/stores/",)),
}
OUTER = ("server", "client", "load", "cli", "attention", "bulk")
# Modules that lead models through their life cycle; protocols know loaded models and routes alone.
LEADING = ("server.models.administration", "server.models.loader", "server.models.manager", "server.models.reconciler")
# Of our own, all below `dragoman`: folder, and the packages that it must not import.
FORBIDDEN = {
    "model/": ("export", *OUTER),
    "model/networks/": ("model.training", "model.importers", "model.text", "model.checkpoint", "model.decode"),
    "model/text/": ("model.training", "torch", "transformers"),
    "export/": ("server", "client", "load", "cli", "bulk", "model.training"),
    "dragoman/client/": ("server", "export", "load", "cli", "attention", "bulk"),
    "dragoman/load/": ("server", "export", "cli", "bulk"),
    "dragoman/attention/": ("server", "export", "load", "cli", "bulk", "model.networks", "model.training"),
    "dragoman/bulk/": ("client", "load", "cli", "server.main", "server.protocols"),
    "server/": ("client", "load", "cli", "attention", "bulk"),
    "server/service/": ("grpc", "google", "v1", "inference", "server.protocols", "prometheus_client", "zmq", "server.runtime"),
    "server/protocols/": ("server.workers.supervisor", "server.main", "server.engine", "server.runtime", *LEADING),
    "server/protocols/openinference/": ("v1", "grpc"),
    "server/models/": ("server.protocols", "server.main", "server.runtime"),
    "server/stores/": ("server.service", "server.engine", "server.protocols", "server.main", "server.config"),
    "server/engine/": ("server.service", "server.protocols", "server.models", "server.main", "server.config"),
    "server/runtime/": ("server.service", "server.protocols", "server.models", "server.main"),
    "server/telemetry/": ("server.service", "server.protocols", "server.models", "server.main"),
}


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Return the modules a file imports anywhere, in functions too."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return frozenset(found)


def users(place: str, package: str) -> list[str]:
    """Return the files below a place that import a package."""
    packages = (package, f"dragoman.{package}")
    return [
        name
        for path in SOURCES
        if (name := str(path.relative_to(ROOT))).startswith(place)
        and any(module == known or module.startswith(f"{known}.") for module in imports(path) for known in packages)
    ]


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_in_its_place_only(library: str) -> None:
    assert [user for user in users("", library) if not user.startswith(HOMES[library])] == []


@pytest.mark.parametrize("place", FORBIDDEN)
def test_imports_point_one_way(place: str) -> None:
    assert any(str(path.relative_to(ROOT)).startswith(place) for path in SOURCES)
    assert {package: found for package in FORBIDDEN[place] if (found := users(place, package))} == {}


def test_no_files_import_each_other_in_a_circle() -> None:
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("dragoman.") for path in SOURCES)
    known = {f"dragoman.{name}".removesuffix(".__init__"): path for name, path in zip(names, SOURCES, strict=True)}
    left = {name: (known.keys() & imports(path)) - {name} for name, path in known.items()}
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in free:
            del left[name]
    assert sorted(left) == []
