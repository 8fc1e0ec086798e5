"""What is wrong with an export is said before anything slow is loaded."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Loads the command line in a Python that cannot import what takes seconds.
PROGRAM = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnx", "onnx_ir", "onnxruntime", "onnxscript"):
            raise AssertionError(f"{name} was imported before the arguments were checked")

sys.meta_path.insert(0, Blocker())
from dragoman.cli.main import main
main()
"""


@pytest.fixture
def folder(tmp_path: Path, checkpoint_dir: Path) -> Path:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "letter.txt").write_text("mine")
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "text.txt").write_text("a dog\n")
    (tmp_path / "two.txt").write_text("ein Hund\nzwei\n")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9\n")
    for name, config in {"broken": "{", "list": "[]", "unknown": json.dumps({"model": {"depth": 3}})}.items():
        (tmp_path / name).mkdir()
        for path in checkpoint_dir.iterdir():
            (tmp_path / name / path.name).symlink_to(path)
        (tmp_path / name / "config.json").unlink()
        (tmp_path / name / "config.json").write_text(config)
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").symlink_to(checkpoint_dir / "config.json")
    return tmp_path


def export(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, "export", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("{folder}/nowhere {folder}/out", "nowhere/config.json: No such file"),
        ("{folder}/text.txt {folder}/out", "text.txt/config.json: Not a directory"),
        ("{folder}/half {folder}/out", "half/tokenizer.json: no such file"),
        ("{folder}/broken {folder}/out", "broken/config.json: not JSON"),
        ("{folder}/list {folder}/out", "list/config.json: not a checkpoint of format version"),
        ("{folder}/unknown {folder}/out", "unknown/config.json: "),
        ("{checkpoint} {folder}/full", "full: exists and is not empty"),
        ("{checkpoint} {folder}/full --force", "full: exists and is not a bundle"),
        ("{checkpoint} {folder}/text.txt", "text.txt: exists and is not a directory"),
        ("{checkpoint} {folder}/text.txt/deeper/out", "text.txt: exists and is not a directory"),
        ("{checkpoint} {folder}/out --precision int9", "precision must be fp32 or int8 or fp16 or bf16, not 'int9'"),
        ("{checkpoint} {folder}/out --name a/b", "name must be letters"),
        ("{checkpoint} {folder}/out --calibration {folder}/text.txt", "texts for calibration go with int8"),
        ("{checkpoint} {folder}/out --precision int8 --calibration {folder}/empty.txt", "empty.txt: the file is empty"),
        ("{checkpoint} {folder}/out --precision int8 --calibration {folder}/latin.txt", "latin.txt, line 1: not UTF-8"),
        ("{checkpoint} {folder}/out --precision int8 --calibration {folder}/full", "full: Is a directory"),
        ("{checkpoint} {folder}/out --precision int8 --quality-source {folder}/text.txt", "go together"),
        (
            "{checkpoint} {folder}/out --quality-source {folder}/text.txt --quality-reference {folder}/two.txt",
            "texts for quality go with",
        ),
        ("{checkpoint} {folder}/out --precision int8 --weight-bits 6", "weights of int8 have 7 or 8 bits, not 6"),
        ("{checkpoint} {folder}/out --weight-bits 7", "weights of 7 bits go with int8, not fp32"),
        ("{checkpoint} {folder}/out --precision int8 --cache-precision fp16", "the precision of caches can be int8, not 'fp16'"),
        ("{checkpoint} {folder}/out --precision fp16 --cache-precision int8", "caches in int8 go with int8, not fp16"),
        ("{checkpoint} {folder}/out --shortlist-size 5", "--shortlist-size goes with --shortlist"),
        ("{checkpoint} {folder}/out --shortlist {folder}/two.txt --shortlist-size 0", "keeps at least 1 token of its text, not 0"),
        ("{checkpoint} {folder}/out --shortlist {folder}/two.txt --shortlist {folder}/nowhere", "nowhere: "),
        ("{checkpoint} {folder}/out --shortlist {folder}/empty.txt", "empty.txt: the file is empty"),
    ],
)
def test_what_is_wrong_is_one_line_before_torch_is_loaded(folder: Path, checkpoint_dir: Path, arguments: str, message: str) -> None:
    result = export(*(part.format(folder=folder, checkpoint=checkpoint_dir) for part in arguments.split()))
    assert result.returncode == 2, result.stderr
    assert result.stderr.startswith("dragoman: ") and message in result.stderr and result.stderr.count("\n") == 1
    assert result.stdout == "" and not (folder / "out").exists()


def test_nothing_is_blocked_but_by_the_blocker(folder: Path, checkpoint_dir: Path) -> None:
    """With sound arguments the same program goes on to what is blocked: the test above could fail."""
    result = export(checkpoint_dir, folder / "out")
    assert "was imported before the arguments were checked" in result.stderr
