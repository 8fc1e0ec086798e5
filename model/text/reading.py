"""A tokeniser's files, read within bounds."""

from pathlib import Path

from dragoman.model.files import read_bounded
from dragoman.model.text.tokenizer import TokenizerError

MAX_FILE_BYTES = 1 << 26

_MAX_REASON_CHARACTERS = 200


def read(path: Path) -> bytes:
    """Return what a tokeniser's file holds.

    Raises:
        TokenizerError: Naming the file, if it cannot be read, is no regular file, or holds more than `MAX_FILE_BYTES`.
    """
    try:
        return read_bounded(path, MAX_FILE_BYTES)
    except OSError as error:
        reason = "no such file" if isinstance(error, FileNotFoundError) else error.strerror
        raise TokenizerError(f"{path}: {reason}") from error


def reason(error: BaseException) -> str:
    """Return in one printable line what a library says against a file; it may quote the file."""
    return " ".join(ascii(str(error))[1:-1].split())[:_MAX_REASON_CHARACTERS]
