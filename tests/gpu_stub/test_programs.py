"""Programs that are run on the stub device from the command line, with the real onnxruntime-gpu."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.gpu_stub.bed import ROOT, Bed

SCRIPT = str(Path(__file__).with_name("small.py"))


def run(bed: Bed, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_stub", "--folder", str(bed.folder), "run", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.parametrize(("word", "code"), [("works", 0), ("fails", 3)])
def test_a_script_sees_cuda_and_leaves_a_report(bed: Bed, tmp_path: Path, word: str, code: int) -> None:
    result = run(bed, "--report", str(tmp_path / "seen.json"), SCRIPT, word)
    assert (result.stdout, result.returncode) == (f"{word} CUDAExecutionProvider\n", code), result.stderr
    assert json.loads((tmp_path / "seen.json").read_text())["sessions"] == []


def test_a_module_is_run_with_its_own_options(bed: Bed, tmp_path: Path) -> None:
    result = run(bed, "--report", str(tmp_path / "seen.json"), "-m", "json.tool", "--help")
    assert result.stdout.startswith("usage: ") and "--sort-keys" in result.stdout, result.stderr
