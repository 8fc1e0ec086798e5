"""What every benchmark writes: a JSON file with all figures and what they were measured on, and a Markdown table beside it."""

import datetime
import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results"


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


def write(name: str, title: str, about: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], notes: Sequence[str] = ()) -> None:
    """Write `results/NAME.json` and `results/NAME.md`; every row has the same keys, which head the columns."""
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({"environment": about, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    columns = list(rows[0])
    lines = [
        f"# {title}",
        "",
        f"{about['date']}, {about['cores']} cores of {about['processor']}, Python {about['python']}, "
        + ", ".join(f"{package} {number}" for package, number in about["versions"].items())
        + ".",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
        *("| " + " | ".join(str(row[column]) for column in columns) + " |" for row in rows),
        *(("", *notes) if notes else ()),
    ]
    text = "\n".join(lines) + "\n"
    (RESULTS / f"{name}.md").write_text(text, encoding="utf-8")
    print(text)
