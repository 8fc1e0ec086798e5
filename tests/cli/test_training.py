"""Commands that train and that make checkpoints and text: what they check, when, and what they say while they work."""

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dragoman.model.training.example import EXAMPLE

ROOT = Path(__file__).parents[2]
SMALL = """
[model]
d_model = 16
num_heads = 2
num_encoder_layers = 1
num_decoder_layers = 1
encoder_ffn_dim = 16
decoder_ffn_dim = 16
[training]
max_steps = 3
"""
# Runs each command line in turn in one process, in which torch cannot be imported, and prints exit codes and what was said.
WITHOUT_TORCH = """
import contextlib, io, json, sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise AssertionError("torch is imported")

sys.meta_path.insert(0, Blocker())
from dragoman.cli import main

results = []
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["dragoman", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main.main()
        except SystemExit as error:
            code = error.code or 0
        except AssertionError as error:
            code = str(error)
    results.append([code, out.getvalue(), err.getvalue()])
assert "torch" not in sys.modules
print(json.dumps(results))
"""


def environment(**more: str) -> dict[str, str]:
    settings = {name: value for name, value in os.environ.items() if not name.startswith("DRAGOMAN_")}
    return settings | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def dragoman(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dragoman", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=environment(), timeout=300)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder of text, configurations and checkpoints, good and bad."""
    for name in ("train.en", "train.de"):
        (tmp_path / name).write_text("a dog runs\nthe dog sleeps\na cat runs\n" * 9, encoding="utf-8")
    for name in ("val.en", "val.de", "two"):
        (tmp_path / name).write_text("a dog\na cat\n", encoding="utf-8")
    (tmp_path / "one").write_text("ein Hund\n", encoding="utf-8")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "latin1").write_bytes(b"a dog\nein M\xe4dchen\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "example.toml").write_text(EXAMPLE, encoding="utf-8")
    (tmp_path / "small.toml").write_text(EXAMPLE.partition("\n[model]\n")[0] + SMALL, encoding="utf-8")
    (tmp_path / "torn.toml").write_text('[data]\nsource = "train.en\n', encoding="utf-8")
    (tmp_path / "unknown.toml").write_text(f"{EXAMPLE}max_step = 9\n", encoding="utf-8")
    (tmp_path / "range.toml").write_text(f"{EXAMPLE}max_steps = 0\n", encoding="utf-8")
    (tmp_path / "model.toml").write_text(EXAMPLE.replace("#d_model = 128", "d_model = 0"), encoding="utf-8")
    for name, text in (
        ("lengths", "one"),
        ("blank", "empty"),
        ("bytes", "latin1"),
        ("missing", "nowhere"),
        ("directory", "folder"),
    ):
        (tmp_path / f"{name}.toml").write_text(EXAMPLE.replace('"train.de"', f'"{text}"'), encoding="utf-8")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint/model.safetensors").write_bytes(b"weights")
    (tmp_path / "checkpoint/config.json").write_text("{}", encoding="utf-8")
    return tmp_path


AUGMENT = "--source-language en --target-language de --output-source {0}/out --aligner true"
BAD = {
    "no configuration": ("train", "dragoman train --example"),
    "a configuration and the example": ("train {0}/small.toml --example", "--example"),
    "missing configuration": ("train {0}/nowhere.toml", "{0}/nowhere.toml: No such file"),
    "folder as configuration": ("train {0}/folder", "{0}/folder: Is a directory"),
    "no TOML": ("train {0}/torn.toml", "{0}/torn.toml: not TOML: Illegal character '\\n' (at line 2, column 19)"),
    "configuration that is not UTF-8": ("train {0}/latin1", "{0}/latin1: not TOML: not UTF-8 (at line 2)"),
    "unknown setting": ("train {0}/unknown.toml", "training.max_step: unknown setting"),
    "setting out of range": ("train {0}/range.toml", "training.max_steps: "),
    "model that cannot be": ("train {0}/model.toml", "d_model must be at least 1"),
    "missing text": ("train {0}/missing.toml", "{0}/nowhere: No such file"),
    "missing folder of text": ("train {0}/small.toml --data {0}/nowhere", "{0}/nowhere/train.en: No such file"),
    "folder as text": ("train {0}/directory.toml", "{0}/folder: Is a directory"),
    "empty text": ("train {0}/blank.toml", "{0}/empty: the file is empty"),
    "sides of different lengths": ("train {0}/lengths.toml", "{0}/train.en has 27 lines but {0}/one has 1"),
    "text that is not UTF-8": ("train {0}/bytes.toml", "{0}/latin1, line 2: not UTF-8"),
    "missing initial checkpoint": ("train {0}/small.toml --initial-checkpoint {0}/nowhere", "{0}/nowhere/config.json"),
    "bad initial checkpoint": ("train {0}/small.toml --initial-checkpoint {0}/checkpoint", "{0}/checkpoint/config.json"),
    "output that is a file": ("train {0}/small.toml --output {0}/two", "{0}/two: not a directory"),
    "output below a file": ("train {0}/small.toml --output {0}/two/out", "{0}/two is not a directory"),
    "output that is another checkpoint": ("train {0}/small.toml --output {0}/checkpoint", "no training to resume"),
    "average of what is not there": ("average {0}/nowhere --output {0}/out", "{0}/nowhere"),
    "average of what is none": ("average {0}/checkpoint --output {0}/out", "{0}/checkpoint/config.json"),
    "average into a checkpoint": ("average {0}/nowhere --output {0}/checkpoint", "--force"),
    "average into a file": ("average {0}/checkpoint --output {0}/two", "{0}/two: not a directory"),
    "tokens for what is not there": ("add-tokens {0}/nowhere {0}/two --output {0}/out --vocab-size 300", "{0}/nowhere"),
    "tokens into a checkpoint": ("add-tokens {0}/nowhere {0}/two --output {0}/checkpoint --vocab-size 300", "--force"),
    "nearest to what is not there": ("nearest {0}/two --reference {0}/nowhere --output {0}/out", "{0}/nowhere"),
    "nearest into a folder": ("nearest {0}/two --reference {0}/two --output {0}/folder", "{0}/folder: is a directory"),
    "nearest into nowhere": ("nearest {0}/two --reference {0}/two --output {0}/nowhere/out", "no directory {0}/nowhere"),
    "text without its translation": (
        f"augment --source {{0}}/two --target {{0}}/nowhere {AUGMENT} --output-target {{0}}/out2",
        "{0}/nowhere: No such file",
    ),
    "augmented into a folder": (
        f"augment --source {{0}}/two --target {{0}}/val.de {AUGMENT} --output-target {{0}}/folder",
        "{0}/folder: is a directory",
    ),
}


def test_what_is_wrong_is_said_in_a_line_before_torch_is_loaded(files: Path) -> None:
    commands = [command.format(files).split() for command, _ in BAD.values()]
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(commands)],
        capture_output=True,
        text=True,
        check=False,
        env=environment(),
        cwd=files,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    results = json.loads(process.stdout)
    for (name, (_, said)), (code, out, err) in zip(BAD.items(), results, strict=True):
        assert (code, out) == (2, ""), (name, code, err)
        assert err.startswith("dragoman: ") and err.count("\n") == 1 and said.format(files) in err, (name, err)
    assert not (files / "out").exists() and not (files / "runs").exists()


def test_what_is_right_does_need_torch(files: Path) -> None:
    """The blocker works: with nothing wrong, its own error comes."""
    command = [["train", str(files / "small.toml"), "--output", str(files / "out")]]
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, json.dumps(command)],
        capture_output=True,
        text=True,
        check=True,
        env=environment(),
        timeout=300,
    )
    ((code, _, err),) = json.loads(process.stdout)
    assert code == "torch is imported"
    assert "27 pairs" in err, "what will be done has been said by then"


def test_the_example_is_printed_and_training_starts_with_it(files: Path) -> None:
    printed = dragoman("train", "--example")
    assert (printed.returncode, printed.stdout, printed.stderr) == (0, EXAMPLE, "")
    config = files / "toy.toml"
    config.write_text(printed.stdout + "max_steps = 2\n", encoding="utf-8")
    trained = dragoman("train", config, "--output", files / "out", "--threads", 1, "--device", "cpu")
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout == f"wrote {files / 'out'}\n"
    assert json.loads((files / "out/config.json").read_text(encoding="utf-8"))["name"] == "toy"
    assert tomllib.loads((files / "out/training/config.toml").read_text(encoding="utf-8"))["training"]["max_steps"] == 2


def test_training_without_a_terminal_says_how_it_goes_and_resumes_by_the_same_choices(files: Path) -> None:
    command: list[Any] = ["train", files / "small.toml", "--output", files / "out", "--threads", 1, "--device", "cpu"]
    first = dragoman(*command)
    assert first.returncode == 0, first.stderr
    lines = first.stderr.splitlines()
    assert all(line.startswith("dragoman: ") and line.isprintable() for line in lines), first.stderr
    for said in ("27 pairs", "by rule ", "step 1 of 3, loss ", "validation at step 3 of 3: "):
        assert sum(said in line for line in lines) == 1, said
    summary = json.loads((files / "out/training/summary.json").read_text(encoding="utf-8"))
    assert summary["chosen"]["training.warmup_steps"] == 1 and summary["text"]["num_pairs"] == 27
    again = dragoman(*command)
    assert again.returncode == 0, again.stderr
    assert "resumed at step 3 of 3" in again.stderr
    assert json.loads((files / "out/training/summary.json").read_text(encoding="utf-8"))["chosen"] == summary["chosen"]


def test_a_schedule_that_cannot_work_is_warned_of(files: Path) -> None:
    config = files / "small.toml"
    config.write_text(config.read_text(encoding="utf-8") + "warmup_steps = 2000\nmax_tokens = 4096\n", encoding="utf-8")
    trained = dragoman("train", config, "--output", files / "out", "--threads", 1, "--device", "cpu")
    assert trained.returncode == 0, trained.stderr
    warned = [line for line in trained.stderr.splitlines() if line.startswith("dragoman: warning: ")]
    assert [line.split(": ")[2] for line in warned] == ["training.warmup_steps", "training.max_tokens"]
