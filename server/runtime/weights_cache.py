"""Cache of folders written once and read by many processes: private, locked, checked, with eviction of unused entries.

An entry appears atomically, with a list of its files' sizes and SHA-256. Readers hold a shared lock on that list for their
lifetime, which marks the entry as in use.
"""

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from dragoman.export.bundle import FileEntry, hash_file
from dragoman.model.files import open_regular

LIST_FILE = "entry.json"
LOCK_FILE = "lock"
MAKING_PREFIX = "making-"
MAX_LIST_BYTES = 1 << 16
UNUSED_SECONDS = 7 * 86_400.0
POLL_SECONDS = 0.05
MOUNTS_FILE = Path("/proc/self/mounts")
MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


class CacheError(Exception):
    """The folder, or an entry of it, cannot be used."""


class Entry:
    """A checked entry, not removed while this object lives."""

    def __init__(self, directory: Path, lock: BinaryIO) -> None:
        self.directory = directory
        weakref.finalize(self, os.close, os.dup(lock.fileno()))


class Cache:
    """Entries by name, in a folder private to this user."""

    def __init__(self, parent: Path) -> None:
        """Use or create a folder in `parent`; raise `CacheError` if it cannot be created, or belongs or is open to other users."""
        self.directory = parent / f"dragoman-{os.geteuid()}"
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            found = self.directory.lstat()
        except OSError as error:
            raise CacheError(f"{self.directory}: {error.strerror}") from error
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise CacheError(f"{self.directory}: must be a folder of this user, and nobody else's to look into")

    def find(self, name: str) -> Entry | None:
        """Return an entry if it exists and is undamaged."""
        directory = self.directory / name
        try:
            lock = open_regular(directory / LIST_FILE)
        except OSError:
            return None
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                files = msgspec.json.decode(lock.read(MAX_LIST_BYTES), type=dict[str, FileEntry])
                is_whole = bool(files) and all(_is_same(directory / path, entry) for path, entry in files.items())
                os.utime(directory / LIST_FILE)  # fails if it was removed before it was locked
                is_there = os.path.samestat(os.fstat(lock.fileno()), os.stat(directory / LIST_FILE))  # not recreated since
            except (OSError, ValueError):
                return None
            return Entry(directory, lock) if is_whole and is_there else None

    def find_or_make(self, name: str, make: Callable[[Path, int], None], max_seconds: float) -> Entry:
        """Return an entry, created by this or another process within `max_seconds`; raise `CacheError` if it cannot be created.

        Unused entries whose name has the same part before the last `-` are removed. Subprocesses of `make` should inherit the
        lock's descriptor.
        """
        if (entry := self.find(name)) is not None:
            return entry
        try:
            with self._locked(max_seconds) as lock:
                if (entry := self.find(name)) is not None:
                    return entry
                self._remove_leftovers()
                with tempfile.TemporaryDirectory(prefix=MAKING_PREFIX, dir=self.directory, ignore_cleanup_errors=True) as scratch:
                    made = Path(scratch) / name
                    made.mkdir(mode=0o700)
                    make(made, lock)
                    _list_files(made)
                    with contextlib.suppress(FileNotFoundError):
                        os.rename(self.directory / name, Path(scratch) / "damaged")
                    os.rename(made, self.directory / name)
                if (entry := self.find(name)) is None:
                    raise CacheError(f"{self.directory / name}: is not what was just written there")
                self._remove_unused(name)
                return entry
        except OSError as error:
            raise CacheError(f"{error.filename or self.directory}: {error.strerror}") from error

    @contextlib.contextmanager
    def _locked(self, max_seconds: float) -> Iterator[int]:
        """Hold the folder's lock, so that one process at a time creates an entry; raises `CacheError` after `max_seconds`."""
        descriptor = os.open(self.directory / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        until = time.monotonic() + max_seconds
        try:
            while not _try_lock(descriptor):
                if time.monotonic() >= until:
                    raise CacheError(f"{self.directory}: another process has been making something for {max_seconds:.0f} s")
                time.sleep(POLL_SECONDS)
            yield descriptor
        finally:
            os.close(descriptor)

    def _remove_leftovers(self) -> None:
        """Remove leftovers of killed processes; requires the folder's lock."""
        for leftover in self.directory.glob(f"{MAKING_PREFIX}*"):
            shutil.rmtree(leftover, ignore_errors=True)

    def _remove_unused(self, name: str) -> None:
        """Remove entries not in use: earlier ones of the same bundle, and those not opened for a week."""
        for path in self.directory.iterdir():
            is_same = path.name != name and path.name.rpartition("-")[0] == name.rpartition("-")[0]
            try:
                with open_regular(path / LIST_FILE) as file:
                    is_old = time.time() - os.fstat(file.fileno()).st_mtime > UNUSED_SECONDS
                    if (is_same or is_old) and _try_lock(file.fileno()):
                        shutil.rmtree(path, ignore_errors=True)
            except OSError:  # not an entry, such as the lock file
                continue


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_same(path: Path, entry: FileEntry) -> bool:
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
    return size == entry.size and hash_file(path) == entry.sha256


def _list_files(directory: Path) -> None:
    """Write the list of a folder's files after flushing them: a full disk may show only then."""
    files = {}
    for path in sorted(directory.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
        files[path.name] = FileEntry(path.stat().st_size, hash_file(path))
    (directory / LIST_FILE).write_bytes(msgspec.json.encode(files))


def weights_folder(setting: str, num_engines: int, mounts_file: Path = MOUNTS_FILE) -> str:
    """Return the cache folder by the setting `weights_cache`; empty for none.

    `auto` is the temporary folder if it is not in memory and there are several engines; files take about four times the weights.
    """
    if setting == "off":
        return ""
    if setting != "auto":
        return setting
    folder = Path(tempfile.gettempdir()).resolve()
    return "" if num_engines == 1 or _is_in_memory(folder, mounts_file) else str(folder)


def _is_in_memory(folder: Path, mounts_file: Path) -> bool:
    """Return whether a folder's file system is in memory; True if unknown."""
    try:
        mounts = [line.split()[1:3] for line in mounts_file.read_text(encoding="utf-8", errors="replace").splitlines()]
    except OSError:
        return True
    kinds = {place.replace("\\040", " "): kind for place, kind in mounts}  # the last mount at a path counts
    kind = next((kinds[str(place)] for place in (folder, *folder.parents) if str(place) in kinds), "")
    return kind in ("", *MEMORY_FILE_SYSTEMS)
