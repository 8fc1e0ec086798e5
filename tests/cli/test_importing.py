"""`dragoman import`: from a folder of another library to a checkpoint, or a line with the reason."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from dragoman.export.bundle import Bundle
from dragoman.model.checkpoint import Checkpoint
from tests.cli.conftest import assert_refused
from tests.oracles.checkpoints import make_checkpoint
from tests.shelf import Shelf

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def folder(shelf: Shelf) -> Path:
    return shelf.get("foreign-t5-hub", lambda path: make_checkpoint(path, "t5"))


def test_a_folder_becomes_a_checkpoint_and_a_report(run_command: Run, folder: Path, tmp_path: Path) -> None:
    options = ["--name", "mine", "--task", "translation_en_to_de", "--max-source-tokens", 900, "--max-target-tokens", 77]
    code, out, err = run_command("import", folder, tmp_path / "out", *options, "--half", "--check", "--special-tokens-in-text")
    assert (code, err) == (0, "")
    checkpoint = Checkpoint.load(tmp_path / "out")
    config = checkpoint.model.config
    assert checkpoint.defaults.special_tokens_in_text and "special tokens that a text names are tokens: <extra_id_0>, " in out
    assert (checkpoint.name, config.max_source_positions, config.max_target_positions) == ("mine", 900, 77)
    sizes = [(where / "model.safetensors").stat().st_size for where in (tmp_path / "out", folder)]
    assert sizes[0] < 0.6 * sizes[1]
    lines = out.splitlines()
    assert lines[0].startswith("found:      T5 (model_type t5): 3+2 layers, d_model 64, 4 heads of 24, ")
    assert {line.partition(":")[0] for line in lines[:-1]} == {"found", "translated", "ignored", "checked"}
    assert lines[-1] == f"wrote {tmp_path / 'out'}: mine"
    assert any("dropout_rate 0.0" in line and line.endswith(": of training") for line in lines)
    assert "of those of Transformers (the largest is" in out
    assert "ids of 6 of 6 texts, special tokens included, are those of Transformers’ tokeniser" in out
    assert "around every text: TEXT </s>" in out


def test_it_is_exported_at_once_under_its_folders_name(run_command: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the server answers\n", encoding="utf-8")
    (tmp_path / "T5 (small)!").symlink_to(folder)
    options = ["--precision", "int8", "--max-source-tokens", "40"]
    asked = ("import", tmp_path / "T5 (small)!", tmp_path / "out", "--export")
    code, out, _ = run_command(*asked, tmp_path / "quantised", *options)
    assert code == 0 and f"wrote {tmp_path / 'quantised'}: T5-small" in out
    assert re.search(r"wrote .*, int8\nin 8 bits: [\d.]+% of .*\nbefore that: log-probabilities within .*\n", out)
    code, out, _ = run_command(*asked, tmp_path / "choosing", "--shortlist", tmp_path / "text", "--force", "--json")
    imported, exported = map(json.loads, out.splitlines())
    assert code == 0 and (imported["name"], exported["bundle"]) == ("T5-small", str(tmp_path / "choosing"))
    assert "T5 (model_type t5)" in imported["found"][0] and exported["parity"]["num_token_mismatches"] == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["name"] == "T5-small"
    manifest = Bundle.open(tmp_path / "quantised").manifest
    assert (manifest.name, manifest.precision, manifest.is_pair_safe, manifest.cache_precision) == (
        "T5-small",
        "int8",
        True,
        "int8",
    )
    manifest = Bundle.open(tmp_path / "choosing").manifest
    assert 0 < manifest.num_choices < manifest.target_vocab_size


def test_what_computes_something_else_is_not_written(run_command: Run, folder: Path, tmp_path: Path, monkeypatch) -> None:
    from dragoman.model.importers.families import FAMILIES

    unscaled = replace(FAMILIES["t5"], settings={"is_output_scaled": False})
    monkeypatch.setitem(FAMILIES, "t5", unscaled)
    assert_refused(run_command("import", folder, tmp_path / "out", "--check"), str(folder), "differ from those of Transformers by")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_or_a_name_that_is_none_is_a_line(run_command: Run, folder: Path, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "empty").mkdir()
    for *arguments, named in (
        (tmp_path / "empty", f"{tmp_path / 'empty' / 'config.json'}: No such file"),
        (tmp_path / "nowhere" / "deeper", "nowhere/deeper: No such file or directory"),
        ("", ""),
        (folder, "--task", "dance", "dance"),
    ):
        assert_refused(run_command("import", *arguments, tmp_path / "out"), named)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    missing = run_command("import", "unknown/nothing-at-all", tmp_path / "out")
    assert_refused(missing, "needs the package huggingface-hub, of the extra `import`")
    ran = subprocess.run(
        [sys.executable, "-m", "dragoman", "import", "unknown/nothing-at-all", tmp_path / "out"],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
    )
    unknown = "unknown/nothing-at-all: no such folder, and the hub cannot be reached"
    assert_refused((ran.returncode, ran.stdout, ran.stderr), unknown)
    assert not (tmp_path / "out").exists()


# A directory that is written beside the output waits there for the signal.
UNTIL_TERMINATED = """
import sys, tempfile, time

class Waiting(tempfile.TemporaryDirectory):
    def __enter__(self):
        name = super().__enter__()
        if name.startswith({place!r}):
            print("begun", flush=True)
            time.sleep(60)
        return name

tempfile.TemporaryDirectory = Waiting
from dragoman.cli.main import main
sys.argv[1:] = [{command!r}, {source!r}, {place!r} + "/out"]
main()
"""


@pytest.mark.parametrize("command", ["import", "export"])
def test_what_is_terminated_leaves_nothing(command: str, run_command: Run, folder: Path, tmp_path: Path) -> None:
    source, place = folder, tmp_path / "place"
    if command == "export":
        source = tmp_path / "checkpoint"
        assert run_command("import", folder, source)[0] == 0
    place.mkdir()
    script = UNTIL_TERMINATED.format(command=command, source=str(source), place=str(place))
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
    with subprocess.Popen([sys.executable, "-c", script], **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == b"begun\n"
        assert len(list(place.iterdir())) == 1
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert list(place.iterdir()) == []
