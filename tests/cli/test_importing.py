"""`dragoman import`: two words from a folder of another library to a checkpoint, or a line that says why not."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.export.bundle import Bundle
from dragoman.model.checkpoint import Checkpoint
from tests.oracles.checkpoints import make_checkpoint
from tests.shelf import Shelf

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def folder(shelf: Shelf) -> Path:
    return shelf.get("foreign-t5-hub", lambda path: make_checkpoint(path, "t5"))


def refused(result: tuple[int, str, str], *reasons: str) -> None:
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.startswith("dragoman: ")
    assert err.count("\n") == 1
    for reason in reasons:
        assert reason in err


def test_a_folder_becomes_a_checkpoint_and_a_report(run: Run, folder: Path, tmp_path: Path) -> None:
    code, out, err = run("import", folder, tmp_path / "out", "--name", "mine", "--task", "translation_en_to_de")
    assert (code, err) == (0, "")
    assert Checkpoint.load(tmp_path / "out").name == "mine"
    lines = out.splitlines()
    assert lines[0].startswith("found:      T5 (model_type t5): 3+2 layers, d_model 64, 4 heads of 24, ")
    assert {line.partition(":")[0] for line in lines[:-1]} == {"found", "translated", "ignored", "checked"}
    assert lines[-1] == f"wrote {tmp_path / 'out'}: mine"
    assert any("dropout_rate 0.0" in line and line.endswith(": of training") for line in lines)


def test_it_is_named_for_its_folder(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "T5 (small)!").symlink_to(folder)
    assert run("import", tmp_path / "T5 (small)!", tmp_path / "out")[0] == 0
    assert json.loads((tmp_path / "out" / "config.json").read_text())["name"] == "T5-small"


def test_lengths_and_half_precision_are_as_asked(run: Run, folder: Path, tmp_path: Path) -> None:
    options = ["--max-source-tokens", "900", "--max-target-tokens", "77", "--half"]
    assert run("import", folder, tmp_path / "out", *options)[0] == 0
    config = Checkpoint.load(tmp_path / "out").model.config
    assert (config.max_source_positions, config.max_target_positions) == (900, 77)
    sizes = [(where / "model.safetensors").stat().st_size for where in (tmp_path / "out", folder)]
    assert sizes[0] < 0.6 * sizes[1]


def test_it_is_exported_at_once(run: Run, folder: Path, tmp_path: Path) -> None:
    code, out, _ = run("import", folder, tmp_path / "out", "--export", tmp_path / "bundle", "--max-source-tokens", "40")
    assert code == 0
    assert Bundle.open(tmp_path / "bundle").manifest.name == folder.name
    assert f"wrote {tmp_path / 'bundle'}: {folder.name}" in out


def test_it_is_exported_with_a_shortlist(run: Run, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the server answers\n", encoding="utf-8")
    code, _, _ = run("import", folder, tmp_path / "out", "--export", tmp_path / "bundle", "--shortlist", tmp_path / "text")
    assert code == 0
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert 0 < manifest.num_choices < manifest.target_vocab_size


def test_it_is_exported_with_fewer_bits(run: Run, folder: Path, tmp_path: Path) -> None:
    options = ["--precision", "int8", "--weight-bits", "7", "--cache-precision", "int8", "--max-source-tokens", "40"]
    assert run("import", folder, tmp_path / "out", "--export", tmp_path / "bundle", *options)[0] == 0
    manifest = Bundle.open(tmp_path / "bundle").manifest
    assert (manifest.precision, manifest.weight_bits, manifest.cache_precision) == ("int8", 7, "int8")


def test_it_is_compared_with_transformers(run: Run, folder: Path, tmp_path: Path) -> None:
    code, out, _ = run("import", folder, tmp_path / "out", "--check")
    assert code == 0
    assert "of those of Transformers (the largest is" in out
    assert "ids of 6 of 6 texts are those of Transformers’ tokeniser" in out


def test_what_computes_something_else_is_not_written(
    run: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dragoman.model.importers import t5

    monkeypatch.setattr(t5.T5Like, "_is_scaled", lambda *_: False)
    refused(run("import", folder, tmp_path / "out", "--check"), str(folder), "differ from those of Transformers by")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--precision", "int8"], "go with --export"),
        (["--quality-source", "x"], "go with --export"),
        (["--shortlist", "x"], "go with --export"),
        (["--weight-bits", "7"], "go with --export"),
        (["--cache-precision", "int8"], "go with --export"),
        (["--export", "{0}/b", "--weight-bits", "7"], "go with int8"),
        (["--export", "{0}/b", "--cache-precision", "int8"], "go with int8"),
        (["--export", "{0}/b", "--shortlist-size", "9"], "goes with --shortlist"),
        (["--export", "{0}/b", "--precision", "int3"], "int3"),
        (["--export", "{0}/b", "--quality-source", "x"], "go together"),
        (["--export", "{0}/out"], "a place each"),
        (["--export", "{0}/out/bundle"], "a place each"),
        (["--export", "{0}"], "exists and is not empty"),
        (["--export", "{0}/file"], "file"),
        (["--export", "{0}/b", "--shortlist", "{0}/none"], "none: No such file"),
        (["--export", "{0}/b", "--shortlist", "{0}/file"], "the file is empty"),
        (["--export", "{0}/b", "--shortlist", __file__, "--shortlist-size", "0"], "at least 1 token"),
        (["--export", "{0}/b", "--precision", "int8", "--calibration", "{0}/none"], "none: No such file"),
        (["--name", "a b"], "name must be"),
        (["--revision", "main"], "--revision is of repositories"),
        (["--max-source-tokens", "0"], "--max-source-tokens"),
        (["--task", "dance"], "dance"),
    ],
)
def test_options_that_do_not_go_are_refused_before_the_work(
    options: list[str], reason: str, run: Run, folder: Path, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    refused(run("import", folder, tmp_path / "out", *(option.format(tmp_path) for option in options)), reason)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_broken_folder_is_a_line(run: Run, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    refused(run("import", tmp_path / "empty", tmp_path / "out"), f"{tmp_path / 'empty' / 'config.json'}: No such file")
    refused(run("import", tmp_path / "nowhere" / "deeper", tmp_path / "out"), "nowhere/deeper: No such file or directory")
    refused(run("import", "", tmp_path / "out"))


def test_a_name_without_a_network_is_a_line(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "dragoman", "import", "nobody/nothing-at-all", tmp_path / "out"],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hub")},
        capture_output=True,
        text=True,
    )
    refused((ran.returncode, ran.stdout, ran.stderr), "nobody/nothing-at-all: no such folder, and the hub cannot be reached")


def test_a_name_without_the_package_is_a_line(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(run("import", "nobody/nothing-at-all", tmp_path / "out"), "needs the package huggingface-hub, of the extra `import`")


def test_a_kill_leaves_the_old_checkpoint(folder: Path, run: Run, tmp_path: Path) -> None:
    """When all is written, and nothing has been put in its place."""
    output = tmp_path / "out"
    script = (
        "import os, signal, sys; from pathlib import Path\n"
        "from dragoman.model.importers import importing\n"
        "importing.put_directory = lambda *_: os.kill(os.getpid(), signal.SIGKILL)\n"
        "importing.import_checkpoint(Path(sys.argv[1]), Path(sys.argv[2]), importing.Order(name='new', is_forced=True))\n"
    )
    killed = [sys.executable, "-c", script, folder, output]
    assert subprocess.run(killed, capture_output=True).returncode == -signal.SIGKILL
    assert not output.exists()
    assert run("import", folder, output, "--name", "old")[0] == 0
    assert subprocess.run(killed, capture_output=True).returncode == -signal.SIGKILL
    assert Checkpoint.load(output).name == "old"


def test_a_bundle_around_the_checkpoint_is_refused_before_the_work(run: Run, folder: Path, tmp_path: Path) -> None:
    refused(run("import", folder, tmp_path / "b" / "out", "--export", tmp_path / "b"), "a place each")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["import", "export"])
def test_what_is_terminated_leaves_nothing(command: str, run: Run, folder: Path, tmp_path: Path) -> None:
    """The signal comes when there is something beside the place already."""
    source, place = folder, tmp_path / "place"
    if command == "export":
        source = tmp_path / "checkpoint"
        assert run("import", folder, source)[0] == 0
    place.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", UNTIL_TERMINATED.format(command=command, source=str(source), place=str(place))],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"begun\n"
        assert len(list(place.iterdir())) == 1
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM
    assert list(place.iterdir()) == []


# What is written beside the place waits there for the signal.
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
