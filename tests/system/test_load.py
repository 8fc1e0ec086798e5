"""The load generator against the real server, as docs/load-testing.md has it."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.system.harness.server import ROOT, Server, dragoman

pytestmark = pytest.mark.e2e


def test_the_first_command_of_the_page_works(shared_server: Server, tmp_path: Path) -> None:
    page = (ROOT / "docs/load-testing.md").read_text(encoding="utf-8")
    first = re.findall(r"^\$ dragoman load (.*)$", page, re.MULTILINE)[0]
    arguments = (*shlex.split(first, comments=True), "--duration", 4)
    done = dragoman("load", *arguments, folder=tmp_path, DRAGOMAN_SERVER=shared_server.address)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "errors: none" in done.stdout and done.stderr == ""
    result = json.loads((tmp_path / "before.json").read_text())
    assert result["total"]["counts"]["num_ok"] > 0 and result["errors"] == []
    assert {model["name"] for model in result["models"]} == {"en-de", "en-fr"}


@pytest.mark.parametrize("model", [(), ("--model", "en-xx")])
def test_a_model_that_is_not_there_is_named(shared_server: Server, tmp_path: Path, model: tuple[str, ...]) -> None:
    done = dragoman("load", "--rate", 10, *model, folder=tmp_path, DRAGOMAN_SERVER=shared_server.address)
    assert done.returncode == 2 and done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert shared_server.address in line and "--model: " in line and "en-de, en-fr" in line
