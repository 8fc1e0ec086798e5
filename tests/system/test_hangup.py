"""SIGHUP: files that have changed are read again, unless the server's terminal is gone: then it drains as on SIGTERM.

It does so also where nobody reads its log any more.
"""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.errors import Unauthenticated
from dragoman.client.sync import Client

ROOT = Path(__file__).resolve().parents[2]
# What the child does before it becomes the server.
TAKE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
IGNORE_HANGUPS = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def hangups_are_heard() -> Iterator[None]:
    """Children inherit what their parent ignores, as these tests do where nohup runs them."""
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, inherited)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@contextmanager
def started(models: Path, before: str, address: str = "127.0.0.1:0", **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Start a server that first does something else; it is killed, if it still runs, in the end."""
    code = f"{before}\nimport os, sys; os.execv(sys.executable, [sys.executable, '-m', 'dragoman', 'serve', *sys.argv[1:]])"
    host, port = address.split(":")
    flags = ["--models", str(models), "--host", host, "--port", port, "--metrics-port", "0"]
    command = [sys.executable, "-c", code, *flags]
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, **streams)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def serving(lines: Any) -> dict[str, Any]:
    """Read the log until the server serves; return what it says then."""
    for line in lines:
        event: dict[str, Any] = json.loads(line) if line.lstrip().startswith(b"{") else {}
        if event.get("event") == "serving":
            return event
    raise AssertionError("it ended before it served")


def is_listening(address: str) -> bool:
    host, port = address.split(":")
    with socket.socket() as caller:
        return caller.connect_ex((host, int(port))) == 0


def num_running(event: dict[str, Any]) -> float:
    text = urllib.request.urlopen(f"http://127.0.0.1:{event['metrics_port']}/metrics", timeout=10).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("dragoman_num_requests_running{"))


def test_a_hangup_does_not_cut_a_drain_short(serve: Any, endless: Path) -> None:
    """Systemd may send one after the SIGTERM, and a terminal that closes may send more than one."""
    with serve(endless / "alpha") as server, Client(server.address) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.generate, "a dog runs", max_new_tokens=1000)
        wait_until(lambda: server.metric("dragoman_num_requests_running") == 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for("draining")["num_running"] == 1
        for _ in range(2):
            server.process.send_signal(signal.SIGHUP)
        assert answer.result().usage.generated_tokens == 1000
        assert server.wait() == 0
        assert server.events[-1]["event"] == "stopped"


def test_a_hangup_reads_the_file_of_callers_again(serve: Any, endless: Path, tmp_path: Path) -> None:
    """Who is in it calls, who was is refused, calls under way live on, and a file that cannot be used changes nothing."""
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[callers.web]\ntoken = "old"\nmax_requests = 1\n')
    with (
        serve(endless / "alpha", "--auth-tokens-file", str(tokens)) as server,
        Client(server.address, token="old") as old,
        Client(server.address, token="new") as new,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(old.generate, "a dog runs", max_new_tokens=1000)
        wait_until(lambda: server.metric("dragoman_num_requests_running") == 1)
        tokens.write_text("[callers.web")
        server.process.send_signal(signal.SIGHUP)
        assert "not a TOML file" in server.wait_for("cannot be used, what was read before stays in use")["reason"]
        assert server.metric("dragoman_reload_stale", source="callers") == 1
        tokens.write_text('[callers.web]\ntoken = "new"\nmax_requests = 1\n')
        server.process.send_signal(signal.SIGHUP)
        server.wait_for("reloaded", source="callers")
        assert server.metric("dragoman_reload_stale", source="callers") == 0
        with pytest.raises(Unauthenticated, match="a bearer token that this server knows"):
            old.generate("a dog runs")
        assert server.metric("dragoman_caller_requests_running", caller="web") == 1
        assert answer.result().usage.generated_tokens == 1000
        assert new.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
        assert server.terminate() == 0


def test_an_engine_leaves_hangups_to_the_server(serve: Any, endless: Path) -> None:
    """Systemd sends them to every process of a service or a session that it stops."""
    with serve(endless / "alpha") as server, Client(server.address) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.generate, "a dog runs", max_new_tokens=1000)
        wait_until(lambda: server.metric("dragoman_num_requests_running") == 1)
        engine = next(event["engine_pid"] for event in server.events if event["event"] == "engine ready")
        for process in (engine, server.process.pid):
            os.kill(process, signal.SIGHUP)
        assert answer.result().usage.generated_tokens == 1000
        assert server.terminate() == 0
        assert [event["event"] for event in server.events].count("engine ready") == 1


def test_closing_the_terminal_loses_the_log_and_no_request(endless: Path) -> None:
    master, terminal = pty.openpty()
    with (
        started(endless / "alpha", TAKE_TERMINAL, stdin=terminal, stdout=terminal, stderr=terminal) as process,
        ThreadPoolExecutor(1) as pool,
    ):
        os.close(terminal)
        with open(master, "rb", buffering=0) as screen:
            event = serving(iter(screen.readline, b""))
            with Client(f"127.0.0.1:{event['port']}") as client:
                answer = pool.submit(client.generate, "a dog runs", max_new_tokens=1000)
                wait_until(lambda: num_running(event) == 1)
                screen.close()
                assert answer.result().usage.generated_tokens == 1000
        assert process.wait(60) == 0


def test_under_nohup_the_server_outlives_its_terminal(endless: Path) -> None:
    with started(endless / "alpha", IGNORE_HANGUPS, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        with process.stderr as log:
            event = serving(log)
            process.send_signal(signal.SIGHUP)
            with Client(f"127.0.0.1:{event['port']}") as client:
                assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
            assert process.poll() is None
            process.terminate()
            assert b"draining" in log.read()
        assert process.wait(60) == 0


def test_a_log_that_nobody_reads_costs_no_request(endless: Path) -> None:
    """As in `dragoman serve 2>&1 | head`: a broken pipe used to fail every request whose line could not be written."""
    with started(endless / "alpha", "", stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        with process.stderr as log:
            event = serving(log)
        with Client(f"127.0.0.1:{event['port']}") as client:
            for _ in range(3):
                assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize("closed", [(2,), (1, 2)], ids=["error", "output-and-error"])
def test_a_server_without_standard_streams_serves_and_drains(endless: Path, closed: tuple[int, ...]) -> None:
    """Some starters of daemons leave them out, as `2>&-` does: Python has None then, and no log says which port it is."""
    with socket.create_server(("127.11.7.5", 0)) as listener:  # an address that nobody else takes ports of
        address = f"127.11.7.5:{listener.getsockname()[1]}"
    with started(endless / "alpha", f"import os\nfor number in {closed}: os.close(number)", address) as process:
        wait_until(lambda: process.poll() is not None or is_listening(address))
        with Client(address) as client:
            wait_until(lambda: process.poll() is not None or client.is_ready())
            assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
        process.terminate()
        assert process.wait(60) == 0
