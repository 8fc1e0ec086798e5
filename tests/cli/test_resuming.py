"""`translate --in --out` that breaks off: Ctrl-C, or a server that goes."""

import os
import signal
import time
from pathlib import Path

import grpc
import pytest

PATIENCE_SECONDS = 120


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    (tmp_path / "in.txt").write_text("a\n\nb\nstuck\nc\n")
    return tmp_path / "in.txt"


def command_for(server: str, lines: Path) -> list[str]:
    paths = ["--in", str(lines), "--out", str(lines.parent / "out.txt")]
    return ["translate", "--server", server, "--model", "loud", "--concurrency", "1", *paths]


def wait_until_done(process, service, folder: Path, done: str) -> None:
    """Wait until the translation is stuck and what came before is written."""
    assert service.stuck.wait(PATIENCE_SECONDS)
    partial = folder / "out.txt.partial"
    end = time.monotonic() + PATIENCE_SECONDS
    while partial.read_text() != done:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)


def left_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) - {"in.txt"}


def test_what_is_done_when_it_is_interrupted_is_kept_and_gone_on_with(start, run, server: str, service, lines: Path) -> None:
    process = start(*command_for(server, lines))
    wait_until_done(process, service, lines.parent, "A\n\nB\n")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130 and out == b""
    partial = lines.parent / "out.txt.partial"
    num_done = partial.read_text().count("\n")  # the signal may come before the last line that was written counts
    assert num_done in (2, 3) and "A\n\nB\n".startswith(partial.read_text())
    told = f"dragoman: interrupted; {num_done} of 5 lines are done, in {partial}; --resume goes on from there\n"
    assert err.decode() == told
    lines.write_text("a\n\nb\nfree\nc\n")
    service.requests.clear()
    assert run(*command_for(server, lines), "--resume") == (0, "", "")
    assert (lines.parent / "out.txt").read_text() == "A\n\nB\nFREE\nC\n"
    assert [request.text for request in service.requests][-2:] == ["free", "c"]
    assert "a" not in {request.text for request in service.requests}
    assert left_in(lines.parent) == {"out.txt"}


def test_an_interrupted_translation_of_which_nothing_is_done_says_and_leaves_nothing(start, server: str, service, lines) -> None:
    lines.write_text("stuck\n")
    process = start(*command_for(server, lines))
    assert service.stuck.wait(PATIENCE_SECONDS)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_SECONDS) == (b"", b"")
    assert process.returncode == 130
    assert left_in(lines.parent) == set()


def test_a_killed_translation_can_be_gone_on_with(start, run, server: str, service, lines: Path) -> None:
    process = start(*command_for(server, lines))
    wait_until_done(process, service, lines.parent, "A\n\nB\n")
    process.kill()
    process.wait(PATIENCE_SECONDS)
    lines.write_text("a\n\nb\nfree\nc\n")
    assert run(*command_for(server, lines), "--resume")[0] == 0
    assert (lines.parent / "out.txt").read_text() == "A\n\nB\nFREE\nC\n"
    assert left_in(lines.parent) == {"out.txt"}


@pytest.mark.parametrize(("code", "exit_code"), [("INTERNAL", 1), ("UNAVAILABLE", 1), ("INVALID_ARGUMENT", 2)])
def test_what_is_done_when_the_server_fails_is_kept(run, server: str, service, lines: Path, code: str, exit_code: int) -> None:
    service.refusals["stuck"] = (grpc.StatusCode[code], "no")
    ended, out, err = run(*command_for(server, lines))
    assert (ended, out) == (exit_code, "") and err.count("\n") == 1
    assert err.endswith(f"; 3 of 5 lines are done, in {lines.parent}/out.txt.partial; --resume goes on from there\n")
    refused = run(*command_for(server, lines))
    assert refused[0] == 2 and "3 lines of an earlier run are left there; --resume goes on with them" in refused[2]
    refused = run(*command_for(server, lines), "--resume", "--num-beams", 4)
    assert refused[0] == 2 and refused[2].startswith("dragoman: --num-beams: 4, but what is done")
    del service.refusals["stuck"]
    lines.write_text("a\n\nx\nc\nd\n")
    refused = run(*command_for(server, lines), "--resume")
    assert refused[0] == 2 and f"{lines}, line 3: not the line that was there" in refused[2]
    assert left_in(lines.parent) == {"out.txt.partial", "out.txt.partial.state"}


def test_a_server_that_dies_in_the_middle_costs_nothing_that_is_done(start, run, serve, service, lines: Path) -> None:
    first = serve()
    process = start(*command_for(first.target, lines), "--timeout", "8")  # enough for the server to be gone before it is over
    wait_until_done(process, service, lines.parent, "A\n\nB\n")
    first.stop()
    _, err = process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 1 and err.count(b"\n") == 1
    assert err.decode().startswith(f"dragoman: {first.target}: ") and b" of 5 lines are done" in err
    lines.write_text("a\n\nb\nfree\nc\n")
    assert run(*command_for(serve().target, lines), "--resume")[0] == 0
    assert (lines.parent / "out.txt").read_text() == "A\n\nB\nFREE\nC\n"
