"""Who may import what, read off the source: the table of CONTRIBUTING.md, enforced."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = [
    path
    for folder in ("model", "export", "server", "dragoman/client", "dragoman/load", "dragoman/cli")
    for path in sorted((ROOT / folder).rglob("*.py"))
]

# Library: the files and folders that may import it.
HOMES = {
    "grpc": ("server/main.py", "server/api/", "dragoman/client/", "dragoman/load/", "dragoman/cli/"),
    "zmq": ("server/engine/client.py", "server/engine/process.py"),
    "prometheus_client": ("server/main.py", "server/telemetry/"),
    "onnxruntime": ("server/runtime/", "export/session.py"),
    "onnx": ("export/",),
    "torch": ("model/", "export/", "dragoman/cli/training.py"),
    "opentelemetry": ("server/telemetry/tracing.py", "dragoman/client/trace.py"),
    "sacrebleu": ("model/quality.py",),
    "transformers": (),
}
# Of our own, all below `dragoman`: who must not import whom.
FORBIDDEN = [
    ("model/", ("export", "server", "client")),
    ("export/", ("server", "client")),
    ("dragoman/client/", ("server", "export")),
    ("server/engine/scheduler.py", ("server.runtime", "server.api", "numpy")),
    ("server/engine/messages.py", ("server", "numpy")),
    (
        "server/engine/",
        (
            "server.api",
            "server.supervisor",
            "server.repository",
            "server.main",
            "server.config",
        ),
    ),
    (
        "server/runtime/",
        ("server.api", "server.supervisor", "server.engine.engine", "server.engine.scheduler"),
    ),
    ("server/telemetry/", ("server.api", "server.supervisor", "server.engine.engine")),
    (
        "server/api/",
        ("server.supervisor", "server.repository", "server.engine.engine", "server.runtime"),
    ),
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
