"""Packages are fetched once; a registry out of reach is a reason to skip, a fault of ours is not."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.protos.packages import install


def npm(folder: Path, script: str) -> str:
    """Write a program in npm's place, which notes that it ran."""
    program = folder / "npm-stand-in"
    program.write_text(f'#!/bin/sh\necho ran >> "{folder}/runs"\n{script}\n')
    program.chmod(0o755)
    return str(program)


def num_runs(folder: Path) -> int:
    return len((folder / "runs").read_text().splitlines())


def test_packages_are_fetched_once_whoever_asks(tmp_path: Path) -> None:
    program = npm(tmp_path, "test -f package-lock.json && mkdir node_modules && touch node_modules/found")
    with ThreadPoolExecutor(4) as pool:
        folders = {future.result() for future in [pool.submit(install, tmp_path / "cache", program) for _ in range(8)]}
    [folder] = folders
    assert (folder / "node_modules/found").is_file()
    assert num_runs(tmp_path) == 1


def test_what_was_not_fetched_whole_is_not_there(tmp_path: Path) -> None:
    program = npm(tmp_path, "mkdir node_modules; echo 'npm error code ENOTFOUND' >&2; exit 1")
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match="ENOTFOUND"):
            install(tmp_path / "cache", program)
    assert num_runs(tmp_path) == 2
    assert {path.name for path in (tmp_path / "cache").iterdir()} == {"lock"}


@pytest.mark.parametrize("line", ["npm error code EUSAGE", "npm ERR! code EINTEGRITY"])
def test_fault_of_our_own_files_fails(tmp_path: Path, line: str) -> None:
    with pytest.raises(AssertionError, match=line):
        install(tmp_path / "cache", npm(tmp_path, f"echo '{line}' >&2; exit 1"))
