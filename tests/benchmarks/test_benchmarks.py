"""Benchmarks start, and their pages of results keep what a run did not measure."""

import re
import subprocess
import sys
from pathlib import Path

from benchmarks.harness.page import Page, merge

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = sorted(
    {path.stem for path in (ROOT / "benchmarks").glob("*.py") if path.stem != "__init__"}
    | {path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")}
)
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


def test_pages_of_results_can_be_merged_into(tmp_path: Path) -> None:
    for path in (ROOT / "benchmarks/results").glob("*.md"):
        page = path.read_text(encoding="utf-8")
        assert merge(page, page.partition("\n")[0].removeprefix("# "), "`new`", "part", "body") == page + (
            "\n## `new`\n\n### part\n\nbody\n"
        )
    page = merge(merge("", "Title", "`avx2`", "one", "first"), "Title", "`asimd`", "one", "other")
    expected = "# Title\n\n## `avx2`\n\n### one\n\nnew\n\n## `asimd`\n\n### one\n\nother\n"
    assert merge(page, "Title", "`avx2`", "one", "new") == expected
    Page("name", "Title", tmp_path, (), "gpu").write("part", [{"a": 1}, {"b": 2}], ["note"])
    text = (tmp_path / "name.md").read_text(encoding="utf-8")
    assert text.startswith("# Title\n\n## `gpu`\n\n### part\n\n2") and text.endswith(
        "| a | b |\n|---|---|\n| 1 |  |\n|  | 2 |\n\nnote\n"
    )
