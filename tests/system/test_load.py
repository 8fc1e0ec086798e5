"""The load generator against the real server, as docs/load-testing.md has it."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.e2e


def load(address: str, folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dragoman", "load", *map(str, arguments)]
    environment = os.environ | {"DRAGOMAN_SERVER": address, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_the_first_command_of_the_page_works(shared_server, tmp_path: Path) -> None:
    page = (ROOT / "docs/load-testing.md").read_text(encoding="utf-8")
    first = re.findall(r"^\$ dragoman load (.*)$", page, re.MULTILINE)[0]
    done = load(shared_server.address, tmp_path, *shlex.split(first, comments=True), "--duration", 4)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "errors: none" in done.stdout and done.stderr == ""
    result = json.loads((tmp_path / "before.json").read_text())
    assert result["total"]["counts"]["num_ok"] > 0 and result["errors"] == []
    assert {model["name"] for model in result["models"]} == {"en-de", "en-fr"}


@pytest.mark.parametrize("model", [(), ("--model", "en-xx")])
def test_a_model_that_is_not_there_ends_it_in_the_servers_words(shared_server, tmp_path: Path, model: tuple[str, ...]) -> None:
    done = load(shared_server.address, tmp_path, "--rate", 10, *model)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert shared_server.address in line and "--model: " in line and "en-de, en-fr" in line
