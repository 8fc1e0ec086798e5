import errno
import json
import os
from pathlib import Path

import pytest

from dragoman.client.lines import LineFile
from dragoman.client.output_file import OutputFile
from dragoman.model.errors import InputError

OPTIONS = {"--model": "en-de", "--num-beams": None, "--json": False}
LINES = ["eins", "zwei", "Grüße", "vier"]


@pytest.fixture
def sources(tmp_path: Path) -> LineFile:
    (tmp_path / "in.txt").write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    return LineFile(tmp_path / "in.txt")


@pytest.fixture
def left(tmp_path: Path, sources: LineFile) -> Path:
    """Name of a file of which two lines are done."""
    with pytest.raises(KeyboardInterrupt), OutputFile(tmp_path / "out.txt", sources, OPTIONS) as file:
        file.write("eins", "EINS\neins!\n")
        file.write("zwei", "ZWEI\n")
        raise KeyboardInterrupt
    return tmp_path / "out.txt"


def names(folder: Path) -> list[str]:
    return sorted(name for name in os.listdir(folder) if name != "in.txt")


def test_file_appears_when_the_block_ends_and_nothing_else_stays(tmp_path: Path, sources: LineFile) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    with OutputFile(path, sources, OPTIONS) as file:
        for line in LINES:
            file.write(line, f"{line.upper()}\n")
        assert path.read_text() == "old"
    assert path.read_bytes() == "EINS\nZWEI\nGRÜSSE\nVIER\n".encode()
    assert names(tmp_path) == ["out.txt"]


@pytest.mark.parametrize("failure", [ValueError, KeyboardInterrupt])
def test_failure_keeps_the_old_file_and_what_is_done(tmp_path: Path, sources: LineFile, failure: type[BaseException]) -> None:
    path = tmp_path / "out.txt"
    path.write_text("old")
    with pytest.raises(failure) as caught, OutputFile(path, sources, OPTIONS) as file:
        file.write("eins", "EINS\n")
        file.write("zwei", "ZWEI\n")
        raise failure
    assert path.read_text() == "old"
    assert (tmp_path / "out.txt.partial").read_text() == "EINS\nZWEI\n"
    assert caught.value.__notes__ == [f"2 of 4 lines are done, in {path}.partial; --resume goes on from there"]


def test_failure_before_the_first_line_leaves_nothing(tmp_path: Path, sources: LineFile) -> None:
    with pytest.raises(ValueError, match=r"^no$") as caught, OutputFile(tmp_path / "out.txt", sources, OPTIONS):
        raise ValueError("no")
    assert not hasattr(caught.value, "__notes__")
    assert names(tmp_path) == []


def test_what_was_left_is_gone_on_with(left: Path, sources: LineFile) -> None:
    with OutputFile(left, sources, OPTIONS, is_resumed=True) as file:
        assert file.num_done == 2
        file.write("Grüße", "GRÜSSE\n")
        file.write("vier", "VIER\n")
    assert left.read_text(encoding="utf-8") == "EINS\neins!\nZWEI\nGRÜSSE\nVIER\n"
    assert names(left.parent) == ["out.txt"]


def test_what_was_left_can_be_left_again(left: Path, sources: LineFile) -> None:
    with pytest.raises(KeyboardInterrupt) as caught, OutputFile(left, sources, OPTIONS, is_resumed=True) as file:
        file.write("Grüße", "GRÜSSE\n")
        raise KeyboardInterrupt
    assert caught.value.__notes__[0].startswith("3 of 4 lines")
    with OutputFile(left, sources, OPTIONS, is_resumed=True) as file:
        assert file.num_done == 3
        file.write("vier", "VIER\n")
    assert left.read_text(encoding="utf-8") == "EINS\neins!\nZWEI\nGRÜSSE\nVIER\n"


def test_a_resumed_run_that_does_nothing_keeps_what_was_left(left: Path, sources: LineFile) -> None:
    with pytest.raises(KeyboardInterrupt), OutputFile(left, sources, OPTIONS, is_resumed=True):
        raise KeyboardInterrupt
    with OutputFile(left, sources, OPTIONS, is_resumed=True) as file:
        assert file.num_done == 2


def test_there_may_be_nothing_to_go_on_with(tmp_path: Path, sources: LineFile) -> None:
    with OutputFile(tmp_path / "out.txt", sources, OPTIONS, is_resumed=True) as file:
        assert file.num_done == 0
        file.write("eins", "EINS\n")
    assert (tmp_path / "out.txt").read_text() == "EINS\n"


def test_what_was_left_is_not_overwritten(left: Path, sources: LineFile) -> None:
    with pytest.raises(InputError, match=r"out\.txt\.partial: 2 lines of an earlier run are left there; --resume goes on"):
        OutputFile(left, sources, OPTIONS).__enter__()
    assert Path(f"{left}.partial").read_text() == "EINS\neins!\nZWEI\n"


def test_other_options_are_named(left: Path, sources: LineFile) -> None:
    with pytest.raises(InputError, match=r"^--num-beams: 4, but what is done, in .*out\.txt\.partial, was made without it$"):
        OutputFile(left, sources, OPTIONS | {"--num-beams": 4}, is_resumed=True).__enter__()
    with pytest.raises(InputError, match=r"^--model: is not given, but what is done, in .*out\.txt\.partial, was made with en-de$"):
        OutputFile(left, sources, OPTIONS | {"--model": ""}, is_resumed=True).__enter__()


def test_what_was_not_set_may_be_not_given(left: Path, sources: LineFile) -> None:
    """A run of an earlier version wrote down options that nobody had given."""
    state = Path(f"{left}.partial.state")
    head, rest = state.read_text().split("\n", 1)
    description = json.loads(head)
    description["options"] |= {"--sample": False, "--forced-prefix": ""}
    state.write_text(json.dumps(description) + "\n" + rest)
    with OutputFile(left, sources, OPTIONS | {"--sample": None}, is_resumed=True) as file:
        assert file.num_done == 2
        file.write("drei", "DREI\n")


def test_a_changed_line_is_named_but_one_that_is_not_done_may_change(left: Path, tmp_path: Path) -> None:
    (tmp_path / "in.txt").write_text("eins\nzwo\n")
    with pytest.raises(InputError, match=r"in\.txt, line 2: not the line that was there"):
        OutputFile(left, LineFile(tmp_path / "in.txt"), OPTIONS, is_resumed=True).__enter__()
    (tmp_path / "in.txt").write_text("eins\n")
    with pytest.raises(InputError, match=r"in\.txt: 1 lines, but 2 are done"):
        OutputFile(left, LineFile(tmp_path / "in.txt"), OPTIONS, is_resumed=True).__enter__()
    (tmp_path / "in.txt").write_text("eins\nzwei\ndrei\nneu\n")
    with OutputFile(left, LineFile(tmp_path / "in.txt"), OPTIONS, is_resumed=True) as file:
        assert file.num_done == 2


def test_a_kill_in_the_middle_of_a_write_costs_that_line_only(left: Path, sources: LineFile) -> None:
    """Whatever the two files end with: half a line, a line that the other has not, bytes that say nothing."""
    partial, state = Path(f"{left}.partial"), Path(f"{left}.partial.state")
    whole_state = state.read_bytes()
    for torn_partial, torn_state in ((b"GR\xc3", b""), (b"GR", b"0123456789abcdef 2"), (b"", b"0123456789abcdef 999\n")):
        partial.write_bytes(b"EINS\neins!\nZWEI\n" + torn_partial)
        state.write_bytes(whole_state + torn_state)
        with pytest.raises(KeyboardInterrupt), OutputFile(left, sources, OPTIONS, is_resumed=True) as file:
            assert file.num_done == 2
            raise KeyboardInterrupt
        assert partial.read_bytes() == b"EINS\neins!\nZWEI\n"
        assert state.read_bytes() == whole_state


@pytest.mark.parametrize(
    "state", [None, b"", b"\xff", b"[]\n", b"{}\n", b'{"format_version": 9, "output": "out.txt", "options": {}}\n']
)
@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_file_of_that_name_that_is_somebody_elses_stays(
    left: Path, sources: LineFile, state: bytes | None, is_resumed: bool
) -> None:
    path = Path(f"{left}.partial.state")
    path.unlink()
    if state is not None:
        path.write_bytes(state)
    with pytest.raises(InputError, match=r"out\.txt\.partial: what it was made of is not known"):
        OutputFile(left, sources, OPTIONS, is_resumed).__enter__()
    assert Path(f"{left}.partial").read_text() == "EINS\neins!\nZWEI\n"


def test_state_of_another_output_is_not_ours(left: Path, sources: LineFile) -> None:
    state = Path(f"{left}.partial.state")
    head, rest = state.read_text().split("\n", 1)
    state.write_text(json.dumps(json.loads(head) | {"output": "other"}) + "\n" + rest)
    with pytest.raises(InputError, match="is not known"):
        OutputFile(left, sources, OPTIONS, is_resumed=True).__enter__()


@pytest.mark.parametrize("is_resumed", [False, True])
def test_two_at_once_do_not_mix(tmp_path: Path, sources: LineFile, is_resumed: bool) -> None:
    path = tmp_path / "out.txt"
    with OutputFile(path, sources, OPTIONS) as file:
        file.write("eins", "EINS\n")
        with pytest.raises(InputError, match=r"out\.txt\.partial: another process is writing it"):
            OutputFile(path, sources, OPTIONS, is_resumed).__enter__()
        file.write("zwei", "ZWEI\n")
    assert path.read_text() == "EINS\nZWEI\n"


def test_a_file_system_that_cannot_lock_is_written_all_the_same(
    tmp_path: Path, sources: LineFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with OutputFile(tmp_path / "out.txt", sources, OPTIONS) as file:
        file.write("eins", "EINS\n")
    assert (tmp_path / "out.txt").read_text() == "EINS\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_a_disk_that_is_full_keeps_what_is_done(tmp_path: Path, sources: LineFile, monkeypatch: pytest.MonkeyPatch) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    is_full, out = pytest.raises(InputError, match=r"partial: No space left"), OutputFile(tmp_path / "out.txt", sources, OPTIONS)
    with is_full as caught, out as file:
        file.write("eins", "EINS\n")
        write = os.write
        monkeypatch.setattr(os, "write", lambda descriptor, content: write(full, content))
        file.write("zwei", "ZWEI\n")
    monkeypatch.undo()
    os.close(full)
    assert caught.value.__notes__[0].startswith("1 of 4 lines are done")
    assert (tmp_path / "out.txt.partial").read_text() == "EINS\n"


def test_file_has_the_permissions_of_any_new_file(tmp_path: Path, sources: LineFile) -> None:
    (tmp_path / "plain").touch()
    with OutputFile(tmp_path / "out.txt", sources, OPTIONS):
        pass
    assert (tmp_path / "out.txt").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_link_is_followed(tmp_path: Path, sources: LineFile) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with OutputFile(tmp_path / "link", sources, OPTIONS) as file:
        file.write("x", "x\n")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "x\n"


def test_link_in_the_place_of_what_is_left_is_not_followed(tmp_path: Path, sources: LineFile) -> None:
    (tmp_path / "precious").write_text("")
    (tmp_path / "out.txt.partial").symlink_to(tmp_path / "precious")
    with pytest.raises(InputError, match=r"out\.txt\.partial: "):
        OutputFile(tmp_path / "out.txt", sources, OPTIONS).__enter__()


def test_missing_folder_is_named(tmp_path: Path, sources: LineFile) -> None:
    with pytest.raises(InputError, match=r"none/out\.txt: No such file"):
        OutputFile(tmp_path / "none" / "out.txt", sources, OPTIONS).__enter__()


def test_directories_and_devices_are_never_replaced(tmp_path: Path, sources: LineFile) -> None:
    for place in ("pipe", "out.txt.partial"):
        os.mkfifo(tmp_path / place)
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "out.txt"):
        with pytest.raises(InputError, match="not a regular file"):
            OutputFile(path, sources, OPTIONS).__enter__()
    assert (tmp_path / "pipe").is_fifo() and (tmp_path / "out.txt.partial").is_fifo()


@pytest.mark.parametrize("name", ["n" * 255, "名" * 85])
def test_name_as_long_as_names_can_be_is_fine(tmp_path: Path, sources: LineFile, name: str) -> None:
    with OutputFile(tmp_path / name, sources, OPTIONS) as file:
        file.write("x", "x\n")
    assert (tmp_path / name).read_text() == "x\n"
