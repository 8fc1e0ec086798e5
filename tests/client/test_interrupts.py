"""Ctrl-C in a program that calls the server: it ends at once and in silence, and the server's work is cancelled."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.client.fake_server import PATIENCE_SECONDS, Held

PROGRAM = """
import asyncio, sys
from pathlib import Path
from dragoman import AsyncClient, Client, Request
from dragoman.client.translate import TranslateOptions, translate_file, translate_lines

target, method, *paths = sys.argv[1:]

requests = Request("a"), Request("stuck")
arguments = {"score": ("stuck", "x"), "generate_many": (["a", "stuck", "b"],), "generate_batch": (requests,)}
name = method.removeprefix("async ")

def start(client):
    return getattr(client, name)(*arguments.get(name, ["stuck"]))

async def asynchronous():
    async with AsyncClient(target) as client:
        value = start(client)
        await value if name == "generate" else [item async for item in value]

def blocking():
    with Client(target) as client:
        if "lines" in method:
            translate_lines(client, sys.stdin.buffer, sys.stdout, TranslateOptions(is_streamed=method != "lines"))
        elif paths:
            translate_file(client, *map(Path, paths), TranslateOptions(), is_resumed=method == "resumed file")
        else:
            value = start(client)
            name in ("generate", "score") or list(value)

try:
    asyncio.run(asynchronous()) if method.startswith("async") else blocking()
except KeyboardInterrupt:
    sys.exit(130)
"""
METHODS = ["generate", "score", "stream", "generate_many", "generate_batch"]
ASYNC_METHODS = [f"async {method}" for method in METHODS if method != "score"]


@pytest.fixture
def start(server) -> Iterator[Any]:
    started = []

    def start(*arguments: object) -> subprocess.Popen:
        command = [sys.executable, "-c", PROGRAM, server.target, *map(str, arguments)]
        pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        started.append(subprocess.Popen(command, env={**os.environ, "GRPC_VERBOSITY": "NONE"}, **pipes))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def interrupt(process: subprocess.Popen) -> None:
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=PATIENCE_SECONDS) == (b"", b"")
    assert process.returncode == 130


@pytest.mark.parametrize("method", [*METHODS, *ASYNC_METHODS])
def test_an_interrupt_ends_each_call_and_frees_the_server(start, service, method: str) -> None:
    service.behaviours["stuck"] = held = Held("middle" if method.endswith("stream") else "start")
    process = start(method)
    held.wait_until_began()
    interrupt(process)
    held.assert_cancelled()


@pytest.mark.parametrize("method", ["lines", "streamed lines"])
@pytest.mark.parametrize("is_stuck", [True, False])
def test_an_interrupt_ends_a_translation_of_lines(start, service, method: str, is_stuck: bool) -> None:
    service.behaviours["stuck"] = held = Held()
    process = start(method)
    process.stdin.write(b"a\nstuck\n" if is_stuck else b"a\n")
    process.stdin.flush()
    assert process.stdout.readline() == b"A\n"
    if is_stuck:
        held.wait_until_began()
    interrupt(process)
    if is_stuck:
        held.assert_cancelled()


@pytest.mark.parametrize("num_done", [0, 2])
def test_an_interrupt_of_a_file_keeps_what_is_done(start, service, tmp_path: Path, num_done: int) -> None:
    source, out, partial = (tmp_path / name for name in ("in.txt", "out.txt", "out.txt.partial"))
    source.write_text("a\nb\nc\nd\n")
    service.behaviours = {text: Held() for text in "abcd"[num_done:]}
    process = start("file", source, out)
    for held in service.behaviours.values():
        held.wait_until_began()
    end = time.monotonic() + PATIENCE_SECONDS
    while num_done and not (partial.exists() and partial.read_text() == "A\nB\n"):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.01)
    interrupt(process)
    for held in service.behaviours.values():
        held.assert_cancelled()
    if not num_done:
        assert os.listdir(tmp_path) == ["in.txt"]
        return
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "out.txt.partial", "out.txt.partial.state"]
    service.behaviours.clear()
    service.requests.clear()
    assert start("resumed file", source, out).communicate(timeout=PATIENCE_SECONDS) == (b"", b"")
    assert sorted(os.listdir(tmp_path)) == ["in.txt", "out.txt"] and out.read_text() == "A\nB\nC\nD\n"
    # The signal may come before the last line that was written counts.
    assert sorted(request.text for request in service.requests) in (["c", "d"], ["b", "c", "d"])
