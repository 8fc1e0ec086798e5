"""A file on its way, and a disk that is full."""

import errno
import hashlib
import io
import os
from pathlib import Path
from typing import Any

import pytest

from dragoman.export.bundle import FileEntry
from dragoman.server.stores.download import Download
from dragoman.server.stores.folder import FolderStore
from dragoman.server.stores.puller import never, say_nothing

CONTENT = b"x" * 1000


class FullAt(io.BytesIO):
    """A file on a disk that is full after so many bytes."""

    name = "partial/abc"

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size

    def write(self, piece: Any) -> int:
        if (room := self._size - self.tell()) <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(piece[:room])


def test_a_disk_that_fills_up_is_given_its_room_back(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(CONTENT)
    entry = FileEntry(len(CONTENT), hashlib.sha256(CONTENT).hexdigest())
    file = FullAt(700)
    with pytest.raises(OSError, match=r"No space left on device: 'partial/abc'"):
        Download(FolderStore(tmp_path), "file", entry, say_nothing, never).fill(file)
    assert file.getvalue() == b""
