"""Output files written line by line: they appear whole or not at all, and an interrupted run can be resumed."""

import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dragoman.client.lines import LineFile
from dragoman.model.errors import InputError

if sys.platform != "win32":
    import fcntl

_FORMAT_VERSION = 1
_FLAGS: int = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
# Of the name's bytes, so that with the endings it is no longer than names may be.
_MAX_NAME_BYTES = 200


@dataclass(frozen=True, slots=True)
class Done:
    """A finished line: the digest of its source, and the bytes of the output up to its end."""

    digest: str
    end: int


class OutputFile:
    """Output written line by line to `NAME.partial` beside it, which becomes the file when the block ends well.

    If it does not, `NAME.partial` stays, with its origin in `NAME.partial.state`, and the error gets a note about it. Nothing stays
    where nothing was done. Each line is on disk before the next, so a killed process leaves the same.

    Args:
        path: File to write or replace; a link is followed. A directory or a device is never replaced.
        sources: Its source lines.
        options: Options that it depends on, by flag; plain JSON.
        is_resumed: Continue with the output of an earlier run, if there is some; without it, that is an error.

    Raises:
        InputError: If it cannot be written, another process writes it, or an earlier run had other lines or options.
    """

    def __init__(self, path: Path, sources: LineFile, options: Mapping[str, Any], is_resumed: bool = False) -> None:
        self._path = path
        self._sources = sources
        self._options = dict(options)
        self._is_resumed = is_resumed
        self._target = path.resolve() if path.is_symlink() else path
        name = os.fsencode(self._target.name)[:_MAX_NAME_BYTES].decode(errors="ignore")
        self._partial = self._target.with_name(f"{name}.partial")
        self._state = self._target.with_name(f"{name}.partial.state")
        self._descriptors: list[int] = []
        self._end = 0
        self.num_done = 0

    def __enter__(self) -> Self:
        try:
            if self._target.exists() and not self._target.is_file():
                raise InputError(f"{self._path}: not a regular file")
            self._descriptors.append(self._open_partial())
            self._begin()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                name = self._path if isinstance(error, FileNotFoundError) else error.filename or self._path
                raise InputError(f"{name}: {error.strerror or error}") from error
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if error is None:
                self._finish()
            elif self.num_done:
                os.ftruncate(self._descriptors[0], self._end)
                error.add_note(self._note())
            else:
                self._partial.unlink(missing_ok=True)
                self._state.unlink(missing_ok=True)
        finally:
            self._close()

    def write(self, source: str, text: str) -> None:
        """Add the output for the next line: any number of whole lines."""
        try:
            content = text.encode()
            _write(self._descriptors[0], content)
            _write(self._descriptors[1], f"{_digest(source)} {self._end + len(content)}\n".encode())
        except OSError as error:
            raise InputError(f"{self._partial}: {error.strerror or error}") from error
        self._end += len(content)
        self.num_done += 1

    def _open_partial(self) -> int:
        """Open the file beside and lock it, so that no other process writes it too."""
        while True:
            descriptor = os.open(self._partial, os.O_RDWR | os.O_CREAT | _FLAGS, 0o666)
            try:
                status = os.fstat(descriptor)
                if not stat.S_ISREG(status.st_mode):
                    raise InputError(f"{self._partial}: not a regular file")
                _lock(descriptor)
                # The process that had it locked may have finished and renamed it meanwhile.
                if self._partial.exists() and os.path.samestat(status, self._partial.stat()):
                    return descriptor
            except BlockingIOError as error:
                os.close(descriptor)
                raise InputError(f"{self._partial}: another process is writing it") from error
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)

    def _begin(self) -> None:
        """Read the earlier run's state, and prepare both files for more lines."""
        done = self._read_state() if os.fstat(self._descriptors[0]).st_size else []
        if done and not self._is_resumed:
            left = f"{len(done)} lines of an earlier run are left there"
            raise InputError(f"{self._partial}: {left}; --resume goes on with them, or remove the file")
        self.num_done, self._end = len(done), done[-1].end if done else 0
        os.ftruncate(self._descriptors[0], self._end)
        os.lseek(self._descriptors[0], 0, os.SEEK_END)
        head = {"format_version": _FORMAT_VERSION, "output": self._target.name, "options": self._options}
        lines = [json.dumps(head), *(f"{line.digest} {line.end}" for line in done)]
        content = "".join(f"{line}\n" for line in lines).encode()
        self._descriptors.append(os.open(self._state, os.O_WRONLY | os.O_CREAT | _FLAGS, 0o666))
        _write(self._descriptors[1], content)  # the same content where a run is resumed
        os.ftruncate(self._descriptors[1], len(content))

    def _read_state(self) -> list[Done]:
        """Return the finished lines; raises `InputError` if they are of other sources or options, or that is not known."""
        try:
            head, *lines = self._state.read_bytes().decode("ascii").split("\n")
            description = json.loads(head)
            if (description["format_version"], description["output"]) != (_FORMAT_VERSION, self._target.name):
                raise ValueError("of another file")
            options = dict(description["options"])
        except (OSError, ValueError, TypeError, KeyError) as error:
            unknown = f"what it was made of is not known, for {self._state} is missing or damaged"
            raise InputError(f"{self._partial}: {unknown}; remove it to start again") from error
        done = list(_read_done(lines[:-1], os.fstat(self._descriptors[0]).st_size))
        if self._is_resumed and done:
            self._check_options(options)
            self._check_sources(done)
        return done

    def _check_options(self, options: Mapping[str, Any]) -> None:
        for flag in sorted({*options, *self._options}):
            was, wanted = options.get(flag), self._options.get(flag)
            if was != wanted and (_is_set(was) or _is_set(wanted)):
                given = f"{flag}: {_shown(wanted)}" if _is_set(wanted) else f"{flag}: is not given"
                made = f"with {_shown(was)}" if _is_set(was) else "without it"
                raise InputError(f"{given}, but what is done, in {self._partial}, was made {made}")

    def _check_sources(self, done: list[Done]) -> None:
        if len(done) > len(self._sources):
            raise InputError(f"{self._sources.name}: {len(self._sources)} lines, but {len(done)} are done, in {self._partial}")
        for number, (line, source) in enumerate(zip(done, self._sources, strict=False), start=1):
            if line.digest != _digest(source):
                changed = f"not the line that was there when {self._partial} was made"
                raise InputError(f"{self._sources.name}, line {number}: {changed}; remove that file to start again")

    def _finish(self) -> None:
        try:
            os.fsync(self._descriptors[0])
            self._partial.replace(self._target)
            self._state.unlink(missing_ok=True)
        except OSError as error:
            refusal = InputError(f"{self._path}: {error.strerror or error}")
            refusal.add_note(self._note())
            raise refusal from error

    def _note(self) -> str:
        return f"{self.num_done} of {len(self._sources)} lines are done, in {self._partial}; --resume goes on from there"

    def _close(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())


def _lock(descriptor: int) -> None:
    """Lock a file; raises `BlockingIOError` where another process has. Some network file systems cannot, and go without."""
    if sys.platform != "win32":
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:
            return


def _digest(line: str) -> str:
    return hashlib.sha256(line.encode()).hexdigest()[:16]


def _read_done(lines: list[str], num_bytes: int) -> Iterator[Done]:
    """Yield the finished lines, up to the first invalid one: a write that was cut short."""
    end = 0
    for line in lines:
        digest, _, number = line.partition(" ")
        if not (number.isdecimal() and end <= int(number) <= num_bytes):
            return
        end = int(number)
        yield Done(digest, end)


def _is_set(value: object) -> bool:
    return value is not None and value is not False and value != ""


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _write(descriptor: int, content: bytes) -> None:
    """Write all of it; a write may take a part."""
    while content:
        content = content[os.write(descriptor, content) :]
