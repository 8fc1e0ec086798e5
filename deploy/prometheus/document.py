"""Update the table of metrics in docs/metrics.md from the declarations in `server/telemetry`.

Run `python -m deploy.prometheus.document` from the repository's root; with `--check` it only reports whether the table is stale.
"""

import sys
from pathlib import Path

from prometheus_client import CollectorRegistry

from dragoman.server.telemetry.metrics import Metrics

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/metrics.md"
BEGIN, END = "<!-- metrics: begin -->\n", "<!-- metrics: end -->\n"
SUFFIXES = {"counter": "_total", "info": "_info"}


def declared() -> dict[str, tuple[str, tuple[str, ...], str]]:
    """Return each metric's type, labels and description, by its full name."""
    registry = CollectorRegistry()
    labels = Metrics(registry).labels
    found = {}
    for metric in registry.collect():
        name = metric.name + SUFFIXES.get(metric.type, "")
        found[name] = metric.type, labels[name], metric.documentation
    return found


def table() -> str:
    """Return the table: name, type, labels, description."""
    rows = ["| metric | type | labels | |", "|---|---|---|---|"]
    for name, (kind, labels, text) in declared().items():
        rows.append(f"| `{name}` | {kind} | {', '.join(f'`{label}`' for label in labels)} | {text} |")
    return "\n".join(rows) + "\n"


def document_text() -> str:
    """Return docs/metrics.md with the current table.

    Raises:
        SystemExit: If the marks of the table are missing.
    """
    before, begin, rest = DOCUMENT.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"document.py: {DOCUMENT}: the marks of the table are missing")
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def main(arguments: list[str]) -> int:
    """Write the document if it is stale, or with `--check` report it; return the exit code."""
    text = document_text()
    if text == DOCUMENT.read_text(encoding="utf-8"):
        return 0
    print(f"{DOCUMENT.relative_to(ROOT)} {'is stale' if '--check' in arguments else 'brought up to date'}")
    if "--check" in arguments:
        return 1
    DOCUMENT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
