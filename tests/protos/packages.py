"""The packages of the Node client, fetched once into a folder that git ignores."""

import fcntl
import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "node"
PACKAGE_FILES = ("package.json", "package-lock.json", ".npmrc")
# Errors of npm that our own files are to blame for, not the way to the registry.
OUR_FAULTS = ("EUSAGE", "EINTEGRITY", "EJSONPARSE", "ELOCKVERIFY", "EINVALIDTAGNAME")


def install(cache: Path, npm: str) -> Path:
    """Return a folder with the packages in it, fetched once for each set of versions by concurrent tests."""
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
