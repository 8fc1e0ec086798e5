"""Files that appear whole or not at all, so that a kill at any moment leaves the old one or the new one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


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
