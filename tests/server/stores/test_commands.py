"""`dragoman pull` and `dragoman sign` as processes: output, exit codes, signals, and full disks."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dragoman.export.bundle import Bundle
from dragoman.export.signing import Keys
from tests.server.stores.conftest import BIG_FILE, S3, digest, files, seen
from tests.server.stores.proxy import Harm, Proxy

ROOT = Path(__file__).resolve().parents[3]
COMMAND = [sys.executable, "-m", "dragoman"]


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_bundle_is_signed_pulled_and_refused_unless_it_is_signed(s3: S3, bundle: Path, tmp_path: Path, key: Path) -> None:
    here, public = tmp_path / "here", key.with_name("public.pem")
    unsigned = run("pull", bundle, here, "--require-signatures", public)
    assert (unsigned.returncode, unsigned.stdout) == (2, "") and "is not signed" in unsigned.stderr
    refused = run("serve", "--models", bundle, "--require-signatures", public, "--port", 0, "--metrics-port", 0)
    assert refused.returncode == 2 and f"{bundle}: is not signed" in refused.stderr
    signed = run("sign", bundle, "--key", key)
    identity = next(iter(Keys.load(public).by_id))
    assert (signed.returncode, signed.stdout) == (0, f"signed {bundle}: tiny version seed0, with key {identity}\n")
    s3.put(bundle, "m")
    pulled = run("pull", "s3://models/m", here, "--require-signatures", public, "--cache", tmp_path / "cache")
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout == f"pulled tiny 1, version seed0, sha256:{digest(bundle)}, in {here}/tiny/1\n"
    assert f"{BIG_FILE}: 3000000 bytes" in pulled.stderr
    again = run("pull", "s3://models/m", here, "--cache", tmp_path / "cache", "--sha256", digest(bundle).upper())
    assert again.stdout.startswith("is there: tiny 1, ")
    found = {"name": "tiny", "version": "seed0", "sha256": digest(bundle), "folder": f"{here}/tiny/1", "is_new": False}
    assert json.loads(run("pull", "s3://models/m", here, "--cache", tmp_path / "cache", "--json").stdout) == found
    assert Bundle.open(here / "tiny" / "1", keys=Keys.load(public)).manifest.name == "tiny"


def test_only_a_whole_bundle_is_signed(bundle: Path, key: Path) -> None:
    (bundle / "encoder.weights").write_bytes(b"")
    damaged = run("sign", bundle, "--key", key)
    assert damaged.returncode == 2 and "encoder.weights" in damaged.stderr and not (bundle / "bundle.json.sig").exists()
    other = run("sign", key.with_name("public.pem"), "--key", key)
    assert other.returncode == 2 and "neither a bundle's folder nor a model.toml" in other.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["s3://nobody/nothing"], 1, "s3://nobody/nothing: "),
        (["ftp://models"], 2, "ftp://: not a scheme"),
        (["s3://models/m", "--require-signatures", "nowhere"], 2, "nowhere: No such file"),
    ],
)
def test_failure_is_one_line_and_an_exit_code(s3: S3, tmp_path: Path, arguments: list[str], code: int, reason: str) -> None:
    ended = run("pull", arguments[0], tmp_path / "here", *arguments[1:])
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith("dragoman: ") and ended.stderr.count("\n") == 1 and reason in ended.stderr


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
    ids=["INT", "TERM", "KILL"],
)
def test_pull_that_is_ended_leaves_nothing_to_be_seen_and_the_next_goes_on(
    s3: S3, s3_proxy: Proxy, bundle: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    s3.put(bundle, "m")
    here = tmp_path / "here"
    s3_proxy.harms.append(Harm(BIG_FILE, 2_000_000, "stall"))
    process = subprocess.Popen([*COMMAND, "pull", "s3://models/m", here], cwd=ROOT, stderr=subprocess.PIPE)
    s3_proxy.stalled.wait()
    while not any(path.stat().st_size for path in here.glob(".cache/partial/*")):
        pass
    process.send_signal(number)
    _, told = process.communicate()
    assert process.returncode == code and b"Traceback" not in told
    if number != signal.SIGKILL:
        assert seen(here) == []
        return
    assert not list(here.glob("[!.]*")) and len(list((here / ".pulling").iterdir())) == 2
    s3_proxy.requests.clear()
    ended = run("pull", "s3://models/m", here)
    assert ended.returncode == 0, ended.stderr
    assert files(here / "tiny/1") == files(bundle) and seen(here) == ["tiny"]
    assert "range: bytes=" in s3_proxy.asked(BIG_FILE)[0]
    assert list((here / ".cache/held").iterdir()) == [], "the files of the killed pull are held no more"
