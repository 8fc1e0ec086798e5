"""One file from a store, compared with the SHA-256 that it must have; gone on with after an interruption."""

import errno
import os
from collections.abc import Callable
from time import sleep
from typing import IO

from dragoman.export.bundle import BundleError, FileEntry
from dragoman.server.stores.cache import digest_of
from dragoman.server.stores.store import LEAST_BYTES, NotThereError, RangeError, SilentError, StoppedError, Store, StoreError, named

# Of attempts in a row by which next to nothing came.
MAX_ATTEMPTS = 4
FIRST_PAUSE_SECONDS = 0.2

Progress = Callable[[str, int, int], None]
"""Told the path of a file, how many of its bytes there are, and how many it will have."""


class Download:
    """Reads a file of a store into one of this machine, until that is what it must be."""

    def __init__(self, store: Store, path: str, entry: FileEntry, on_progress: Progress, is_stopped: Callable[[], bool]) -> None:
        """Take what is wanted.

        Args:
            store: Where it lies.
            path: As the store has it.
            entry: The size and the SHA-256 that it must have.
            on_progress: Called as it comes.
            is_stopped: Asked as it comes; the reading ends with `StoppedError` when it says so.
        """
        self._store, self._path, self._entry = store, path, entry
        self._on_progress, self._is_stopped = on_progress, is_stopped
        self._name = named(store, path)

    def fill(self, file: IO[bytes]) -> None:
        """Complete a file that holds nothing or a beginning.

        What is not what it must be is read once more from its beginning: the store's file may have changed between two pieces, or
        what was there may be the beginning of another.

        Args:
            file: Without a buffer.

        Raises:
            BundleError: If the store's file has another size or SHA-256; then the file is empty.
            StoreError: If it cannot be had, after some attempts of which none came further to speak of.
            OSError: If it cannot be written.
        """
        if self._complete(file) and (wrong := self._complete(file)):
            raise BundleError(f"{self._name}: {wrong}")

    def _complete(self, file: IO[bytes]) -> str:
        """Read what is missing; return what is wrong with the file, which is empty then, or nothing."""
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
                    break  # that is all that the store has
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
    """More came than there should be."""


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
            _empty(file)  # a full disk hurts others, too
        raise OSError(error.errno, os.strerror(error.errno or 0), str(file.name)) from error
