"""Ctrl-C, as a terminal sends it, to a process of its own."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

PATIENCE_SECONDS = 60

PROGRAM = """
import sys
from pathlib import Path
from dragoman.client.sync import Client
from dragoman.client.translate import TranslateOptions, translate_file, translate_lines

target, mode, *paths = sys.argv[1:]
options = TranslateOptions(is_streamed=mode == "streamed")
try:
    with Client(target) as client:
        if paths:
            translate_file(client, Path(paths[0]), Path(paths[1]), options, is_resumed=mode == "resumed")
        else:
            translate_lines(client, sys.stdin.buffer, sys.stdout, options)
except KeyboardInterrupt:
    sys.exit(130)
"""


@pytest.fixture
def start(server):
    started = []

    def start(*arguments: str) -> subprocess.Popen:
        root = Path(__file__).parents[2]
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM, server.target, *arguments],
            cwd=root,
            env={**os.environ, "GRPC_VERBOSITY": "NONE"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("mode", ["lines", "streamed"])
def test_interrupt_cancels_the_calls_and_says_nothing(start, service, held, mode: str) -> None:
    behaviour = held()
    service.behaviours["stuck"] = behaviour
    process = start(mode)
    process.stdin.write(b"a\nstuck\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"A\n"
    behaviour.wait_until_began()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_SECONDS) == (b"", b"")
    assert process.returncode == 130
    behaviour.assert_cancelled()


def test_interrupt_while_the_next_line_is_awaited_ends_the_program(start) -> None:
    process = start("lines")
    process.stdin.write(b"a\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"A\n"
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_SECONDS) == (b"", b"")
    assert process.returncode == 130


def test_interrupt_leaves_no_output_file(start, service, held, tmp_path: Path) -> None:
    behaviours = {text: held() for text in "abcd"}
    service.behaviours = behaviours
    (tmp_path / "in.txt").write_text("a\nb\nc\nd\n")
    process = start("file", str(tmp_path / "in.txt"), str(tmp_path / "out.txt"))
    for behaviour in behaviours.values():
        behaviour.wait_until_began()
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_SECONDS) == (b"", b"")
    assert process.returncode == 130
    for behaviour in behaviours.values():
        behaviour.assert_cancelled()
    assert os.listdir(tmp_path) == ["in.txt"]


def test_interrupt_keeps_what_is_done(start, service, held, tmp_path: Path) -> None:
    behaviour = held()
    service.behaviours["c"] = behaviour
    (tmp_path / "in.txt").write_text("a\nb\nc\nd\n")
    process = start("file", str(tmp_path / "in.txt"), str(tmp_path / "out.txt"))
    behaviour.wait_until_began()
    partial = tmp_path / "out.txt.partial"
    end = time.monotonic() + PATIENCE_SECONDS
    while not partial.exists() or partial.read_text() != "A\nB\n":
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=PATIENCE_SECONDS)
    assert process.returncode == 130
    behaviour.assert_cancelled()
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "out.txt.partial", "out.txt.partial.state"]
    service.behaviours.clear()
    service.requests.clear()
    process = start("resumed", str(tmp_path / "in.txt"), str(tmp_path / "out.txt"))
    assert process.communicate(timeout=PATIENCE_SECONDS) == (b"", b"") and process.returncode == 0
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "out.txt"]
    assert (tmp_path / "out.txt").read_text() == "A\nB\nC\nD\n"
    texts = sorted(request.text for request in service.requests)
    assert texts in (["c", "d"], ["b", "c", "d"])  # the signal may come before the last line that was written counts
