"""Results as Markdown pages: a section for each kind of processor, with a part for each measurement.

Figures of one kind of processor say nothing about another. A run replaces the parts that it measured in the section of its own kind
of processor (`dragoman.export.processor`) and leaves everything else on the page as it is.
"""

import argparse
import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dragoman.export.processor import processor_kind, processor_name
from dragoman.extras import installed_version

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks/results"


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have; see `output`."""
    found = argparse.ArgumentParser(
        prog=program(), description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    found.add_argument("--data", type=Path, default=Path("data/multi30k"), help="Folder with the files of Multi30k.")
    cache = Path(tempfile.gettempdir()) / "dragoman-benchmarks"
    found.add_argument("--cache", type=Path, default=cache, help="Folder that keeps bundles and converted models.")
    found.add_argument("--output", type=Path, help="Folder of the pages; by default benchmarks/results, with --quick none.")
    found.add_argument("--quick", action="store_true", help="A little of everything, to see that it works; figures mean nothing.")
    return found


def output(arguments: argparse.Namespace) -> Path | None:
    """Return the folder to write pages to, or None for printing alone."""
    chosen: Path | None = arguments.output
    return chosen or (None if arguments.quick else RESULTS)


def program() -> str:
    """Return the command that started this program, without its arguments."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else "python"


@dataclass(frozen=True, slots=True)
class Page:
    """One page of results."""

    name: str  # name of its file, without the ending
    title: str  # its heading
    output: Path | None  # folder of the page; None prints only
    packages: Sequence[str]  # distributions whose versions matter
    kind: str = ""  # kind of processor, by default this machine's

    def write(self, part: str, rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> None:
        """Replace one part in the section of this kind of processor, and print it.

        Args:
            part: Its heading; empty for a page that has one part.
            rows: At least one, with the columns of the first.
            notes: Paragraphs below the table.
        """
        kind = self.kind or processor_kind()
        body = "\n\n".join([about(self.packages), table(rows), *notes])
        print(f"# {self.title}, {kind}{f', {part}' if part else ''}\n\n{body}\n", flush=True)
        if self.output:
            self.output.mkdir(parents=True, exist_ok=True)
            path = self.output / f"{self.name}.md"
            before = path.read_text(encoding="utf-8") if path.is_file() else ""
            path.write_text(merge(before, self.title, f"`{kind}`", part, body), encoding="utf-8")

    def picture(self) -> Path | None:
        """Return the path of the page's picture of this kind of processor; None where nothing is written."""
        if self.output:
            self.output.mkdir(parents=True, exist_ok=True)
        return self.output / f"{self.name}-{self.kind or processor_kind()}.png" if self.output else None


def merge(page: str, title: str, kind: str, part: str, body: str) -> str:
    """Return a page with one part replaced or added.

    Args:
        page: Its text; empty for a new one.
        title: Heading of the page.
        kind: Heading of the section.
        part: Heading of the part; empty for a section without parts.
        body: Text of the part.
    """
    sections: dict[str, dict[str, str]] = {}
    for section in re.split(r"^## ", page, flags=re.MULTILINE)[1:]:
        heading, _, rest = section.partition("\n")
        parts = re.split(r"^### ", rest, flags=re.MULTILINE)
        sections[heading] = {"": parts[0].strip()} if parts[0].strip() else {}
        sections[heading] |= {name: text.strip() for name, _, text in (each.partition("\n") for each in parts[1:])}
    sections.setdefault(kind, {})[part] = body.strip()
    blocks = [f"# {title}"]
    for heading, own in sections.items():
        blocks.append(f"## {heading}")
        for name, text in own.items():
            blocks += [f"### {name}", text] if name else [text]
    return "\n\n".join(blocks) + "\n"


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table with the columns of all rows; cells that a row lacks are empty."""
    columns = list(dict.fromkeys(column for row in sorted(rows, key=len, reverse=True) for column in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    return "\n".join(lines + ["| " + " | ".join(str(row.get(column, "")) for column in columns) + " |" for row in rows])


def about(packages: Sequence[str]) -> str:
    """Return date, machine, versions, commit and command of a run."""
    machine = f"{len(os.sched_getaffinity(0))} cores of {processor_name()}"
    facts = [datetime.datetime.now(datetime.UTC).date().isoformat(), machine, f"Python {platform.python_version()}"]
    facts += [f"{package} {installed_version(package) or 'absent'}" for package in packages] + [f"commit {commit()}"]
    return f"{', '.join(facts)}: `{program()}{' ' * bool(sys.argv[1:])}{shlex.join(sys.argv[1:])}`"


def commit(folder: Path = ROOT) -> str:
    """Return the short name of a checkout's commit, with a plus sign where files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
