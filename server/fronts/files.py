"""Files of settings as a frontend worker has them: contents that the parent has found good, in memory that opens like a file.

So a worker that is restarted while a file is damaged has what the others have.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from dragoman.model.files import read_bounded
from dragoman.server.config import ServerConfig

# Settings whose files workers get as content.
SETTINGS = ("tls_certificate", "tls_key", "tls_client_ca", "auth_tokens_file", "admin_tokens_file")
MAX_FILE_BYTES = 16 * 2**20


def read_files(config: ServerConfig, settings: tuple[str, ...]) -> dict[str, bytes]:
    """Return the contents of the files that some settings name, by setting.

    Raises:
        OSError: If one cannot be read.
    """
    paths = {name: getattr(config, name) for name in settings}
    return {name: read_bounded(path, MAX_FILE_BYTES) for name, path in paths.items() if path is not None}


class HandedFiles:
    """Contents that can be opened by a path, in this process alone.

    Attributes:
        paths: By setting.
    """

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        """Keep contents, by setting."""
        self._descriptors = {name: os.memfd_create(f"dragoman-{name}") for name in contents}
        self.paths = {name: Path(f"/proc/self/fd/{descriptor}") for name, descriptor in self._descriptors.items()}
        self.replace(contents)

    def replace(self, contents: Mapping[str, bytes]) -> None:
        """Replace contents; paths stay the same."""
        for name, content in contents.items():
            descriptor = self._descriptors[name]
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)
