"""Benchmarks start, and their pages of results keep what a run did not measure."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.harness.page import Page, merge, table

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    {path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__"}
    | {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
)
RESULTS = sorted((ROOT / "benchmarks/results").glob("*.md"))


# One process for all, because importing PyTorch takes seconds.
RUN_ALL = """
import contextlib, runpy, sys
for name in sys.argv[1:]:
    sys.argv[1:] = ["--help"]
    with contextlib.suppress(SystemExit):
        runpy.run_module(f"benchmarks.{name}", run_name="__main__", alter_sys=True)
"""


def test_every_program_prints_its_help() -> None:
    command = [sys.executable, "-c", RUN_ALL, *PROGRAMS]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^usage: python -m benchmarks\.(\w+)", told, flags=re.MULTILINE) == PROGRAMS
    for option in ("--data", "--cache", "--output", "--quick"):
        assert len(re.findall(f"^  {option} ", told, flags=re.MULTILINE)) == len(PROGRAMS)


def test_a_part_replaces_the_one_of_its_name_and_of_its_kind_of_processor() -> None:
    page = ""
    for kind, part, body in (
        ("`avx2`", "one", "first"),
        ("`avx2`", "two", "second"),
        ("`asimd`", "one", "other"),
        ("`avx2`", "one", "new\n\n| a |\n|---|\n| 1 |\n\n- a note"),
    ):
        page = merge(page, "Title", kind, part, body)
    assert page == (
        "# Title\n\n## `avx2`\n\n### one\n\nnew\n\n| a |\n|---|\n| 1 |\n\n- a note\n\n### two\n\nsecond\n\n"
        "## `asimd`\n\n### one\n\nother\n"
    )


def test_a_page_of_one_part_has_no_heading_for_it() -> None:
    page = merge("", "Title", "`avx2`", "", "body")
    assert page == "# Title\n\n## `avx2`\n\nbody\n"
    assert merge(page, "Other", "`avx2`", "", "new") == "# Other\n\n## `avx2`\n\nnew\n"


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.stem)
def test_pages_of_results_can_be_merged_into(path: Path) -> None:
    page = path.read_text(encoding="utf-8")
    title = page.partition("\n")[0].removeprefix("# ")
    headings = re.findall(r"^## (.+)", page, flags=re.MULTILINE)
    assert headings
    merged = merge(page, title, "`new`", "part", "body")
    assert merged == page + "\n## `new`\n\n### part\n\nbody\n"


def test_nothing_but_pages_and_three_pictures_is_kept() -> None:
    others = [path.name for path in (ROOT / "benchmarks/results").iterdir() if path.suffix != ".md"]
    assert len(others) <= 3
    assert all(name.endswith(".png") and any(name in path.read_text(encoding="utf-8") for path in RESULTS) for name in others)


def test_rows_may_lack_columns() -> None:
    assert table([{"a": 1}, {"a": 2, "b": 3}]) == "| a | b |\n|---|---|\n| 1 |  |\n| 2 | 3 |"


def test_a_page_without_a_folder_is_printed_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Page("name", "Title", None, ("pytest", "no-such-package")).write("part", [{"a": 1}], ["note"])
    printed = capsys.readouterr().out
    assert "no-such-package absent" in printed
    page = Page("name", "Title", tmp_path / "results", (), "gpu")
    page.write("part", [{"a": 1}], ["note"])
    text = (tmp_path / "results/name.md").read_text(encoding="utf-8")
    assert text.startswith("# Title\n\n## `gpu`\n\n### part\n\n2") and text.endswith("| a |\n|---|\n| 1 |\n\nnote\n")
    assert page.picture() == tmp_path / "results/name-gpu.png"
