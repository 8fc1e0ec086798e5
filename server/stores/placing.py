"""Folder of pulled bundles, in which versions appear and disappear atomically.

    FOLDER/NAME/VERSION/     a bundle, with `.pulled.json`, its source
    FOLDER/.pulling/…        bundles being added or removed; servers skip hidden folders

Each incomplete bundle is in its own locked folder; those of killed processes are unlocked, and the next pull removes them.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from dragoman.export.bundle import MANIFEST_FILE, Bundle, BundleError
from dragoman.export.manifest import read_manifest_bytes
from dragoman.model.files import read_bounded

RECORD_FILE: Final = ".pulled.json"
SCRATCH_FOLDER: Final = ".pulling"
_MAX_RECORD_BYTES: Final = 1 << 14


class Record(Struct, frozen=True):
    """Source of a version: the address as given, and a folder below it."""

    address: str
    folder: str


@dataclass(frozen=True, slots=True)
class Placed:
    """A pulled version in `FOLDER/NAME/VERSION`."""

    directory: Path
    record: Record

    @property
    def digest(self) -> str:
        """SHA-256 of the current manifest; empty if there is none."""
        try:
            return hashlib.sha256(read_manifest_bytes(self.directory / MANIFEST_FILE)).hexdigest()
        except BundleError:
            return ""


class Place:
    """A folder for pulled bundles."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def placed(self, model: str = "*") -> list[Placed]:
        """Return the pulled versions of one model or of all; versions not pulled are skipped."""
        found = []
        for path in sorted(self.folder.glob(f"{model}/*/{RECORD_FILE}")):
            relative = path.relative_to(self.folder)
            if any(part.startswith(".") for part in relative.parts[:2]) or path.parent.is_symlink():
                continue
            with contextlib.suppress(OSError, msgspec.DecodeError):
                found.append(Placed(path.parent, msgspec.json.decode(read_bounded(path, _MAX_RECORD_BYTES), type=Record)))
        return found

    @contextlib.contextmanager
    def scratch(self) -> Iterator[Path]:
        """Yield a hidden folder that is removed afterwards."""
        with self.locked():
            self._sweep()
            directory = Path(tempfile.mkdtemp(prefix="", dir=self.folder / SCRATCH_FOLDER))
            lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)
            os.close(lock)

    def put(self, directory: Path, model: str, version: str, record: Record) -> Placed:
        """Publish a complete bundle atomically; return it, or the same version from another pull.

        An empty version is the number after the highest. Raises `BundleError` if the version exists and differs or is damaged.
        """
        (directory / RECORD_FILE).write_bytes(msgspec.json.encode(record))
        sync_tree(directory)
        ours = Placed(directory, record).digest
        with self.locked():
            parent = self.folder / model
            parent.mkdir(exist_ok=True)
            if not version:
                for each in self.placed(model):
                    if each.digest == ours:
                        return each
                numbers = [int(path.name) for path in parent.iterdir() if path.name.isdecimal() and path.name.isascii()]
                version = str(max(numbers, default=0) + 1)
            target = parent / version
            if target.is_symlink() or target.exists():
                there = Placed(target, record)
                if there.digest == ours:
                    Bundle.open(target)
                    return there
                raise BundleError(
                    f"{target}: is another bundle, and versions do not change: remove it, or give the new one another name"
                )
            os.rename(directory, target)
            sync_folder(parent)
            sync_folder(self.folder)
        return Placed(target, record)

    def remove(self, placed: Placed) -> None:
        """Remove a version atomically."""
        with self.scratch() as scratch:
            os.rename(placed.directory, scratch / "removed")
            sync_folder(placed.directory.parent)
            with contextlib.suppress(OSError):  # not empty
                placed.directory.parent.rmdir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Exclude other pulls for a short time."""
        (self.folder / SCRATCH_FOLDER).mkdir(parents=True, exist_ok=True)
        with (self.folder / SCRATCH_FOLDER / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _sweep(self) -> None:
        """Remove folders of killed processes."""
        for path in (self.folder / SCRATCH_FOLDER).iterdir():
            if not path.is_dir() or path.is_symlink():
                continue
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # just removed by its owner
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            except BlockingIOError:
                pass  # in use
            finally:
                os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Flush a folder or file to disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Flush everything below a folder to disk."""
    for folder, _, files in os.walk(directory):
        for file in files:
            sync_folder(Path(folder) / file)
        sync_folder(Path(folder))
