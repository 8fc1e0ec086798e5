"""Who may import what, read off the source: the table of CONTRIBUTING.md, enforced."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    path
    for folder in ("model", "export", "server", "dragoman/client", "dragoman/load", "dragoman/attention", "dragoman/cli")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

FACES = ("server/faces/grpc/", "server/faces/oip/", "server/faces/v1/")
GRPC = ("server/main.py", *FACES, "dragoman/client/", "dragoman/load/", "dragoman/cli/")
# Its messages over HTTP, in JSON.
MESSAGES = (*GRPC, "server/faces/http/native.py", "server/faces/http/repository.py", "server/faces/http/console/models.py")
# Library: the files and folders that may import it.
HOMES = {
    **dict.fromkeys(("grpc", "grpc_status", "grpc_health"), GRPC),
    "dragoman.v1": MESSAGES,
    "dragoman.inference": ("server/faces/",),
    "aiohttp": ("server/faces/http/",),
    "google": (*MESSAGES, "server/telemetry/tracing.py", "model/text/piece_model.py", "export/graph_file.py"),
    "zmq": ("server/engine/link.py", "server/engine/process.py", "server/dispatch/desk_server.py"),
    "prometheus_client": ("server/main.py", "server/fronts/process.py", "server/telemetry/"),
    "onnxruntime": ("server/runtime/", "export/session.py"),
    "onnx": ("export/",),
    "torch": ("model/", "export/", "dragoman/cli/training.py"),
    "opentelemetry": ("server/telemetry/tracing.py", "dragoman/client/trace.py"),
    "sacrebleu": ("model/quality.py",),
    "sentencepiece": ("model/text/", "model/importers/"),
    "tokenizers": ("model/text/",),
    "matplotlib": ("model/training/log.py", "dragoman/attention/picture.py"),
    "transformers": ("model/importers/verifying.py",),
    "py3langid": ("server/faces/http/libre/detection.py",),
    "cryptography": ("export/signing.py",),
    **dict.fromkeys(("obstore", "oras", "requests", "urllib3", "boto3", "botocore"), ("server/stores/",)),
}
# What crosses the border of an engine's process knows nothing but itself.
NO_MESSAGES = tuple(
    f"server.{path.relative_to(ROOT / 'server').with_suffix('').as_posix().replace('/', '.')}"
    for path in sorted((ROOT / "server").rglob("*.py"))
    if path.stem not in ("__init__", "messages", "snapshot")
)
FRONT_ENDS = ("server.front_end", "server.fronts")
FRONT = ("server.core", "server.faces", *FRONT_ENDS, "server.supervisor", "server.repository", "server.main")
# Of our own, all below `dragoman`: who must not import whom.
FORBIDDEN = [
    ("model/", ("export", "server", "client", "load", "cli", "attention")),
    *((f"model/{name}.py", ("model.training",)) for name in ("decode", "evaluate", "checkpoint")),
    ("model/networks/", ("model.training", "model.importers", "model.text", "model.checkpoint", "model.decode")),
    ("model/text/", ("model.training", "torch", "transformers")),
    ("export/", ("server", "client", "load", "cli", "model.training")),
    ("dragoman/client/", ("server", "export", "load", "cli", "attention")),
    ("dragoman/load/", ("server", "export", "cli")),
    # Where maps come from is one thing, and how they are drawn another.
    ("dragoman/attention/", ("server", "export", "load", "cli", "model.networks", "model.training")),
    *(
        (f"dragoman/attention/{name}.py", ("model.checkpoint", "model.attention_maps", "client", "numpy"))
        for name in ("maps", "tokens", "page", "page_style", "picture")
    ),
    ("server/", ("client", "load", "cli", "attention")),
    # A face other than gRPC works without any of these.
    (
        "server/core/",
        ("grpc", "google", "grpc_status", "grpc_health", "v1", "inference", "server.faces", "prometheus_client", "zmq"),
    ),
    ("server/core/", ("server.supervisor", "server.repository", "server.main", "server.engine.engine", "server.runtime")),
    ("server/faces/", ("server.supervisor", "server.repository", "server.main", "server.engine", "server.runtime")),
    # What the two services over gRPC share is the transport: neither knows the other's messages.
    ("server/faces/oip/", ("v1", "grpc", "server.faces.grpc.generation", "server.faces.grpc.batch", "server.faces.grpc.server")),
    ("server/repository/", ("server.faces", *FRONT_ENDS, "server.main", "server.engine.engine", "server.runtime")),
    # What decides about versions does it without an engine, a bundle that is open, or a process.
    *(
        (f"server/repository/{name}.py", ("server.engine", "server.dispatch", "server.supervisor", "model.text", "zmq", "asyncio"))
        for name in ("choosing", "folders", "found", "layout", "model_file", "policy", "version_names")
    ),
    ("server/stores/", ("server.core", "server.engine", "server.faces", "server.supervisor", "server.main", "server.config")),
    ("server/stores/store.py", ("export", "server")),
    ("server/engine/scheduler.py", ("server.runtime", "numpy")),
    ("server/engine/snapshot.py", ("server", "numpy")),
    ("server/engine/messages.py", (*NO_MESSAGES, "numpy")),
    ("server/engine/", (*FRONT, "server.config")),
    ("server/runtime/", (*FRONT, "server.engine.engine", "server.engine.scheduler")),
    ("server/telemetry/", (*FRONT, "server.engine.engine")),
]


def imports(path: Path) -> Iterator[str]:
    """Yield the modules a file imports anywhere, in functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_within(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


@pytest.mark.parametrize("library", HOMES)
def test_a_library_is_imported_where_it_lives_only(library: str) -> None:
    users = {str(path.relative_to(ROOT)) for path in SOURCES if any(is_within(module, library) for module in imports(path))}
    assert all(user.startswith(HOMES[library]) if HOMES[library] else False for user in users), users


@pytest.mark.parametrize(("place", "packages"), FORBIDDEN, ids=[place for place, _ in FORBIDDEN])
def test_imports_point_inward(place: str, packages: tuple[str, ...]) -> None:
    files = [path for path in SOURCES if str(path.relative_to(ROOT)).startswith(place)]
    assert files
    for path in files:
        imported = {module.removeprefix("dragoman.") for module in imports(path)}
        assert not {module for module in imported for package in packages if is_within(module, package)}, path


def modules() -> dict[str, Path]:
    """Every file by the name it is imported by."""
    names = (".".join(path.relative_to(ROOT).with_suffix("").parts).removeprefix("dragoman.") for path in SOURCES)
    return {f"dragoman.{name}".removesuffix(".__init__"): path for name, path in zip(names, SOURCES, strict=True)}


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """Return what is left when everything is taken away that imports nothing of the rest: nothing, where there is no circle."""
    left = dict(edges)
    while free := [name for name, needed in left.items() if not needed & left.keys()]:
        for name in free:
            del left[name]
    return sorted(left)


def test_no_files_import_each_other_in_a_circle() -> None:
    known = modules()
    assert {"dragoman.server.main", "dragoman.client.sync", "dragoman.model.training"} <= known.keys()
    assert cycle({name: known.keys() & set(imports(path)) - {name} for name, path in known.items()}) == []


def test_a_circle_would_be_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]
