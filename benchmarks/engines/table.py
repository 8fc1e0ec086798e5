"""Rows of the benchmark `engines`, and every run behind them: of this time, and of those before on the same kind of processor."""

import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.engines.sides import Run
from benchmarks.harness.report import Section, read, write

ROOT = Path(__file__).parents[2]
MEASURED = "measured"
"""Column that says when, of which commit and in how many rounds: parts may be measured one by one."""


@dataclass(slots=True)
class Table:
    """What was measured; a case is what its columns up to the first figure say.

    Attributes:
        rows: Of the table.
        runs: As `describe` makes them, with the case's columns.
    """

    rows: list[dict[str, Any]] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def add(self, case: Mapping[str, Any], figures: Mapping[str, Any], found: Mapping[str, list[Run]]) -> None:
        """Take in a case, its figures and its runs."""
        num_rounds = min(map(len, found.values()))
        self.rows.append({**case, **figures, MEASURED: f"rounds: {num_rounds}"})
        self.runs += [{**case, **describe(name, runs)} for name, runs in found.items()]
        print(self.rows[-1], flush=True)

    def write(self, name: str, title: str, about: Mapping[str, Any], case: Sequence[str], notes: Sequence[str]) -> None:
        """Write the table; cases of the section that is there stay if they were not measured again.

        Args:
            name: Of the files.
            title: Heading.
            about: See `report.write`.
            case: Columns that tell cases apart.
            notes: See `report.write`.
        """
        old = read(name) or Section({}, [])
        new = {tuple(row[column] for column in case) for row in self.rows}

        def stays(row: Mapping[str, Any]) -> bool:
            return tuple(row.get(column) for column in case) not in new

        rows = [row for row in old.rows if MEASURED in row and stays(row)]
        kept = {tuple(row[column] for column in case) for row in rows}
        runs = [run for run in old.environment.get("runs", []) if tuple(run.get(column) for column in case) in kept]
        rows += [{**row, MEASURED: f"{about['date']}, {about['commit']}, {row[MEASURED]}"} for row in self.rows]
        write(name, title, {**about, "runs": runs + self.runs}, uniform(rows), notes)


def commit(folder: Path = ROOT) -> str:
    """Return the short name of a checkout's commit, with a plus sign where files differ from it."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout.strip() or "unknown"


def describe(name: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return one side's runs, ready for JSON."""
    return {
        "side": name,
        "answers": [len(run.answers) for run in runs],
        "seconds": [round(run.seconds, 3) for run in runs],
        "tokens a second": [round(run.tokens_per_second, 1) for run in runs],
        "cores": [{process: round(share, 2) for process, share in run.cores.items()} for run in runs],
    }


def uniform(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give every row the same columns, those of the row that has most first; what a row lacks stays empty."""
    columns = list(dict.fromkeys(column for row in sorted(rows, key=len, reverse=True) for column in row))
    columns.sort(key=lambda column: column == MEASURED)
    return [{column: row.get(column, "") for column in columns} for row in rows]
