"""Download cache on disk, by SHA-256 and bounded in size; each file is downloaded once, by one process at a time.

    objects/ab/abcd…    complete files, checked on arrival and on each use
    partial/abcd…       incomplete files, locked by their writer
    held/…              files needed by running pulls, one each, locked for the pull's lifetime

A pull registers its files first (`hold`); unregistered files are evicted to make room, least recently used first. A killed process
loses its locks and its registration; its partial downloads stay and are continued.
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
from dragoman.server.stores.store import LEAST_BYTES, NotThereError, RangeError, SilentError, StoppedError, Store, StoreError, named

DEFAULT_GIB: Final = 20.0
_GIB: Final = 1 << 30
_MAX_HELD_BYTES: Final = 1 << 20
_PIECE_BYTES: Final = 1 << 20
_POLL_SECONDS: Final = 0.1

# Appends the missing part of a file.
Fill = Callable[[IO[bytes]], None]


@dataclass(frozen=True, slots=True)
class _Kept:
    """A complete or partial file in the cache."""

    path: Path
    digest: str
    size: int
    used: int


class Cache:
    """Files by SHA-256, in a folder shared by processes."""

    def __init__(self, directory: Path, max_gib: float = DEFAULT_GIB) -> None:
        """Use a folder, created on demand, of at most `max_gib` including partial files."""
        self.directory = directory
        self.max_bytes = int(max_gib * _GIB)

    @contextlib.contextmanager
    def hold(self, files: Mapping[str, FileEntry], name: str) -> Iterator[None]:
        """Keep a bundle's files in the cache within the `with`, and make room for missing ones.

        Raises `BundleError` if they exceed the cache's limit with those of other pulls, `OSError` for an unusable folder or full
        disk.
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
        """Return a file if present and undamaged; remove a damaged one."""
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
        """Return a file, completed by `fill` or by another process, while `is_stopped` is polled.

        `fill` completes an empty or partial file, or raises; the part written is kept.
        """
        while (path := self.find(entry)) is None:
            partial = self.directory / "partial" / entry.sha256
            with partial.open("a+b", buffering=0) as file:
                if _try_lock(file):
                    if _is_at(file, partial):
                        fill(file)
                        return self._complete(file, partial, entry)
                    continue  # completed by another process
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
        """Evict files until the held ones fit."""
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
        """Raise if the disk is too full: retries would fill it repeatedly, and other programs write to it, too."""
        here: dict[str, int] = {}
        for kept in self._kept():
            here[kept.digest] = max(kept.size, here.get(kept.digest, 0))
        missing = sum(max(size - here.get(digest, 0), 0) for digest, size in wanted.items())
        if missing > shutil.disk_usage(self.directory).free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.directory))

    def _held(self, own: Path) -> dict[str, int]:
        """Return the files of other pulls; remove marks of dead pulls."""
        held: dict[str, int] = {}
        for path in (self.directory / "held").iterdir():
            if path == own:
                continue
            try:
                with open_regular(path) as mark:
                    fcntl.flock(mark, fcntl.LOCK_SH | fcntl.LOCK_NB)
                path.unlink(missing_ok=True)
            except BlockingIOError:
                with contextlib.suppress(OSError, ValueError):  # just removed by its owner
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
    """Hard-link or copy a checked cache file to a second path."""
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
    """Return the SHA-256 object of a file from its position on."""
    digest = hashlib.sha256()
    while piece := file.read(_PIECE_BYTES):
        digest.update(piece)
    return digest


def _mark_used(path: Path) -> None:
    """Set the access time only; an unchanged modification time shows that the file is the same."""
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


# Consecutive attempts with hardly any progress.
MAX_ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.2

# Called with a file's path, its bytes so far, and its size.
Progress = Callable[[str, int, int], None]


class Download:
    """Download of a file, continued after interruptions until size and SHA-256 match."""

    def __init__(self, store: Store, path: str, entry: FileEntry, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Prepare a download; `is_stopped` is polled while reading, which then raises `StoppedError`."""
        self._store, self._path, self._entry = store, path, entry
        self._on_progress, self._is_stopped = on_progress, is_stopped
        self._name = named(store, path)

    def fill(self, file: IO[bytes]) -> None:
        """Complete an empty or partial file, opened unbuffered.

        A wrong file is read once more from its beginning: the store's file may have changed, or the partial file was of another.

        Raises:
            BundleError: If the store's file has another size or SHA-256; the local file is then empty.
            StoreError: If reading fails, after several attempts without progress.
            OSError: If writing fails.
        """
        if self._complete(file) and (wrong := self._complete(file)):
            raise BundleError(f"{self._name}: {wrong}")

    def _complete(self, file: IO[bytes]) -> str:
        """Read the missing part; on a mismatch empty the file and return the reason, else an empty string."""
        file.seek(0)
        digest = digest_of(file)
        size = file.tell()
        wrong = f"more than the {self._entry.size} bytes that there should be"

        def take(piece: bytes) -> None:
            nonlocal size
            if self._is_stopped():
                raise StoppedError(f"{self._name}: stopped")
            if size + len(piece) > self._entry.size:
                raise _TooLongError
            _write(file, piece)
            digest.update(piece)
            size += len(piece)
            self._on_progress(self._path, size, self._entry.size)

        self._on_progress(self._path, size, self._entry.size)
        pause, num_attempts = FIRST_PAUSE_SECONDS, 0
        try:
            while size < self._entry.size:
                before = size
                try:
                    self._store.read(self._path, before, take)
                    break  # the end of the store's file
                except (NotThereError, SilentError, StoppedError):
                    raise
                except RangeError:
                    if before == 0:
                        raise
                    break
                except StoreError:
                    if size - before >= LEAST_BYTES:
                        pause, num_attempts = FIRST_PAUSE_SECONDS, 0
                        continue
                    num_attempts += 1
                    if num_attempts == MAX_ATTEMPTS:
                        raise
                    sleep(pause)
                    pause *= 2
            found = digest.hexdigest()
            if size != self._entry.size:
                wrong = f"{size} bytes, but there should be {self._entry.size}"
            elif found != self._entry.sha256:
                wrong = f"SHA-256 {found}, but it should be {self._entry.sha256}"
            else:
                return ""
        except _TooLongError:
            pass
        _empty(file)
        return wrong


class _TooLongError(Exception):
    """The store's file is too long."""


def _empty(file: IO[bytes]) -> None:
    file.seek(0)
    file.truncate()


def _write(file: IO[bytes], piece: bytes) -> None:
    rest = memoryview(piece)
    try:
        while rest:
            rest = rest[file.write(rest) :]
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            _empty(file)  # free the disk for others
        raise OSError(error.errno, os.strerror(error.errno or 0), str(file.name)) from error
