"""Files that a front end is handed: it reads what the process that started it has found good, and not what lies in them meanwhile.

So a front end that is started again while a file is damaged has what the others have. Their content is kept in memory that can be
opened like a file, and that nobody else can name.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from dragoman.model.files import read_bounded
from dragoman.server.config import ServerConfig

# Settings whose files are handed on.
SETTINGS = ("tls_certificate", "tls_key", "tls_client_ca", "auth_tokens_file", "admin_tokens_file")
MAX_FILE_BYTES = 16 * 2**20


def read_files(config: ServerConfig, settings: tuple[str, ...]) -> dict[str, bytes]:
    """Return what is in the files that some settings name, by setting.

    Raises:
        OSError: If one cannot be read.
    """
    paths = {name: getattr(config, name) for name in settings}
    return {name: read_bounded(path, MAX_FILE_BYTES) for name, path in paths.items() if path is not None}


class HandedFiles:
    """Content that can be opened by a path, in this process alone.

    Attributes:
        paths: By setting.
    """

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        """Keep contents, by setting."""
        self._descriptors = {name: os.memfd_create(f"dragoman-{name}") for name in contents}
        self.paths = {name: Path(f"/proc/self/fd/{descriptor}") for name, descriptor in self._descriptors.items()}
        self.replace(contents)

    def replace(self, contents: Mapping[str, bytes]) -> None:
        """Have other content at the same paths."""
        for name, content in contents.items():
            descriptor = self._descriptors[name]
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)
