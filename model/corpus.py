"""Text on disk, one sentence a line, read with errors that name file and line. No torch, so that the client's side can use it."""

import gzip
import zlib
from collections.abc import Iterable
from pathlib import Path

from dragoman.model.errors import InputError
from dragoman.model.files import replaced


class DataError(InputError):
    """Text that cannot be used; the message names the file and, where there is one, the line."""


def read_lines(path: Path) -> list[str]:
    """Read a text file, one sentence a line, gunzipping `.gz`; only a line feed ends a line (a carriage return before it goes).

    A byte order mark is left out.

    Raises:
        DataError: If the file is missing, empty, not gzip though called so, or not UTF-8 (with the line number).
    """
    try:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:  # gzip's own error is an OSError too
        raise DataError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if not content:
        raise DataError(f"{path}: the file is empty")
    lines = []
    for number, line in enumerate(content.removesuffix(b"\n").split(b"\n"), start=1):
        try:
            lines.append(line.removesuffix(b"\r").decode("utf-8-sig" if number == 1 else "utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{path}, line {number}: not UTF-8: {error.reason} at byte {error.start}") from error
    return lines


def write_lines(path: Path, lines: Iterable[str]) -> None:
    """Write what `read_lines` reads, gzipped where the name ends in `.gz`; the same lines give the same bytes."""
    content = "".join(f"{line}\n" for line in lines).encode()
    with replaced(path) as temporary:
        temporary.write_bytes(gzip.compress(content, mtime=0) if path.suffix == ".gz" else content)


def read_texts(path: Path) -> list[str]:
    """Read a file of texts.

    Raises:
        DataError: As `read_lines`, or if a line is blank (with its number).
    """
    return _refuse_blank(path, read_lines(path))


def read_parallel(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Read two files whose lines correspond.

    Raises:
        DataError: As `read_lines`, or if the line counts differ, or a line is blank on one side (with its number).
    """
    sources, targets = read_lines(source), read_lines(target)
    if len(sources) != len(targets):
        raise DataError(f"{source} has {len(sources)} lines but {target} has {len(targets)}")
    return _refuse_blank(source, sources), _refuse_blank(target, targets)


def _refuse_blank(path: Path, lines: list[str]) -> list[str]:
    """Return a file's lines as they are."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            raise DataError(f"{path}, line {number}: the line is blank")
    return lines
