"""Files and batches of callers in OpenAI's shapes: a folder for each caller, below one that frontend processes share.

A name begins with the time of its creation, so that sorted names are in this order, and ends with 128 random bits. Beside a file
`ID` lies `ID.json`, without which it does not exist. Beside a batch `ID.json` lie, until it ends: `ID.input` (a hard link to its
input), `ID.log` (its answers so far) and `ID.cancel` (there once it is to be cancelled). Only the process that holds the lock
changes batches.
"""

import asyncio
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from dragoman.server.errors import ClientFault, NotPossible, QueueFull
from dragoman.server.service.callers import RETRY_SECONDS

T = TypeVar("T")

log = structlog.get_logger("dragoman.batches")

GIB = 2**30
# OpenAI's limits.
MAX_FILE_BYTES = 200 * 10**6
MAX_LINES = 50_000
KEPT_SECONDS = 30 * 86_400
WINDOW_SECONDS = 86_400
# Files of all callers, and of one; and batches of one, the oldest of which give way once they have ended.
MAX_FILES, MAX_FILES_PER_CALLER, MAX_BATCHES_PER_CALLER = 10_000, 1_000, 1_000
# Of the folder's bytes, where there are several callers.
PART_PER_CALLER = 1 / 4
# Left free for others on the disk; what a small file takes; and the age of an unfinished upload that nobody continues.
MIN_FREE_BYTES, BLOCK_BYTES, STALE_SECONDS = 64 * 2**20, 4096, 7200.0
# Longest hold of the interpreter lock by work on threads, and the pause after it.
SLICE_SECONDS, PAUSE_SECONDS = 0.002, 0.003
_ID = re.compile(r"(?:file-|batch_)[0-9a-f]{48}")
ENDED = ("completed", "failed", "expired", "cancelled")

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]


class NoSuchObject(ClientFault):
    """There is no such file or batch, or it is another caller's."""

    code = "NOT_FOUND"


class FileObject(Struct, frozen=True):
    """OpenAI's description of a file."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: str
    expires_at: int
    object: str = "file"
    status: str = "processed"


class BatchError(Struct, frozen=True):
    """A reason why a batch failed, or waits."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class Counts(Struct, frozen=True):
    """Requests of a batch."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class Batch(Struct, frozen=True, kw_only=True):
    """OpenAI's description of a batch, and from `owner` on what is ours."""

    id: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    expires_at: int
    object: str = "batch"
    status: Status = "validating"
    errors: Sequence[BatchError] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: Counts = Counts()
    usage: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    owner: str
    output_seconds: int = KEPT_SECONDS
    result_ids: tuple[str, str] = field(default_factory=lambda: (new_id("file-"), new_id("file-")))  # of output and errors

    @property
    def has_ended(self) -> bool:
        """Whether its status is final."""
        return self.status in ENDED


def new_id(prefix: str) -> str:
    """Return a new id, which nobody can guess."""
    return f"{prefix}{time.time_ns():016x}{secrets.token_hex(16)}"


class BatchStore:
    """The folder; its methods but `run` and `slices` block, and are for threads. They raise `OSError` without the folder."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self._folder, self._max_bytes = folder, max_bytes
        self._threads = ThreadPoolExecutor(4, thread_name_prefix="batches")

    def open(self) -> None:
        """Make the folder; raise `OSError` if it cannot be written to."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600))

    async def run(self, work: Callable[..., T], *arguments: object) -> T:
        """Do blocking work on a thread; a caller that is cancelled waits for its end."""
        future = asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *arguments))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            await asyncio.gather(future, return_exceptions=True)
            raise

    async def slices(self, items: Iterator[T]) -> AsyncIterator[list[T]]:
        """Yield the items of an iterator that works on a thread, with pauses for the event loop."""
        is_end = False
        while not is_end:
            taken, is_end = await self.run(_take, items)
            yield taken
            await asyncio.sleep(PAUSE_SECONDS)

    def lock(self) -> int | None:
        """Return the descriptor of the lock, to be closed; None if another process holds it."""
        descriptor = os.open(self._folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return descriptor

    def is_held(self, descriptor: int) -> bool:
        """Return whether a held lock is still that of the folder, which may have been replaced."""
        with suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(descriptor), os.stat(self._folder / "lock"))
        return False

    def check_room(self, owner: str, num_bytes: int = 0) -> None:
        """Raise `NotPossible` if the disk has no room, or files take more than they may."""
        num_all = num_own = 0
        own, seen = _digest(owner), set[int]()
        for folder in self._owners():
            for entry in os.scandir(folder):
                with suppress(FileNotFoundError):
                    status = entry.stat()
                    is_log = entry.name.endswith(".log")  # its content will be in the output, too
                    size = 0 if status.st_ino in seen else max(status.st_size * (1 + is_log), BLOCK_BYTES)
                    seen.add(status.st_ino)
                    num_all += size
                    num_own += size if folder.name == own else 0
        allowed = self._max_bytes if not owner else self._max_bytes * PART_PER_CALLER
        if num_own + num_bytes > allowed or num_all + num_bytes > self._max_bytes:
            whose = "the caller's" if num_own + num_bytes > allowed else "all callers'"
            raise NotPossible(f"file: there is no room for it; {whose} files have as many bytes as they may, delete some")
        if shutil.disk_usage(self._folder).free < num_bytes + MIN_FREE_BYTES:
            raise NotPossible("file: there is no room for it; the server's disk is full")

    def begin_file(self, owner: str, num_bytes: int) -> Path:
        """Return the path of a new file of the size that it may get, to be written and passed to `keep_file`; raise for no room.

        Raises:
            NotPossible: As `check_room`.
            QueueFull: If there are too many files.
        """
        folder = self._folder / _digest(owner)
        folder.mkdir(mode=0o700, exist_ok=True)
        counts = {each.name: sum(name.startswith("file-") for name in os.listdir(each)) // 2 for each in self._owners()}
        if counts[folder.name] >= MAX_FILES_PER_CALLER or sum(counts.values()) >= MAX_FILES:
            raise QueueFull("file: there are too many files, delete some", RETRY_SECONDS)
        path = folder / f"{new_id('file-')}.part"
        path.touch(0o600)
        os.truncate(path, num_bytes)  # counts from now on
        try:
            self.check_room(owner)
        except BaseException:
            path.unlink()
            raise
        return path

    def keep_file(self, part: Path, name: str, filename: str, purpose: str, seconds: int) -> FileObject:
        """Move a written file to its place, and describe it."""
        now = int(time.time())
        kept = FileObject(name, part.stat().st_size, now, filename, purpose, now + seconds)
        part.replace(part.parent / name)
        _write(part.parent / f"{name}.json", kept)
        return kept

    def find_file(self, owner: str, name: str) -> FileObject:
        """Return a file of a caller; raise `NoSuchObject`."""
        return self._find_file(self._path(owner, name, "file-"))

    def path_of(self, owner: str, name: str) -> Path:
        """Return the path of a file's content; raise `NoSuchObject`."""
        self.find_file(owner, name)
        return self._path(owner, name, "file-")

    def files(self, owner: str) -> list[FileObject]:
        """Return the files of a caller, oldest first."""
        found = []
        for path in self._described(owner, "file-"):
            with suppress(NoSuchObject):
                found.append(self._find_file(path))
        return found

    def delete_file(self, owner: str, name: str) -> None:
        """Delete a file of a caller; raise `NoSuchObject`. Batches that read it go on."""
        path = self._path(owner, name, "file-")
        self._find_file(path)
        _unlink(path.with_suffix(".json"), path)

    def add_batch(self, batch: Batch) -> None:
        """Keep a new batch; raise `NoSuchObject` without its input, `QueueFull` if too many are under way."""
        source = self.path_of(batch.owner, batch.input_file_id)
        names = [path.name for path in self._described(batch.owner, "batch_")]
        if len(names) >= MAX_BATCHES_PER_CALLER:
            oldest = next((path for name in names if _read(path := source.parent / name, Batch).has_ended), None)
            if oldest is None:
                raise QueueFull("batch: too many are under way", RETRY_SECONDS)
            _unlink(oldest)
        target = source.parent / f"{batch.id}.input"
        os.utime(source)  # or the link, until the batch is described, would be taken for what was left of another
        try:
            os.link(source, target)
        except FileNotFoundError:
            raise NoSuchObject(f"input_file_id: there is no file {batch.input_file_id}") from None
        except OSError:  # not every volume has links
            shutil.copyfile(source, target)
        self.write_batch(batch)

    def find_batch(self, owner: str, name: str) -> Batch:
        """Return a batch of a caller; raise `NoSuchObject`."""
        return self._find_batch(self._path(owner, name, "batch_"))

    def batches(self, owner: str, after: str, limit: int) -> tuple[list[Batch], bool]:
        """Return a page of a caller's batches, newest first, and whether there are more."""
        paths = [path for path in reversed(self._described(owner, "batch_")) if not after or path.stem < after]
        return [self._find_batch(path.with_suffix("")) for path in paths[:limit]], len(paths) > limit

    def cancel(self, owner: str, name: str) -> Batch:
        """Ask for the end of a batch and return it; raise `NotPossible` if it has ended."""
        path = self._path(owner, name, "batch_")
        if (batch := self._find_batch(path)).has_ended:
            raise NotPossible(f"batch: is {batch.status}")
        path.with_suffix(".cancel").touch()
        return self._find_batch(path)

    def open_batches(self) -> list[Batch]:
        """Return the batches that have not ended, oldest first; remove what is left of others."""
        found = []
        for path in (path for folder in self._owners() for path in folder.glob("batch_*.input")):
            try:
                batch = self._find_batch(path.with_suffix(""))
            except NoSuchObject:
                if _age(path) > STALE_SECONDS:
                    _unlink(path)
                continue
            except msgspec.MsgspecError as error:
                log.error("a batch cannot be read", path=str(path.with_suffix(".json")), reason=str(error))
                continue
            if batch.has_ended:
                self._close_batch(batch)
            else:
                found.append(batch)
        return sorted(found, key=lambda batch: batch.id)

    def part_of(self, batch: Batch, suffix: str) -> Path:
        """Return the path of a batch's `.input`, `.log` or `.cancel`, or of a part of its output."""
        return self._folder / _digest(batch.owner) / f"{batch.id}{suffix}"

    def write_batch(self, batch: Batch) -> None:
        """Replace the description of a batch; one that has ended keeps nothing but its results."""
        _write(self.part_of(batch, ".json"), batch)
        if batch.has_ended:
            self._close_batch(batch)

    def purge(self) -> None:
        """Remove expired files, old batches, and what was left of uploads and batches that nobody continues."""
        for path in (path for folder in self._owners() for path in folder.iterdir()):
            is_file = path.name.startswith("file-")
            if is_file and path.suffix == ".json":
                with suppress(NoSuchObject, msgspec.MsgspecError):
                    if _read(path, FileObject).expires_at < time.time():
                        _unlink(path, path.with_suffix(""))
                continue
            seconds = KEPT_SECONDS if path.suffix == ".json" else STALE_SECONDS
            has_owner = path.with_suffix(".json" if is_file and not path.suffix else ".input").exists()
            if _age(path) > seconds and not has_owner:
                _unlink(path)

    def _close_batch(self, batch: Batch) -> None:
        _unlink(*(self.part_of(batch, suffix) for suffix in (".log", ".cancel", ".input")))

    def _owners(self) -> list[Path]:
        return [Path(entry.path) for entry in os.scandir(self._folder) if entry.is_dir()]

    def _path(self, owner: str, name: str, prefix: str) -> Path:
        if _ID.fullmatch(name) is None or not name.startswith(prefix):
            raise NoSuchObject(f"{prefix[:-1]}: there is none of this id")
        return self._folder / _digest(owner) / name

    def _described(self, owner: str, prefix: str) -> list[Path]:
        """Return the paths of descriptions, oldest first."""
        folder = self._folder / _digest(owner)
        names = os.listdir(folder) if folder in self._owners() else []
        return [folder / name for name in sorted(names) if name.startswith(prefix) and name.endswith(".json")]

    def _find_file(self, path: Path) -> FileObject:
        found = _read(path.with_suffix(".json"), FileObject)
        if found.expires_at < time.time():
            raise NoSuchObject("file: has expired")
        return found

    def _find_batch(self, path: Path) -> Batch:
        batch = _read(path.with_suffix(".json"), Batch)
        if not batch.has_ended:
            with suppress(FileNotFoundError):
                at = int(path.with_suffix(".cancel").stat().st_mtime)
                return replace(batch, status="cancelling", cancelling_at=at)
        return batch


def _digest(owner: str) -> str:
    return hashlib.sha256(owner.encode()).hexdigest()[:32]


def _take(items: Iterator[T]) -> tuple[list[T], bool]:
    """Take items for one slice of time; return whether they have ended."""
    end, taken = time.perf_counter() + SLICE_SECONDS, list[T]()
    for item in items:
        taken.append(item)
        if time.perf_counter() > end:
            return taken, False
    return taken, True


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except FileNotFoundError:
        path.parent.parent.stat()  # raises without the folder of all
        raise NoSuchObject(f"{path.name.partition('_')[0].partition('-')[0]}: there is none of this id") from None


def _write(path: Path, content: Struct) -> None:
    """Write a description, whole or not at all."""
    part = path.with_suffix(".new")
    with part.open("wb") as file:
        file.write(msgspec.json.encode(content))
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _unlink(*paths: Path) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


def _age(path: Path) -> float:
    with suppress(FileNotFoundError):
        return time.time() - path.stat().st_mtime
    return 0.0
