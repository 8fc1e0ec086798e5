"""The installed wheel, run where other things have our folders' names."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.wheels import build_wheel, unpack

DECOYS = ("client", "server", "model", "export", "protos", "load", "errors")
CALLER = """
import sys
from dragoman import Client

with Client(sys.argv[1]) as client:
    print(client.generate("A dog runs through the snow.", model="en-de").text)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return unpack(build_wheel(folder), tmp_path_factory.mktemp("installed"))


@pytest.fixture
def run(installed: Path, tmp_path: Path) -> Callable[..., subprocess.Popen[str]]:
    """Start Python outside the checkout, with the wheel and with decoys of our folders' names on the path and in its folder."""
    here, on_path = tmp_path / "here", tmp_path / "on_path"
    for folder in (here, on_path):
        folder.mkdir()
        for name in DECOYS:
            (folder / f"{name}.py").write_text(f"raise SystemExit('the decoy {name} was imported')\n")
    (here / "dragoman-notes").mkdir()
    path = os.pathsep.join(map(str, (installed, on_path)))

    def start(*arguments: object) -> subprocess.Popen[str]:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.Popen(
            command, cwd=here, env=os.environ | {"PYTHONPATH": path}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    return start


def finish(process: subprocess.Popen[str], seconds: float = 120) -> str:
    out, err = process.communicate(timeout=seconds)
    assert process.returncode == 0, err
    return out


def test_what_is_tested_here_is_the_wheel(run: Callable[..., subprocess.Popen[str]], installed: Path) -> None:
    program = "import dragoman, dragoman.server.main as m; print(dragoman.__file__, m.__file__)"
    assert all(name.startswith(str(installed)) for name in finish(run("-c", program)).split())


def test_decoys_are_not_imported(run: Callable[..., subprocess.Popen[str]], bundles: Path) -> None:
    server = run("-m", "dragoman", "serve", "--models", bundles, "--host", "127.0.0.1", "--port", 0, "--metrics-port", 0)
    try:
        assert server.stderr is not None
        events = (json.loads(line) for line in server.stderr if line.startswith("{"))
        address = next(f"127.0.0.1:{event['port']}" for event in events if event["event"] == "serving")
        asked = "--server", address, "--model", "en-de"
        translated = finish(run("-m", "dragoman", "translate", *asked, "A dog runs through the snow."))
        assert translated.strip() and finish(run("-c", CALLER, address)) == translated
        finish(run("-m", "dragoman", "load", *asked, "--concurrency", 1, "--requests", 3))
        server.send_signal(signal.SIGTERM)
        server.communicate(timeout=60)
        assert server.returncode == 0
    finally:
        if server.poll() is None:
            server.kill()
            server.communicate()
