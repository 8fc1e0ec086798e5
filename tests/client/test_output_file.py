"""Output files: they appear whole or not at all, and the rest of an interrupted run can be resumed by the same run only."""

import errno
import json
import os
from pathlib import Path

import pytest

from dragoman.client.lines import LineFile
from dragoman.client.output_file import OutputFile
from dragoman.model.errors import InputError

OPTIONS = {"--model": "en-de", "--num-beams": None, "--json": False}
LINES = {"eins": "EINS\neins!\n", "zwei": "ZWEI\n", "Grüße": "GRÜSSE\n", "vier": "VIER\n"}
DONE, ALL = "EINS\neins!\nZWEI\n", "".join(LINES.values())


@pytest.fixture
def sources(tmp_path: Path) -> LineFile:
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return LineFile(tmp_path / "in.txt")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out.txt"


def write(path: Path, sources: LineFile, *lines: str, num_done: int = 0, is_resumed: bool = False) -> None:
    """Write lines after those that are done, and end with an error unless the file is complete."""
    with OutputFile(path, sources, OPTIONS, is_resumed) as file:
        assert file.num_done == num_done
        for line in lines:
            file.write(line, LINES[line])
        if num_done + len(lines) < len(LINES):
            raise KeyboardInterrupt


@pytest.fixture
def left(path: Path, sources: LineFile) -> Path:
    """A file of which two lines are done."""
    with pytest.raises(KeyboardInterrupt):
        write(path, sources, "eins", "zwei")
    return path


def names(path: Path) -> list[str]:
    return sorted(name for name in os.listdir(path.parent) if name != "in.txt")


def refusal(path: Path, sources: LineFile, options: dict | None = None, is_resumed: bool = True) -> str:
    with pytest.raises(InputError) as caught:
        OutputFile(path, sources, OPTIONS if options is None else options, is_resumed).__enter__()
    return str(caught.value)


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_file_appears_when_the_block_ends(path: Path, sources: LineFile, is_resumed: bool) -> None:
    path.write_text("old")
    with OutputFile(path, sources, OPTIONS, is_resumed) as file:
        assert refusal(path, sources, is_resumed=is_resumed) == f"{path}.partial: another process is writing it"
        for line, text in LINES.items():
            file.write(line, text)
        assert path.read_text() == "old"
    assert path.read_text(encoding="utf-8") == ALL and names(path) == ["out.txt"]
    (path.parent / "plain").touch()
    assert path.stat().st_mode == (path.parent / "plain").stat().st_mode


def test_a_failure_keeps_the_old_file_and_the_lines_that_are_done(path: Path, sources: LineFile) -> None:
    path.write_text("old")
    with pytest.raises(KeyboardInterrupt):
        write(path, sources)
    assert path.read_text() == "old" and names(path) == ["out.txt"]
    with pytest.raises(KeyboardInterrupt) as caught:
        write(path, sources, "eins", "zwei")
    assert caught.value.__notes__ == [f"2 of 4 lines are done, in {path}.partial; --resume goes on from there"]
    assert path.read_text() == "old" and Path(f"{path}.partial").read_text() == DONE
    for lines, num_done in (([], 2), (["Grüße"], 2), ([], 3)):
        with pytest.raises(KeyboardInterrupt):
            write(path, sources, *lines, num_done=num_done, is_resumed=True)
    write(path, sources, "vier", num_done=3, is_resumed=True)
    assert path.read_text(encoding="utf-8") == ALL and names(path) == ["out.txt"]


TORN = [(b"GR\xc3", b""), (b"GR", b"0123 2"), (b"", b"0123 999\n"), (b"GR", b"0123 3\n"), (b"", b"x y\n")]


def test_a_kill_in_the_middle_of_a_write_costs_that_line_only(left: Path, sources: LineFile) -> None:
    files = [Path(f"{left}.partial"), Path(f"{left}.partial.state")]
    whole = [file.read_bytes() for file in files]
    for torn in TORN:
        for file, content, more in zip(files, whole, torn, strict=True):
            file.write_bytes(content + more)
        with pytest.raises(KeyboardInterrupt):
            write(left, sources, num_done=2, is_resumed=True)
        assert [file.read_bytes() for file in files] == whole


def test_what_is_left_is_resumed_by_the_same_run_only(left: Path, sources: LineFile) -> None:
    partial, source = f"{left}.partial", left.with_name("in.txt")
    told = f"{partial}: 2 lines of an earlier run are left there; --resume goes on with them, or remove the file"
    assert refusal(left, sources, is_resumed=False) == told
    made = f"but what is done, in {partial}, was made"
    assert refusal(left, sources, OPTIONS | {"--num-beams": 4}) == f"--num-beams: 4, {made} without it"
    assert refusal(left, sources, OPTIONS | {"--json": True}) == f"--json: true, {made} without it"
    assert refusal(left, sources, OPTIONS | {"--model": ""}) == f"--model: is not given, {made} with en-de"
    for text, told in (
        ("eins\nzwo\n", f"{source}, line 2: not the line that was there when {partial} was made; remove that file to start again"),
        ("eins\n", f"{source}: 1 lines, but 2 are done, in {partial}"),
    ):
        source.write_text(text)
        assert refusal(left, LineFile(source)) == told
    assert Path(partial).read_text() == DONE
    source.write_text("eins\nzwei\ndrei\nneu\n")
    state = Path(f"{partial}.state")
    head, rest = state.read_text().split("\n", 1)
    unset = json.loads(head)["options"] | {"--sample": False, "--forced-prefix": ""}
    state.write_text(json.dumps(json.loads(head) | {"options": unset}) + "\n" + rest)
    with OutputFile(left, LineFile(source), OPTIONS | {"--sample": None}, is_resumed=True) as file:
        assert file.num_done == 2


UNKNOWN_STATES = [None, b"", b"\xff", b"[]\n", b"{}\n", b'{"format_version": 9, "output": "out.txt", "options": {}}\n']
UNKNOWN_STATES += [b'{"format_version": 1, "output": "other", "options": {}}\n']


def test_a_file_of_that_name_with_another_state_stays(left: Path, sources: LineFile) -> None:
    path = Path(f"{left}.partial.state")
    for state in UNKNOWN_STATES:
        path.unlink()
        if state is not None:
            path.write_bytes(state)
        for is_resumed in (False, True):
            assert "out.txt.partial: what it was made of is not known" in refusal(left, sources, is_resumed=is_resumed)
        path.touch()
    assert Path(f"{left}.partial").read_text() == DONE


def test_a_file_system_that_cannot_lock_is_written_all_the_same(path: Path, sources: LineFile, monkeypatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    write(path, sources, *LINES)
    assert path.read_text() == ALL


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_full_disk_keeps_what_is_done(path: Path, sources: LineFile, monkeypatch) -> None:
    full, real = os.open("/dev/full", os.O_WRONLY), os.write
    with pytest.raises(InputError, match=r"partial: No space left") as caught, OutputFile(path, sources, OPTIONS) as file:
        file.write("zwei", "ZWEI\n")
        monkeypatch.setattr(os, "write", lambda descriptor, content: real(full, content))
        file.write("zwei", "ZWEI\n")
    monkeypatch.undo()
    os.close(full)
    assert caught.value.__notes__[0].startswith("1 of 4 lines are done")
    assert Path(f"{path}.partial").read_text() == "ZWEI\n"


def test_long_names_and_links_are_followed(tmp_path: Path, sources: LineFile) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for name, real in (("n" * 255, "n" * 255), ("名" * 85, "名" * 85), ("link", "real")):
        write(tmp_path / name, sources, *LINES)
        assert (tmp_path / real).read_text() == ALL
    assert (tmp_path / "link").is_symlink()


def test_only_regular_files_are_replaced(path: Path, sources: LineFile) -> None:
    pipe, partial = path.with_name("pipe"), Path(f"{path}.partial")
    for place in (pipe, partial):
        os.mkfifo(place)
    for place in (path.parent, pipe, path):
        assert "not a regular file" in refusal(place, sources)
    assert pipe.is_fifo() and partial.is_fifo()
    partial.unlink()
    partial.symlink_to(path.with_name("in.txt"))
    assert refusal(path, sources).startswith(f"{partial}: ")
