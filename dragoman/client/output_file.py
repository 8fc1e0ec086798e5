"""A file that is there whole or not at all."""

import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from dragoman.model.errors import InputError


@contextmanager
def replacing(path: Path) -> Iterator[TextIO]:
    """Write a UTF-8 file beside `path`, which it replaces when the block ends well; if not, nothing of it stays.

    Raises:
        InputError: If it cannot be written there; a directory or a device is never replaced.
    """
    temporary = None
    try:
        target = path.resolve()
        if target.exists() and not target.is_file():
            raise InputError(f"{path}: not a regular file")
        temporary = target.with_name(f".{target.name[:100]}.{uuid.uuid4().hex}.tmp")
        with temporary.open("x", encoding="utf-8", newline="\n") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    finally:
        if temporary is not None:
            temporary.unlink(missing_ok=True)
