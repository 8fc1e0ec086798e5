"""The dashboard's file, against the program that writes it and the server it shows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from deploy.grafana import generate, objectives
from deploy.grafana.board import rows
from dragoman.server.config import LATENCY_BUCKETS


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(generate.DASHBOARD.read_text(encoding="utf-8"))
    return loaded


@pytest.fixture(scope="module")
def panels(dashboard: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in dashboard["panels"] if panel["type"] != "row"]


def test_the_file_is_what_the_program_writes(root: Path) -> None:
    command = [sys.executable, "-m", "deploy.grafana.generate", "--check"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr + "run: make chart"


def test_a_stale_file_is_told_and_brought_up_to_date(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(generate, "ROOT", tmp_path)
    monkeypatch.setattr(generate, "DASHBOARD", tmp_path / "folder" / "dragoman.json")
    assert generate.main(["--check"]) == 1 and not (tmp_path / "folder").exists()
    assert generate.main([]) == 0 and generate.main(["--check"]) == 0
    generate.DASHBOARD.write_text("{}")
    assert generate.main(["--check"]) == 1


def test_every_panel_says_what_it_shows_in_which_unit(panels: list[dict[str, Any]]) -> None:
    for panel in panels:
        assert panel["title"] and panel["description"].endswith("."), panel["title"]
        assert panel["type"] == "table" or "unit" in panel["fieldConfig"]["defaults"] or panel["options"]["yAxis"]["unit"]
        assert panel["targets"] and len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])


def test_numbers_and_titles_are_not_used_twice(dashboard: dict[str, Any], panels: list[dict[str, Any]]) -> None:
    numbers = [panel["id"] for panel in dashboard["panels"]]
    titles = [panel["title"] for panel in panels]
    assert len(set(numbers)) == len(numbers) and len(set(titles)) == len(titles)


def test_panels_lie_beside_each_other_and_fill_their_rows(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        place = panel["gridPos"]
        cells = {(x, y) for x in range(place["x"], place["x"] + place["w"]) for y in range(place["y"], place["y"] + place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= generate.WIDTH, panel["title"]
        taken |= cells
    assert len(taken) == generate.WIDTH * (max(y for _, y in taken) + 1)


def test_every_query_can_be_narrowed_at_the_top(dashboard: dict[str, Any], panels: list[dict[str, Any]]) -> None:
    names = [variable["name"] for variable in dashboard["templating"]["list"]]
    assert names == ["datasource", "namespace", "model", "instance"]
    for panel in panels:
        assert panel["datasource"]["uid"] == "${datasource}"
        for target in panel["targets"]:
            assert target["datasource"]["uid"] == "${datasource}"
            num_selectors = target["expr"].count("{") - target["expr"].count("{{")
            assert target["expr"].count('namespace=~"$namespace"') == target["expr"].count('instance=~"$instance"') == num_selectors


def test_objectives_are_edges_of_the_buckets_where_shares_are_exact(panels: list[dict[str, Any]]) -> None:
    assert {objectives.LATENCY_SECONDS, objectives.FIRST_TOKEN_SECONDS} <= set(LATENCY_BUCKETS)
    tiles = [target["expr"] for panel in panels if panel["type"] == "stat" for target in panel["targets"]]
    edges = {f'le="{seconds}"' for seconds in (objectives.LATENCY_SECONDS, objectives.FIRST_TOKEN_SECONDS)}
    assert all(any(edge in query for query in tiles) for edge in edges)


def test_all_that_an_operator_asks_has_its_row() -> None:
    titles = [title for title, _, _ in rows()]
    assert titles == [
        *("Overview", "Latency", "Throughput", "Batching", "Queue and admission"),
        *("Errors", "Callers", "Models", "Versions", "Processes", "Front ends", "GPU"),
    ]
