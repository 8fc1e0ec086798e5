"""Files on disk by their SHA-256, within a bound: what was read once from a store is not read again, nor twice at the same time.

    objects/ab/abcd…    whole files, checked when they came and again whenever they are used
    partial/abcd…       what has come of others; whoever writes one holds its lock
    held/…              what pulls under way need, a file each, locked by the pull for as long as it lives

Whoever needs a file says so first (`hold`); what nobody holds makes room, least recently used first. A process that is killed loses
its locks, and with them what it held; what it had read of a file stays, and is gone on with.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from time import sleep, time_ns
from typing import IO, Final

from dragoman.export.bundle import BundleError, FileEntry
from dragoman.model.files import open_regular, read_bounded
from dragoman.server.stores.store import StoppedError

DEFAULT_GIB: Final = 20.0
_GIB: Final = 1 << 30
_MAX_HELD_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 20
_POLL_SECONDS: Final = 0.1

# Writes what a file lacks behind what it has.
Fill = Callable[[IO[bytes]], None]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A file of the cache, whole or in part."""

    path: Path
    digest: str
    size: int
    used: int


class Cache:
    """A folder of files by their SHA-256."""

    def __init__(self, directory: Path, max_gib: float = DEFAULT_GIB) -> None:
        """Use a folder, which is made when it is needed.

        Args:
            directory: Several processes may use the same.
            max_gib: How much it may hold, files that are still coming included.
        """
        self.directory = directory
        self.max_bytes = int(max_gib * _GIB)

    @contextlib.contextmanager
    def hold(self, files: Mapping[str, FileEntry], name: str) -> Iterator[None]:
        """Keep the files of a bundle in the cache, and make room for those that are not there.

        Args:
            files: By any name.
            name: Of the bundle, for messages.

        Raises:
            BundleError: If they are more than the cache may hold, now or at all.
            OSError: If the folder cannot be used, or its disk has no room for what is missing.
        """
        wanted = {entry.sha256: entry.size for entry in files.values()}
        if (total := sum(wanted.values())) > self.max_bytes:
            raise BundleError(f"{name}: has {total} bytes, and {self._bound()}")
        for folder in ("objects", "partial", "held"):
            (self.directory / folder).mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            with self._locked():
                mark = stack.enter_context(tempfile.NamedTemporaryFile(dir=self.directory / "held"))
                fcntl.flock(mark, fcntl.LOCK_EX)
                self._make_room(wanted, Path(mark.name), name)
                self._refuse_full_disk(wanted)
                mark.write(json.dumps(wanted).encode())
                mark.flush()
            yield

    def find(self, entry: FileEntry) -> Path | None:
        """Return a file that is here, read and compared; one that is damaged is removed."""
        path = self._object(entry.sha256)
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
                if size == entry.size and digest_of(file).hexdigest() == entry.sha256:
                    _mark_used(path)
                    return path
        except OSError:
            return None
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
        return None

    def obtain(self, entry: FileEntry, fill: Fill, is_stopped: Callable[[], bool]) -> Path:
        """Return a file, which is made with `fill` if it is not here, or by another who is doing so.

        Args:
            entry: Its size and SHA-256.
            fill: Completes the file, which may have a beginning already, and leaves it with this size and SHA-256 or raises an
                error; what it has written by then is kept for the next time.
            is_stopped: Asked while another makes it.

        Raises:
            OSError: If the file cannot be written.
        """
        while (path := self.find(entry)) is None:
            partial = self.directory / "partial" / entry.sha256
            with partial.open("a+b", buffering=0) as file:
                if _try_lock(file):
                    if _is_at(file, partial):
                        fill(file)
                        return self._complete(file, partial, entry)
                    continue  # it has been completed meanwhile
            if is_stopped():
                raise StoppedError(f"{partial}: stopped while another pull reads it")
            sleep(_POLL_SECONDS)
        return path

    def _complete(self, file: IO[bytes], partial: Path, entry: FileEntry) -> Path:
        os.fsync(file.fileno())
        os.fchmod(file.fileno(), 0o444)
        path = self._object(entry.sha256)
        path.parent.mkdir(exist_ok=True)
        os.rename(partial, path)
        return path

    def _object(self, digest: str) -> Path:
        return self.directory / "objects" / digest[:2] / digest

    def _bound(self) -> str:
        return f"the cache in {self.directory} may hold {self.max_bytes}"

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        with (self.directory / "lock").open("wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _make_room(self, wanted: Mapping[str, int], own: Path, name: str) -> None:
        """Remove files until what is held fits in beside the rest."""
        others = self._held(own)
        held = {**others, **wanted}
        if (total := sum(held.values())) > self.max_bytes:
            raise BundleError(
                f"{name}: {self._bound()} bytes, of which other pulls need {sum(others.values())}; try again after them"
            )
        free = sorted((kept for kept in self._kept() if kept.digest not in held), key=lambda kept: kept.used)
        excess = total + sum(kept.size for kept in free) - self.max_bytes
        for kept in free:
            if excess <= 0:
                return
            with contextlib.suppress(FileNotFoundError):
                kept.path.unlink()
            excess -= kept.size

    def _refuse_full_disk(self, wanted: Mapping[str, int]) -> None:
        """Leave a disk alone that has no room: who tries again and again would fill it as often, and others write there, too."""
        here: dict[str, int] = {}
        for kept in self._kept():
            here[kept.digest] = max(kept.size, here.get(kept.digest, 0))
        missing = sum(max(size - here.get(digest, 0), 0) for digest, size in wanted.items())
        if missing > shutil.disk_usage(self.directory).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))

    def _held(self, own: Path) -> dict[str, int]:
        """Return what other pulls need; marks that nobody holds are removed."""
        held: dict[str, int] = {}
        for path in (self.directory / "held").iterdir():
            if path == own:
                continue
            try:
                with open_regular(path) as mark:
                    fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                with contextlib.suppress(OSError, ValueError):  # it is about to say what it needs, and waits for our lock
                    held.update(json.loads(read_bounded(path, _MAX_HELD_BYTES)))
            except FileNotFoundError:
                pass
        return held

    def _kept(self) -> Iterator[_Kept]:
        for path in (*(self.directory / "objects").glob("*/*"), *(self.directory / "partial").iterdir()):
            with contextlib.suppress(FileNotFoundError):
                found = path.stat()
                yield _Kept(path, path.name, found.st_size, found.st_atime_ns)


def put(source: Path, target: Path) -> None:
    """Give a checked file of a cache a second place: the same file where that can be, otherwise a copy on disk.

    Raises:
        OSError: If it cannot be written.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        os.link(source, target)
        return
    except OSError:
        target.unlink(missing_ok=True)
    shutil.copyfile(source, target)
    descriptor = os.open(target, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def digest_of(file: IO[bytes]) -> "hashlib._Hash":
    """Return the SHA-256 of a file from where it stands, to be gone on with."""
    digest = hashlib.sha256()
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return digest


def _mark_used(path: Path) -> None:
    """Set when it was read; when it was written stays, which tells others that it is the same file."""
    with contextlib.suppress(OSError):
        found = path.stat()
        os.utime(path, ns=(max(found.st_atime_ns + 1, time_ns()), found.st_mtime_ns))


def _try_lock(file: IO[bytes]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(file: IO[bytes], path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
