"""`dragoman pull` and `dragoman sign` as processes of their own."""

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dragoman.export.bundle import Bundle, BundleError, hash_file
from dragoman.export.signing import Keys
from tests.server.stores.conftest import BIG_FILE, S3, digest, files
from tests.server.stores.proxy import Harm, Proxy
from tests.system.test_front_ends import wait_until

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dragoman", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def test_what_is_signed_uploaded_and_pulled_is_served(s3: S3, bundle: Path, tmp_path: Path, key: Path) -> None:
    here, public = tmp_path / "here", key.with_name("public.pem")
    unsigned = run("pull", bundle, here, "--require-signatures", public)
    assert (unsigned.returncode, unsigned.stdout) == (2, "") and "is not signed" in unsigned.stderr
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
    assert Bundle.open(here / "tiny" / "1", keys=Keys.load(public)).manifest.name == "tiny"


def test_a_server_refuses_at_its_start_what_is_not_signed(bundle: Path, tmp_path: Path, key: Path) -> None:
    public = key.with_name("public.pem")
    with pytest.raises(BundleError, match=rf"{bundle}: is not signed"):
        Bundle.open(bundle, keys=Keys.load(public))
    refused = run("serve", "--models", bundle, "--require-signatures", public, "--port", 0, "--metrics-port", 0)
    assert refused.returncode == 2 and f"{bundle}: is not signed" in refused.stderr
    none = run("serve", "--models", bundle, "--require-signatures", tmp_path / "none", "--port", 0, "--metrics-port", 0)
    assert none.returncode == 2 and f"{tmp_path / 'none'}: No such file" in none.stderr


@pytest.mark.parametrize(
    ("arguments", "code", "reason"),
    [
        (["s3://models/nothing"], 2, "s3://models/nothing: holds no bundle"),
        (["s3://nobody/nothing"], 1, "s3://nobody/nothing: "),
        (["ftp://models"], 2, "ftp://: not a scheme"),
        (["nowhere"], 1, "nowhere: no such folder"),
        (["s3://models/m", "--sha256", "12"], 2, "--sha256: '12' is not 64 hexadecimal digits"),
        (["s3://models/m", "--require-signatures", "nowhere"], 2, "nowhere: No such file"),
        (["https://models.example/all.tar"], 2, "an archive is opened only if its SHA-256 is given"),
    ],
)
def test_failures_are_one_line_and_an_exit_code(s3: S3, tmp_path: Path, arguments: list[str], code: int, reason: str) -> None:
    ended = run("pull", arguments[0], tmp_path / "here", *arguments[1:])
    assert (ended.returncode, ended.stdout) == (code, "")
    assert ended.stderr.startswith("dragoman: ") and ended.stderr.count("\n") == 1 and reason in ended.stderr


def test_a_folder_that_is_none_is_named(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = run("pull", bundle, tmp_path / "file/here")
    assert ended.returncode == 2 and ended.stderr.startswith(f"dragoman: {tmp_path / 'file'}") and ended.stderr.count("\n") == 1


def limit_files() -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, 1_000_000))


def test_a_file_that_cannot_be_written_is_named_and_nothing_of_it_stays(s3: S3, bundle: Path, tmp_path: Path) -> None:
    s3.put(bundle, "m")
    ended = run("pull", "s3://models/m", tmp_path / "here", preexec_fn=limit_files)
    partial = tmp_path / "here/.cache/partial" / hash_file(bundle / BIG_FILE)
    assert (ended.returncode, ended.stderr.splitlines()[-1]) == (2, f"dragoman: {partial}: File too large")
    assert not list((tmp_path / "here").glob("[!.]*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_a_full_disk_is_named_and_left_with_room(s3: S3, bundle: Path, tmp_path: Path) -> None:
    s3.put(bundle, "m")
    (tmp_path / "small").mkdir()
    mount = "mount -t tmpfs -o size=2m none small || exit 77; "
    pull = f"{sys.executable} -m dragoman pull s3://models/m {tmp_path}/small/here 2>&1; echo ended $?; "
    pull += "df --output=avail -B1 small | tail -1"
    command = ["unshare", "--mount", "sh", "-c", f"{mount} {pull}"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, env=os.environ | {"PYTHONPATH": str(ROOT)}
    )
    if ended.returncode == 77 or "unshare" in ended.stderr:
        pytest.skip("this machine lets nobody mount")
    *_, reason, code, free = ended.stdout.splitlines()
    assert code == "ended 2" and "No space left on device" in reason and str(tmp_path / "small") in reason
    assert int(free) > 1_000_000


def test_a_pull_that_is_killed_leaves_nothing_to_be_seen_and_is_gone_on_with(
    s3: S3, s3_proxy: Proxy, bundle: Path, tmp_path: Path
) -> None:
    s3.put(bundle, "m")
    here = tmp_path / "here"
    s3_proxy.harms.append(Harm(BIG_FILE, 2_000_000, "stall"))
    process = subprocess.Popen(
        [sys.executable, "-m", "dragoman", "pull", "s3://models/m", here], cwd=ROOT, stderr=subprocess.DEVNULL
    )
    s3_proxy.stalled.wait()
    wait_until(lambda: any(path.stat().st_size for path in here.glob(".cache/partial/*")), "something of it is on disk")
    process.kill()
    process.wait()
    assert not list(here.glob("[!.]*")) and len(list((here / ".pulling").iterdir())) == 2
    s3_proxy.requests.clear()
    ended = run("pull", "s3://models/m", here)
    assert ended.returncode == 0, ended.stderr
    assert files(here / "tiny/1") == files(bundle)
    assert [path.name for path in (here / ".pulling").iterdir()] == ["lock"]
    assert "range: bytes=" in s3_proxy.asked(BIG_FILE)[0]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_pull_that_is_ended_tidies_up_at_once(
    s3: S3, s3_proxy: Proxy, bundle: Path, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    s3.put(bundle, "m")
    here = tmp_path / "here"
    s3_proxy.harms.append(Harm(BIG_FILE, 2_000_000, "stall"))
    process = subprocess.Popen([sys.executable, "-m", "dragoman", "pull", "s3://models/m", here], cwd=ROOT, stderr=subprocess.PIPE)
    s3_proxy.stalled.wait()
    process.send_signal(number)
    _, told = process.communicate()
    assert process.returncode == code and b"Traceback" not in told
    assert [path.name for path in here.iterdir() if path.name != ".cache"] == [".pulling"]
    assert [path.name for path in (here / ".pulling").iterdir()] == ["lock"]


def test_only_what_can_be_signed_is(bundle: Path, tmp_path: Path, key: Path) -> None:
    (bundle / "encoder.weights").write_bytes(b"")
    damaged = run("sign", bundle, "--key", key)
    assert damaged.returncode == 2 and "encoder.weights" in damaged.stderr and not (bundle / "bundle.json.sig").exists()
    other = run("sign", tmp_path / "keys/public.pem", "--key", key)
    assert other.returncode == 2 and "neither a bundle's folder nor a model.toml" in other.stderr


def test_help_says_what_the_commands_take() -> None:
    make: Callable[[str], str] = lambda command: " ".join(run(command, "--help").stdout.split())  # noqa: E731
    assert "--require-signatures" in make("pull") and "--key" in make("sign")
