"""What every benchmark writes: a JSON file with all figures and what they were measured on, and a Markdown file with tables.

Both have a section for each kind of processor (`dragoman.export.processor`), because figures of one say nothing of another: a
run replaces the section of its own kind and leaves the others as they are. A file of the form before that is one section, of a kind
that nobody noted down.
"""

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from dragoman.export.processor import processor_kind

RESULTS = Path(__file__).parents[1] / "results"
UNKNOWN = "unknown"
"""Kind of a processor that is not told."""


@dataclass(frozen=True, slots=True)
class Section:
    """What was measured on one kind of processor.

    Attributes:
        environment: As `environment` returns it, with whatever else is kept, every single run for example.
        rows: Of the table; all have the same keys, which head the columns.
        notes: Lines below it.
    """

    environment: dict[str, Any]
    rows: list[dict[str, Any]]
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """Return it in Markdown, without a heading."""
        about, columns = self.environment, list(self.rows[0])
        machine = f"{about['cores']} cores of {about['processor']}"
        versions = [f"{package} {number}" for package, number in about["versions"].items()]
        return [
            ", ".join([about["date"], machine, f"Python {about['python']}", *versions]) + ".",
            "",
            "| " + " | ".join(columns) + " |",
            "|" + "---|" * len(columns),
            *("| " + " | ".join(str(row[column]) for column in columns) + " |" for row in self.rows),
            *(("", *self.notes) if self.notes else ()),
        ]


@dataclass(slots=True)
class Result:
    """One benchmark's file.

    Attributes:
        title: Heading.
        sections: By the kind of processor.
    """

    title: str
    sections: dict[str, Section] = field(default_factory=dict)

    def write(self, name: str) -> None:
        """Write `results/NAME.json` and `results/NAME.md`."""
        RESULTS.mkdir(exist_ok=True)
        kinds = sorted(self.sections, key=lambda kind: (kind == UNKNOWN, kind))
        content = {"title": self.title, "kinds": {kind: _content(self.sections[kind]) for kind in kinds}}
        (RESULTS / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (RESULTS / f"{name}.md").write_text(self.text(), encoding="utf-8")

    def text(self) -> str:
        """Return the tables in Markdown."""
        lines = [f"# {self.title}"]
        for kind in sorted(self.sections, key=lambda kind: (kind == UNKNOWN, kind)):
            lines += ["", f"## {heading(kind)}", "", *self.sections[kind].lines()]
        return "\n".join(lines) + "\n"


def environment(*packages: str) -> dict[str, Any]:
    """Describe the machine and the versions that matter."""
    model_names = {
        line.partition(":")[2].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")
    }
    return {
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "processor": ", ".join(sorted(model_names)) or platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "load_before": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {package: version(package) for package in packages},
    }


def heading(kind: str) -> str:
    """Name a kind of processor in a heading."""
    return "A processor of an unknown kind" if kind == UNKNOWN else f"`{kind}`"


def write(name: str, title: str, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> None:
    """Write the section of this processor's kind to `results/NAME.json` and `results/NAME.md`.

    Args:
        name: Of the files.
        title: Heading of all sections.
        about: See `Section`, as what follows.
        rows: At least one.
        notes: Below the table.
    """
    result = read_result(name)
    result.title = title
    kind = processor_kind()
    result.sections[kind] = Section(dict(about), [dict(row) for row in rows], list(notes))
    result.write(name)
    print(f"# {title}, {kind}", "", *result.sections[kind].lines(), sep="\n")


def read(name: str) -> Section | None:
    """Return what was written of this processor's kind; None if nothing was."""
    return read_result(name).sections.get(processor_kind())


def read_result(name: str) -> Result:
    """Return what was written of every kind; a file that is not there is one without sections."""
    path = RESULTS / f"{name}.json"
    return parse(path) if path.is_file() else Result("")


def parse(path: Path) -> Result:
    """Return what a file holds, in this form or the one before.

    Raises:
        OSError: If it cannot be read.
        ValueError: If it is not JSON.
        KeyError: If it is not a benchmark's.
    """
    content = json.loads(path.read_text(encoding="utf-8"))
    if "kinds" in content:
        return Result(content["title"], {kind: Section(**section) for kind, section in content["kinds"].items()})
    title, notes = _beside(path.with_suffix(".md"))
    return Result(title, {UNKNOWN: Section(content["environment"], content["rows"], notes)})


def figure_name(name: str) -> str:
    """Return the file name, in `RESULTS`, of a plot of this processor's kind."""
    return f"{name}-{processor_kind()}.png"


def _content(section: Section) -> dict[str, Any]:
    return {"environment": section.environment, "rows": section.rows, "notes": section.notes}


def _beside(path: Path) -> tuple[str, list[str]]:
    """Return the title, and the lines below the first table, of a Markdown file with one section."""
    if not path.is_file():
        return "", []
    lines = path.read_text(encoding="utf-8").splitlines()
    is_row = [line.startswith("|") for line in lines]
    end = next((i for i in range(1, len(lines)) if is_row[i - 1] and not is_row[i]), len(lines))
    return lines[0].removeprefix("# "), lines[end + 1 :]
