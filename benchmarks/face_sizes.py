"""How large each protocol's translation is, and the console's page.

    python -m benchmarks.face_sizes

Lines of code are those with something else on them than comments and docstrings. What several faces share has rows of its own.
"""

import ast
import gzip
import io
import tokenize
from collections.abc import Iterable, Iterator
from pathlib import Path

from benchmarks.harness.report import environment, write

FACES = Path(__file__).parents[1] / "server/faces"
ASSETS = FACES / "http/console/assets"
# Pattern of files, the first that fits counts: what they are.
PARTS = {
    "grpc/*.py": "gRPC: the native service, and the transport",
    "oip/*.py": "Open Inference Protocol: tensors, fields, gRPC",
    "http/inference/*.py": "Open Inference Protocol: REST",
    "http/libre/*.py": "LibreTranslate",
    "http/console/*.py": "Console: data and page",
    "http/native.py": "HTTP/JSON: the native service",
    "http/repository.py": "HTTP/JSON: the repository",
    "http/*.py": "HTTP: the transport",
    "v1/*.py": "Shared by gRPC and HTTP/JSON: messages of dragoman.v1",
    "*.py": "Shared by all",
}
_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}


def docstring_lines(source: str) -> Iterator[int]:
    """Give the lines of docstrings, and of the texts below attributes."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def code_lines(source: str) -> int:
    """Count the lines with code."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {line for token in tokens if token.type not in _NO_CODE for line in range(token.start[0], token.end[0] + 1)}
    return len(lines - set(docstring_lines(source)))


def sizes_of(name: str, paths: Iterable[Path]) -> dict[str, str]:
    """Return a row of what some files are."""
    sources = [path.read_text(encoding="utf-8") for path in paths]
    lines = sum(map(code_lines, sources))
    return {"part": name, "files": str(sum(map(bool, sources))), "lines of code": f"{lines:,}", "KB": "", "KB, gzip": ""}


def rows() -> Iterator[dict[str, str]]:
    """Give a row a part of the faces, and one of the page."""
    left = set(FACES.rglob("*.py"))
    for pattern, name in PARTS.items():
        found = left & set(FACES.glob(pattern))
        left -= found
        yield sizes_of(name, sorted(found))
    if left:
        raise ValueError(f"no part has {', '.join(sorted(path.name for path in left))}")
    assets = [path.read_bytes() for path in sorted(ASSETS.iterdir())]
    raw, packed = (sum(map(len, contents)) / 1000 for contents in (assets, map(gzip.compress, assets)))
    lines = sum(1 for content in assets for line in content.splitlines() if line.strip())
    page = {"part": "Console: the page", "files": str(len(assets)), "lines of code": f"{lines:,}"}
    yield page | {"KB": f"{raw:.1f}", "KB, gzip": f"{packed:.1f}"}


def main() -> None:
    """Count and write the results."""
    write("face_sizes", "Sizes of the protocols' translations", environment(), list(rows()))


if __name__ == "__main__":
    main()
