"""Write Grafana's dashboard from `board.py`.

Run `python -m deploy.grafana.generate` from the root of the repository, or `make chart`, which brings the chart's copy up to date
too; with `--check` it only tells whether the file is stale. The JSON is that of Grafana 10 and later, and needs no plugin.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deploy.grafana.board import rows, variables
from deploy.grafana.panels import Row

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy/grafana/dashboards/dragoman.json"
SCHEMA_VERSION = 39
WIDTH = 24
TILE_HEIGHT, PANEL_HEIGHT = 4, 8


def layout(content: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the panels, each with its number and place, below the title of their row."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, num_columns, members in content:
        row = {"type": "row", "title": title, "collapsed": False, "panels": []}
        panels.append(row | {"id": len(panels) + 1, "gridPos": {"x": 0, "y": y, "w": WIDTH, "h": 1}})
        y += 1
        width, height = WIDTH // num_columns, TILE_HEIGHT if members[0]["type"] == "stat" else PANEL_HEIGHT
        for i, panel in enumerate(members):
            place = {"x": i % num_columns * width, "y": y + i // num_columns * height, "w": width, "h": height}
            panels.append(panel | {"id": len(panels) + 1, "gridPos": place})
        y += -(-len(members) // num_columns) * height
    return panels


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return {
        "uid": "dragoman",
        "title": "Dragoman",
        "description": "Translation servers: promises, latency, throughput, batching, queue, errors, models, processes.",
        "tags": ["dragoman"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [],
        "templating": {"list": variables()},
        "panels": layout(rows()),
    }


def text() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=1, ensure_ascii=False) + "\n"


def main(arguments: list[str]) -> int:
    """Write the file if it is stale, or only tell; return the exit code."""
    wanted = text()
    if DASHBOARD.exists() and DASHBOARD.read_text(encoding="utf-8") == wanted:
        return 0
    print(f"{DASHBOARD.relative_to(ROOT)} {'is stale' if '--check' in arguments else 'brought up to date'}")
    if "--check" in arguments:
        return 1
    DASHBOARD.parent.mkdir(parents=True, exist_ok=True)
    DASHBOARD.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
