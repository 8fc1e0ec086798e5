"""SIGHUP has files that changed read again, and where the server's terminal is gone it drains; nobody need read its log."""

import os
import pty
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.errors import Unauthenticated
from dragoman.client.sync import Client
from tests.system.harness.models import ModelFolder
from tests.system.harness.server import ROOT, Event, serving, wait_until

# Code that the child runs before it becomes the server.
TAKE_TERMINAL = "import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)"
IGNORE_HANGUPS = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)"

pytestmark = pytest.mark.e2e


@pytest.fixture(autouse=True)
def hangups_are_heard() -> Iterator[None]:
    """Children inherit what their parent ignores, as these tests do where nohup runs them."""
    inherited = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, inherited)


def free_addresses(number: int) -> list[str]:
    """Return addresses on this machine with ports that are free now."""
    sockets = [socket.create_server(("127.11.7.5", 0)) for _ in range(number)]  # an address that nobody else takes ports of
    found = [f"127.11.7.5:{each.getsockname()[1]}" for each in sockets]
    for each in sockets:
        each.close()
    return found


@contextmanager
def started(models: Path, before: str, **streams: Any) -> Iterator[tuple[subprocess.Popen[bytes], str, str]]:
    """Start a server that first does something else; give its process, its address and that of its metrics when it serves."""
    code = f"{before}\nimport os, sys; os.execv(sys.executable, [sys.executable, '-m', 'dragoman', 'serve', *sys.argv[1:]])"
    address, metrics = free_addresses(2)
    host, _, port = address.rpartition(":")
    flags = ["--models", str(models), "--host", host, "--port", port]
    flags += ["--metrics-host", host, "--metrics-port", metrics.rpartition(":")[2]]
    process = subprocess.Popen([sys.executable, "-c", code, *flags], cwd=ROOT, start_new_session=True, **streams)
    try:
        with Client(address) as client:
            wait_until(lambda: process.poll() is not None or client.is_ready(), "it serves", 120)
        assert process.poll() is None
        yield process, address, metrics
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def num_running(metrics: str) -> float:
    text = urllib.request.urlopen(f"http://{metrics}/metrics", timeout=10).read().decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("dragoman_num_requests_running{"))


def test_hangups_end_nothing_and_do_not_cut_a_drain_short(endless: Path) -> None:
    """Systemd may send them to every process of a service, also after the SIGTERM; a terminal that closes, more than one."""
    with serving(endless / "alpha") as server, Client(server.address) as client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(client.generate, "a dog runs", max_new_tokens=1000)
        wait_until(lambda: server.metric("dragoman_num_requests_running") == 1, "it runs")
        for pid in (*server.engines(), server.process.pid):
            os.kill(pid, signal.SIGHUP)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait_for(Event.DRAINING)["num_running"] == 1
        for _ in range(2):
            server.process.send_signal(signal.SIGHUP)
        assert answer.result().usage.generated_tokens == 1000
        assert server.wait() == 0
        assert server.events[-1]["event"] == Event.STOPPED and len(server.logged(Event.ENGINE_READY)) == 1


def test_a_hangup_reads_the_file_of_callers_again(endless: Path, tmp_path: Path) -> None:
    """Listed callers are served, removed ones refused, running calls go on, and a file that cannot be used changes nothing."""
    tokens = tmp_path / "tokens.toml"
    tokens.write_text('[callers.web]\ntoken = "old"\nmax_requests = 1\n')
    with (
        serving(endless / "alpha", "--auth-tokens-file", str(tokens)) as server,
        Client(server.address, token="old") as old,
        Client(server.address, token="new") as new,
        ThreadPoolExecutor(1) as pool,
    ):
        answer = pool.submit(old.generate, "a dog runs", max_new_tokens=1000)
        wait_until(lambda: server.metric("dragoman_num_requests_running") == 1, "it runs")
        tokens.write_text("[callers.web")
        server.process.send_signal(signal.SIGHUP)
        assert "not a TOML file" in server.wait_for(Event.NOT_RELOADED)["reason"]
        assert server.metric("dragoman_reload_stale", source="callers") == 1
        tokens.write_text('[callers.web]\ntoken = "new"\nmax_requests = 1\n')
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(Event.RELOADED, source="callers")
        assert server.metric("dragoman_reload_stale", source="callers") == 0
        with pytest.raises(Unauthenticated):
            old.generate("a dog runs")
        assert server.metric("dragoman_caller_requests_running", caller="web") == 1
        assert answer.result().usage.generated_tokens == 1000
        assert new.generate("a dog runs", max_new_tokens=2).finish_reason == "length"


def test_a_hangup_has_the_folder_of_models_looked_at(models: ModelFolder) -> None:
    models.put("alpha", "1", "one")
    with serving(models.path, "--models-poll-seconds", "0", "--num-threads", "1") as server, Client(server.address) as client:
        two = models.put("alpha", "2", "two")
        server.process.send_signal(signal.SIGHUP)
        server.wait_for(Event.VERSIONS_SERVE, default="2")
        assert client.generate("a dog runs", max_new_tokens=2).model_version == two


def test_closing_the_terminal_drains_and_loses_the_log_alone(endless: Path) -> None:
    master, terminal = pty.openpty()
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    with started(endless / "alpha", TAKE_TERMINAL, **streams) as (process, address, metrics), ThreadPoolExecutor(1) as pool:
        os.close(terminal)
        with Client(address) as client:
            answer = pool.submit(client.generate, "a dog runs", max_new_tokens=1000)
            wait_until(lambda: num_running(metrics) == 1, "it runs")
            os.close(master)
            assert answer.result().usage.generated_tokens == 1000
        assert process.wait(60) == 0


def test_under_nohup_a_server_outlives_its_terminal_and_whoever_reads_its_log(endless: Path) -> None:
    """A broken pipe, as in `dragoman serve 2>&1 | head`, used to fail every request whose line could not be written."""
    with started(endless / "alpha", IGNORE_HANGUPS, stderr=subprocess.PIPE) as (process, address, _), Client(address) as client:
        process.send_signal(signal.SIGHUP)
        assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
        assert process.poll() is None and process.stderr is not None
        process.stderr.close()
        for _ in range(3):
            assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
        process.terminate()
        assert process.wait(60) == 0


@pytest.mark.parametrize("closed", [(2,), (1, 2)], ids=["error", "output and error"])
def test_a_server_without_standard_streams_serves_and_drains(endless: Path, closed: tuple[int, ...]) -> None:
    """Some starters of daemons leave them out, as `2>&-` does."""
    before = f"import os\nfor number in {closed}: os.close(number)"
    with started(endless / "alpha", before) as (process, address, _), Client(address) as client:
        assert client.generate("a dog runs", max_new_tokens=2).finish_reason == "length"
        process.terminate()
        assert process.wait(60) == 0
