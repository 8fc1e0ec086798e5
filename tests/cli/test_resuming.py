"""`translate --in --out` that ends early keeps what is done, and `--resume` goes on from there."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.cli.conftest import PATIENCE_SECONDS, Service
from tests.system.harness.server import wait_until

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(tmp_path: Path, server: str) -> list[object]:
    """Translate five lines, of which the fourth is not answered."""
    (tmp_path / "in.txt").write_text("a\n\nb\nstuck\nc\n")
    paths = ["--in", tmp_path / "in.txt", "--out", tmp_path / "out.txt"]
    return ["translate", "--server", server, "--model", "loud", "--concurrency", 1, *paths]


def left_in(folder: Path) -> set[str]:
    return set(os.listdir(folder)) - {"in.txt"}


@pytest.mark.parametrize("signal_", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_work_is_kept_and_resumed(
    run_command: Run, start: Callable[..., Any], command: list[object], service: Service, tmp_path: Path, signal_: int
) -> None:
    process = start(*command)
    partial = tmp_path / "out.txt.partial"
    assert service.stuck.wait(PATIENCE_SECONDS)
    wait_until(lambda: partial.read_text() == "A\n\nB\n", "three lines")
    process.send_signal(signal_)
    out, err = process.communicate(timeout=PATIENCE_SECONDS)
    if signal_ == signal.SIGINT:
        num_done = partial.read_text().count("\n")  # the signal may come before the last line that was written counts
        told = f"dragoman: interrupted; {num_done} of 5 lines are done, in {partial}; --resume goes on from there\n"
        assert (process.returncode, out, err.decode()) == (130, b"", told) and num_done in (2, 3)
    (tmp_path / "in.txt").write_text("a\n\nb\nfree\nc\n")
    service.requests.clear()
    assert run_command(*command, "--resume") == (0, "", "")
    assert (tmp_path / "out.txt").read_text() == "A\n\nB\nFREE\nC\n" and left_in(tmp_path) == {"out.txt"}
    texts = [request.text for request in service.requests]
    assert texts[-2:] == ["free", "c"] and "a" not in texts


def test_an_interruption_before_the_first_line_leaves_nothing(
    start, command: list[object], service: Service, tmp_path: Path
) -> None:
    (tmp_path / "in.txt").write_text("stuck\n")
    process = start(*command)
    assert service.stuck.wait(PATIENCE_SECONDS)
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_SECONDS) == (b"", b"")
    assert process.returncode == 130 and left_in(tmp_path) == set()


@pytest.mark.parametrize(("code", "exit_code"), [("INTERNAL", 1), ("UNAVAILABLE", 1), ("INVALID_ARGUMENT", 2)])
def test_what_is_done_when_the_server_fails_is_kept(
    run_command: Run, command: list[object], service: Service, tmp_path: Path, code: str, exit_code: int
) -> None:
    service.refusals["stuck"] = (grpc.StatusCode[code], "no")
    ended, out, err = run_command(*command)
    assert (ended, out) == (exit_code, "") and err.count("\n") == 1
    assert err.endswith(f"; 3 of 5 lines are done, in {tmp_path}/out.txt.partial; --resume goes on from there\n")
    del service.refusals["stuck"]
    changed = f"{tmp_path}/in.txt, line 3: not the line that was there"
    for options, text, named in (
        ([], "a\n\nb\nc\nd\n", "3 lines of an earlier run are left there; --resume goes on with them"),
        (["--resume", "--num-beams", 4], "a\n\nb\nc\nd\n", "dragoman: --num-beams: 4, but what is done"),
        (["--resume"], "a\n\nx\nc\nd\n", changed),
    ):
        (tmp_path / "in.txt").write_text(text)
        ended, _, err = run_command(*command, *options)
        assert ended == 2 and named in err
    assert left_in(tmp_path) == {"out.txt.partial", "out.txt.partial.state"}
