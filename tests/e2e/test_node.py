"""A caller that has nothing of ours but the contract: Node.js with gRPC's own packages."""

import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from dragoman.client.sync import Client

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests/protos/node"
PACKAGE_FILES = ("package.json", "package-lock.json", ".npmrc")
# Errors of npm that our own files are to blame for, not the way to the registry.
OUR_FAULTS = ("EUSAGE", "EINTEGRITY", "EJSONPARSE", "ELOCKVERIFY", "EINVALIDTAGNAME")
TEXT = "A dog runs through the snow."

pytestmark = pytest.mark.e2e


def install(cache: Path, npm: str) -> Path:
    """Return a folder with the packages in it, fetched once for each set of versions, whoever else asks meanwhile."""
    contents = b"\0".join((FOLDER / name).read_bytes() for name in PACKAGE_FILES)
    target = cache / hashlib.sha256(contents).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not target.is_dir():
            with tempfile.TemporaryDirectory(dir=cache) as staging:
                packages = Path(staging) / "packages"
                packages.mkdir()
                for name in PACKAGE_FILES:
                    shutil.copy(FOLDER / name, packages)
                fetch(packages, npm, cache / "npm")
                packages.rename(target)
    return target


def fetch(packages: Path, npm: str, cache: Path) -> None:
    """Run `npm ci`; skip where the registry is out of reach, fail where our files are wrong."""
    flags = ["--ignore-scripts", "--no-audit", "--no-fund", "--fetch-retries=1", "--fetch-timeout=60000", f"--cache={cache}"]
    try:
        done = subprocess.run([npm, "ci", *flags], cwd=packages, capture_output=True, text=True, check=False, timeout=240)
    except subprocess.TimeoutExpired:
        pytest.skip("npm could not fetch the packages of tests/protos/node within 240 s")
    if done.returncode:
        found = re.search(r"code (\S+)", done.stderr)
        code = found[1] if found else "no code"
        assert code not in OUR_FAULTS, done.stderr
        pytest.skip(f"npm cannot fetch the packages of tests/protos/node: {code}")


@pytest.fixture(scope="session")
def node() -> tuple[str, dict[str, str]]:
    """The program and the environment to run our client in."""
    node, npm = shutil.which("node"), shutil.which("npm")
    if node is None or npm is None:
        pytest.skip("needs Node.js: `node` and `npm`")
    packages = install(ROOT / ".cache/node", npm)
    # A proxy for the world is none for this machine.
    return node, os.environ | {"NODE_PATH": str(packages / "node_modules"), "no_proxy": "127.0.0.1", "no_grpc_proxy": "127.0.0.1"}


def test_node_calls_the_server_with_nothing_but_the_contract(serve: Any, bundles: Path, node: Any) -> None:
    program, environment = node
    # So small that a crowd of 32 is too much, and large enough for the rest.
    with serve(bundles, "--max-slots", "4", "--max-waiting-requests", "4") as server:
        command = [program, str(FOLDER / "client.js"), server.address, "en-de", str(ROOT / "protos")]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        with Client(server.address) as client:
            ours = client.generate(TEXT, model="en-de")
            beams = client.generate(TEXT, model="en-de", num_beams=3, num_return_sequences=2, return_log_probs=True)
        assert server.terminate() == 0
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
