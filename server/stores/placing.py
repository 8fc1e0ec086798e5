"""The folder that bundles are pulled into: what is there, and how a version appears in it and disappears from it, whole.

    FOLDER/NAME/VERSION/     a bundle, and `.pulled.json`, which says where it came from
    FOLDER/.pulling/…        what is on its way in or out; no server looks into hidden folders

What is being made lies in a folder of its own with a lock on it; what a killed process left has none, and is removed by the next.
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
from dragoman.export.manifest_file import read_manifest_bytes
from dragoman.model.files import read_bounded

RECORD_FILE: Final = ".pulled.json"
SCRATCH_FOLDER: Final = ".pulling"
_MAX_RECORD_BYTES: Final = 1 << 14


class Record(Struct, frozen=True):
    """Where a version came from.

    Attributes:
        address: As it was given.
        folder: Its folder below the address.
    """

    address: str
    folder: str


@dataclass(frozen=True, slots=True)
class Placed:
    """A version that was pulled.

    Attributes:
        directory: Where it lies: `FOLDER/NAME/VERSION`.
        record: Where it came from.
    """

    directory: Path
    record: Record

    @property
    def digest(self) -> str:
        """SHA-256 of its manifest as it is now; empty if there is none."""
        try:
            return hashlib.sha256(read_manifest_bytes(self.directory / MANIFEST_FILE)).hexdigest()
        except BundleError:
            return ""


class Place:
    """A folder that bundles are pulled into."""

    def __init__(self, folder: Path) -> None:
        """Take a folder, which is made when something is pulled into it."""
        self.folder = folder

    def placed(self, model: str = "*") -> list[Placed]:
        """Return what was pulled, of one model or of all; what somebody else put there is not looked at."""
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
        """Lend a hidden folder; what is left in it at the end is removed.

        Raises:
            OSError: If it cannot be made.
        """
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
        """Move a finished bundle to where servers look, in one step.

        Args:
            directory: In a scratch folder.
            model: The bundle's.
            version: The name of its folder there; empty for the number after the highest that is there.
            record: Where it came from.

        Returns:
            What is there now: this one, or the same that another pull has put there meanwhile.

        Raises:
            BundleError: If that version is there and is another bundle, or a damaged one.
            OSError: If it cannot be moved.
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
        """Take a version away, in one step for whoever looks.

        Raises:
            OSError: If it cannot be moved.
        """
        with self.scratch() as scratch:
            os.rename(placed.directory, scratch / "removed")
            sync_folder(placed.directory.parent)
            with contextlib.suppress(OSError):  # there is more in it
                placed.directory.parent.rmdir()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other pulls from looking and changing at the same time; not for long."""
        (self.folder / SCRATCH_FOLDER).mkdir(parents=True, exist_ok=True)
        with (self.folder / SCRATCH_FOLDER / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _sweep(self) -> None:
        """Remove what killed processes left."""
        for path in (self.folder / SCRATCH_FOLDER).iterdir():
            if not path.is_dir() or path.is_symlink():
                continue
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            except FileNotFoundError:
                continue  # its owner has just removed it
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
            except BlockingIOError:
                pass  # somebody is at work in it
            finally:
                os.close(descriptor)


def sync_folder(path: Path) -> None:
    """Make sure that what was renamed in a folder stays so, even if the power fails."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def sync_tree(directory: Path) -> None:
    """Likewise for all that lies below a folder."""
    for folder, _, files in os.walk(directory):
        for file in files:
            sync_folder(Path(folder) / file)
        sync_folder(Path(folder))
