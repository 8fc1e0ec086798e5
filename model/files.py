"""Files that appear whole or not at all, so that a kill at any moment leaves the old one or the new; files read within bounds."""

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from dragoman.model.errors import InputError


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """Lend a name beside `path` to write to; it takes the place of `path` when the block ends without an error.

    It gets the access rights of any new file, whatever the writer gives it (that of safetensors lets only the owner read).
    """
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    temporary.touch()
    rights = temporary.stat().st_mode
    yield temporary
    temporary.chmod(rights)
    os.replace(temporary, path)


def write_text(path: Path, text: str) -> None:
    """Write a UTF-8 text file."""
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8", newline="\n")


def refuse_unwritable(path: Path, is_folder: bool = False) -> None:
    """Refuse a file or a folder that cannot be written, before the work is done that it is for.

    A file's folder must be there; a folder is made, with those above it.

    Raises:
        InputError: Naming what is in the way.
    """
    if is_folder:
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
    elif path.is_dir():
        raise InputError(f"{path}: is a directory")
    else:
        existing = path if path.exists() else path.absolute().parent
    if not existing.exists():
        raise InputError(f"{path}: there is no directory {existing}")
    if (is_folder or existing != path) and not existing.is_dir():
        raise InputError(f"{path}: {'not' if existing == path else f'{existing} is not'} a directory")
    if not os.access(existing, os.W_OK):
        raise InputError(f"{path}: permission denied")


def leads_out(path: Path, folder: Path) -> bool:
    """Return whether a path below a folder, followed through all links, is one outside it."""
    # Not Path.resolve, which raises an error of its own for links that lead in a circle.
    outside = os.path.realpath(folder)
    return os.path.commonpath((outside, os.path.realpath(path))) != outside


def open_regular(path: Path) -> BinaryIO:
    """Open a file that somebody else has put there; a pipe or a device, which might never end or keep us waiting, is refused.

    Raises:
        OSError: If it cannot be opened or is no regular file.
    """
    # Before it is opened, which has effects on some devices, and after, as it may be another one by then.
    _refuse_irregular(os.stat(path), path)
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _refuse_irregular(os.fstat(descriptor), path)
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise


def read_bounded(path: Path, max_bytes: int) -> bytes:
    """Return what a regular file holds.

    Raises:
        OSError: If it cannot be read, is no regular file, or holds more.
    """
    with open_regular(path) as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"more than {max_bytes} bytes", str(path))
    return content


def read_given(path: Path, max_bytes: int, refused: type[InputError]) -> bytes:
    """Return what a regular file holds, as `read_bounded`; raise the error given, which names the file, where that raises."""
    try:
        return read_bounded(path, max_bytes)
    except OSError as error:
        raise refused(f"{path}: {error.strerror}") from error


def _refuse_irregular(status: os.stat_result, path: Path) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def put_directory(directory: Path, output: Path, replaced: Path) -> None:
    """Move a finished directory to its place; one that was there is moved away first, and back if that fails.

    A name that holds a directory cannot be given another in one call, so a reader may find nothing for an instant, never a half.

    Args:
        directory: What is to be moved, on the same file system.
        output: Where to.
        replaced: Where one that is there is moved to.
    """
    if not output.exists() or not any(output.iterdir()):
        os.rename(directory, output)
        return
    os.rename(output, replaced)
    try:
        os.rename(directory, output)
    except BaseException:
        os.rename(replaced, output)
        raise
