"""Text to translate, one source a line: read whole from a file, or from a stream as it comes."""

import os
import select
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from dragoman.client.ordered import PAUSE, Pause
from dragoman.model.errors import InputError

_CHUNK_BYTES = 1 << 16


class LineFile:
    """The lines of a file, all of them known to be UTF-8 before the first is used; only a line feed ends a line.

    Args:
        path: File to read.

    Raises:
        InputError: If the file cannot be read, or is not UTF-8 (with the line number).
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        try:
            self._content = path.read_bytes()
        except OSError as error:
            raise InputError(f"{path}: {error.strerror or error}") from error
        for _ in self:
            pass

    def __len__(self) -> int:
        return self._content.count(b"\n") + (self._content[-1:] not in (b"", b"\n"))

    def __iter__(self) -> Iterator[str]:
        for number, line in enumerate(BytesIO(self._content), start=1):
            yield decode_line(line, self.name, number)

    def endings(self) -> Iterator[str]:
        """Yield what ends each line: a line feed, or a carriage return and one."""
        for line in BytesIO(self._content):
            yield "\r\n" if line.endswith(b"\r\n") else "\n"


def stream_lines(stream: BinaryIO, name: str) -> Iterator[str | Pause]:
    """Yield the lines of a stream as they come, and `PAUSE` where the next is not there yet.

    Args:
        stream: Where to read; nothing else may read from it.
        name: What to call it in messages.

    Raises:
        InputError: If a line is not UTF-8, with its number.
    """
    number = 0
    rest = b""
    while True:
        if not _has_data(stream):
            yield PAUSE
        chunk = os.read(stream.fileno(), _CHUNK_BYTES) if _has_descriptor(stream) else stream.read(_CHUNK_BYTES)
        *lines, rest = (rest + chunk).split(b"\n")
        if not chunk and rest:
            lines, rest = [rest], b""
        for line in lines:
            number += 1
            yield decode_line(line, name, number)
        if not chunk:
            return


def decode_line(line: bytes, name: str, number: int) -> str:
    """Decode a line without its end, the first without a byte order mark; raises `InputError` naming it if it is not UTF-8."""
    try:
        return line.removesuffix(b"\n").removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        raise InputError(f"{name}, line {number}: not UTF-8: {error.reason} at byte {error.start}") from error


def _has_descriptor(stream: BinaryIO) -> bool:
    try:
        stream.fileno()
    except OSError:  # in memory
        return False
    return True


def _has_data(stream: BinaryIO) -> bool:
    """Tell whether reading would not block; a stream that cannot say counts as one that would."""
    if not _has_descriptor(stream):
        return True
    try:
        return bool(select.select([stream], [], [], 0)[0])
    except (OSError, ValueError):
        return False
