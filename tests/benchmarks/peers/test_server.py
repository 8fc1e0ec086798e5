"""A peer's processes: started, asked, ended, with a stand-in for the real server."""

import asyncio
import json
import os
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers.faces import AskError
from benchmarks.peers.sender import translate
from benchmarks.peers.server import Kind, PeerServer, Settings

KIND = Kind("stand_in", "http", "/predict", ("pytest",))
SETTINGS = Settings(num_instances=2, num_parts=1, num_threads=1, max_batch_size=16, delay_ms=5)
SOURCE = """
import json, os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

flags = dict(flag.removeprefix("--").split("=") for flag in sys.argv[3:])
if flags["precision"] == "broken":
    sys.exit("the weights are broken")
child = os.fork()  # as servers with workers do
if not child:
    import signal
    signal.pause()

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        text = json.loads(self.rfile.read(int(self.headers["content-length"])))["text"]
        if text == "end":
            os._exit(3)
        content = json.dumps({"text": json.dumps({"argv": sys.argv[1:3], "flags": flags, "pids": [os.getpid(), child]})}).encode()
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(flags["port"])), Handler).serve_forever()
"""


@pytest.fixture
def environments(tmp_path: Path) -> Path:
    """A folder with one environment, whose interpreter runs the stand-in."""
    pytest.importorskip("aiohttp", reason="the benchmark's client for HTTP")
    script = tmp_path / "stand_in.py"
    script.write_text(SOURCE, encoding="utf-8")
    python = KIND.python(tmp_path)
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n', encoding="utf-8")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    return tmp_path


def ask(server: PeerServer, text: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(asyncio.run(translate(KIND.face, server.address, [text], 1))[0])
    return found


def is_running(pid: int) -> bool:
    """Whether a process computes or could; one that has ended and was not waited for does not count."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_peer_is_started_with_its_settings(environments: Path, tmp_path: Path) -> None:
    with PeerServer(KIND, environments, tmp_path, "int8", SETTINGS, "a") as server:
        found = ask(server, "a")
    assert found["argv"] == ["-m", "benchmarks.peers.stand_in_server"]
    port = found["flags"].pop("port")
    assert server.address == f"http://127.0.0.1:{port}/predict"
    expected = {"instances": "2", "parts": "1", "threads": "1", "max-batch-size": "16", "delay-ms": "5"}
    assert found["flags"] == expected | {"model": str(tmp_path), "precision": "int8"}


def test_all_processes_of_a_peer_end_with_it(environments: Path, tmp_path: Path) -> None:
    with PeerServer(KIND, environments, tmp_path, "int8", SETTINGS, "a") as server:
        pids = ask(server, "a")["pids"]
        assert all(map(is_running, pids))
    assert not any(map(is_running, pids))


def test_a_peer_that_does_not_start_says_why(environments: Path, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)stand_in did not start:.*the weights are broken"):
        PeerServer(KIND, environments, tmp_path, "broken", SETTINGS, "a").__enter__()


def test_a_peer_that_ends_by_itself_is_an_error(environments: Path, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="stand_in ended by itself"),
        PeerServer(KIND, environments, tmp_path, "int8", SETTINGS, "a") as server,
    ):
        with pytest.raises(AskError):
            ask(server, "end")
        os.waitid(os.P_PID, server.pid, os.WEXITED | os.WNOWAIT)


def test_settings_are_told_in_words() -> None:
    assert str(Settings(1, 1, 2, 32, 0)) == "1 × 2 threads, max batch 32, delay 0 ms"
    assert str(Settings(2, 1, 1, 16, 5)) == "2 × 1 threads (2 batches at a time), max batch 16, delay 5 ms"
    assert str(Settings(1, 2, 1, 64, 5)) == "2 × 1 threads (batches divided by 2), max batch 64, delay 5 ms"
