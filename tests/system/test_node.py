"""A caller that has nothing of ours but the contract: Node.js with gRPC's own packages."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.search import Search
from dragoman.client.sync import Client
from tests.protos.packages import FOLDER, install
from tests.system.harness.server import serving

ROOT = Path(__file__).resolve().parents[2]
TEXT = "A dog runs through the snow."

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="session")
def node() -> tuple[str, dict[str, str]]:
    """The program and the environment to run our client in."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs Node.js: `node` and `npm`")
    version = subprocess.run([node, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.removeprefix("v").partition(".")[0]) < 18:
        pytest.skip(f"needs Node.js 18 or newer, not {version}")
    packages = install(ROOT / ".cache/node", npm)
    # A proxy for the world is none for this machine.
    return node, os.environ | {"NODE_PATH": str(packages / "node_modules"), "no_proxy": "127.0.0.1", "no_grpc_proxy": "127.0.0.1"}


def test_node_calls_the_server_with_nothing_but_the_contract(node: Any, bundles: Path) -> None:
    program, environment = node
    # So small that a crowd of 32 is too much, and large enough for the rest.
    with serving(bundles, "--max-slots", "4", "--max-waiting-requests", "4") as server:
        command = [program, str(FOLDER / "client.js"), server.address, "en-de", str(ROOT / "protos")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        with Client(server.address) as client:
            ours = client.generate(TEXT, model="en-de")
            beams = client.generate(TEXT, model="en-de", search=Search(num_beams=3, num_return_sequences=2, return_log_probs=True))
    said = {line["call"]: line["outcome"] for line in map(json.loads, done.stdout.splitlines())}

    generated = said["generate"]
    assert (generated["text"], generated["tokens"], generated["finish_reason"]) == (
        beams.text,
        list(beams.tokens),
        "FINISH_REASON_EOS",
    )
    assert [answer["score"] for answer in generated["answers"]] == [answer.score for answer in beams.answers]
    assert [len(answer["log_probs"]) for answer in generated["answers"]] == [len(answer.log_probs) for answer in beams.answers]
    assert (generated["model"], generated["model_version"]) == ("en-de", ours.model_version)
    assert said["sample"]["seed"] == str(2**64 - 1) and said["sample"]["text"], "64 bits go there and back"

    assert len(said["stream"]["pieces"]) > 2 and "".join(said["stream"]["pieces"]) == ours.text == said["stream"]["result"]["text"]

    batch = said["batch"]
    assert set(batch) == {"good", "bad", "also good"}
    assert batch["good"]["text"] == ours.text and batch["also good"]["text"]
    assert batch["bad"]["code"] == 3 and batch["bad"]["message"].startswith("num_beams: ")

    failure = said["failure"]
    assert (failure["name"], failure["code"]) == ("NOT_FOUND", 5)
    assert "en-xx" in failure["message"] and "en-de" in failure["message"]
    assert [detail["type_url"] for detail in failure["details"]] == ["type.googleapis.com/google.rpc.RequestInfo"]
    assert "retry_after_seconds" not in failure

    assert 0 < len(said["crowd"]) < 32
    for refusal in said["crowd"]:
        assert (refusal["code"], refusal["retry_after_seconds"] > 0) == (8, True)
        assert "type.googleapis.com/google.rpc.RetryInfo" in [detail["type_url"] for detail in refusal["details"]]

    assert said["nobody"]["code"] == 14 and said["nobody"]["message"]
