"""Versions of models for tests: real bundles, put down and taken away, and the processes of a server found in `/proc`."""

import hashlib
import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.harness.served import descendants
from dragoman.export.bundle import Bundle, content_version

# What tests of versions have in common: looks follow each other quickly, and the calls of tests are short.
FLAGS = ("--models-poll-seconds", "0.1", "--num-threads", "1", "--restart-backoff-initial-seconds", "0.1")


def seal(folder: Path, **fields: Any) -> None:
    """Have a manifest say what its files are now; fields of it may be others. Its version is what all that gives."""
    manifest = folder / "bundle.json"
    content = json.loads(manifest.read_text())
    for path, entry in content["files"].items():
        data = (folder / path).read_bytes()
        entry |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    manifest.write_text(json.dumps(content))
    version = content_version(Bundle.open(folder, is_checked=False).manifest)
    manifest.write_text(json.dumps(content | {"version": version} | fields))


class ModelFolder:
    """A folder of models that a test changes while a server watches it."""

    def __init__(self, path: Path, bundles: Path) -> None:
        self.path, self._bundles = path, bundles
        self.asked: dict[str, list[float]] = {}
        path.mkdir(exist_ok=True)

    def put(self, model: str, version: str, bundle: str, change: Callable[[Path], object] = lambda _: None) -> str:
        """Put down a version, whole at once; return what its content gives."""
        scratch = self.path / f".{model}-{version}"
        shutil.copytree(self.bundle(bundle), scratch)
        change(scratch)
        (self.path / model).mkdir(exist_ok=True)
        self._note(model)
        scratch.rename(self.path / model / version)
        return self.content(bundle)

    def remove(self, model: str, version: str) -> None:
        """Take a version away, at once as one that watches sees it."""
        scratch = self.path / f".gone-{model}-{version}"
        self._note(model)
        (self.path / model / version).rename(scratch)
        shutil.rmtree(scratch)

    def say(self, model: str, text: str) -> None:
        """Write a model's `model.toml`."""
        (self.path / model).mkdir(exist_ok=True)
        self._note(model)
        scratch = self.path / model / ".model.toml"
        scratch.write_text(text)
        scratch.rename(self.path / model / "model.toml")

    def bundle(self, name: str) -> Path:
        """Return where a bundle lies that versions are made of."""
        return self._bundles / name

    def content(self, bundle: str) -> str:
        """Return the version that a bundle's content gives."""
        return str(json.loads((self.bundle(bundle) / "bundle.json").read_text())["version"])

    def _note(self, model: str) -> None:
        self.asked.setdefault(model, []).append(time.time())


def admin_of(server: Any) -> str:
    """Return where a server's admin service listens."""
    return f"127.0.0.1:{next(event['port'] for event in server.events if event['event'] == 'admin service listens')}"


def is_running(pid: int) -> bool:
    """Whether a process runs; one that has ended and was not waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def processes(server: Any) -> set[int]:
    """Return a server's process and all that it started."""
    return {pid for pid in descendants(server.process.pid) if is_running(pid)}


def engine_pids(server: Any) -> list[int]:
    """Return the engines that have been ready, in that order."""
    return [event["engine_pid"] for event in list(server.events) if event["event"] == "engine ready"]


def is_engine(pid: int) -> bool:
    try:
        return b"dragoman.server.engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


def next_engine(server: Any, before: set[int]) -> int:
    """Return the process of an engine that was not there before, as soon as there is one."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        for pid in processes(server) - before:
            if is_engine(pid):
                return pid
        time.sleep(0.002)
    raise AssertionError("no engine was started")
