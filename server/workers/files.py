"""Files for frontend workers: contents of settings' files, and copies of bundles' manifests and tokenizers.

The parent has validated them, so that a restarted worker gets the same files as the others, even if the originals have changed.
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Mapping
from pathlib import Path

from dragoman.export.bundle import MANIFEST_FILE, TOKENIZER_DIRECTORY, Bundle, BundleError
from dragoman.export.manifest import parse_manifest, read_manifest_bytes
from dragoman.model.files import read_bounded
from dragoman.server.config import ServerConfig

# Settings whose files are sent to workers as content.
FILE_SETTINGS = ("tls_certificate", "tls_key", "tls_client_ca", "auth_tokens_file", "admin_tokens_file")
MAX_FILE_BYTES = 16 * 2**20


def read_files(config: ServerConfig, settings: tuple[str, ...]) -> dict[str, bytes]:
    """Return the contents of the files that settings name, by setting; raise `OSError` if a file cannot be read."""
    paths = {name: getattr(config, name) for name in settings}
    return {name: read_bounded(path, MAX_FILE_BYTES) for name, path in paths.items() if path is not None}


class MemoryFiles:
    """Contents that can be opened by path, in this process only; `paths` is by setting."""

    def __init__(self, contents: Mapping[str, bytes]) -> None:
        self._descriptors = {name: os.memfd_create(f"dragoman-{name}") for name in contents}
        self.paths = {name: Path(f"/proc/self/fd/{descriptor}") for name, descriptor in self._descriptors.items()}
        self.replace(contents)

    def replace(self, contents: Mapping[str, bytes]) -> None:
        """Replace contents; the paths stay the same."""
        for name, content in contents.items():
            descriptor = self._descriptors[name]
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)


class BundleCopies:
    """Reference-counted copies of bundles; thread-safe."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._num_users: dict[str, int] = {}
        self._lock = threading.Lock()

    def folder_of(self, bundle: Bundle) -> Path:
        """Return the folder of a bundle's copy."""
        return self._folder / bundle.digest

    def add(self, bundle: Bundle) -> None:
        """Copy a bundle, or count another user of its copy; raise `BundleError` if files have changed or cannot be copied."""
        with self._lock:
            if not self._num_users.get(bundle.digest):
                folder = self.folder_of(bundle)
                try:
                    _copy(bundle, folder)
                    open_copy(folder).refuse_other(bundle.digest)
                except BaseException as error:
                    shutil.rmtree(folder, ignore_errors=True)
                    if isinstance(error, OSError):
                        raise BundleError(f"{error.filename or bundle.directory}: {error.strerror}") from error
                    raise
            self._num_users[bundle.digest] = self._num_users.get(bundle.digest, 0) + 1

    def remove(self, bundle: Bundle) -> None:
        """Drop a reference; the last one deletes the copy."""
        with self._lock:
            self._num_users[bundle.digest] -= 1
            if not self._num_users[bundle.digest]:
                del self._num_users[bundle.digest]
                shutil.rmtree(self.folder_of(bundle), ignore_errors=True)


def open_copy(folder: Path) -> Bundle:
    """Open a copy; raise `BundleError` if it does not match its manifest."""
    content = read_manifest_bytes(folder / MANIFEST_FILE)
    bundle = Bundle(folder, parse_manifest(content, folder / MANIFEST_FILE), hashlib.sha256(content).hexdigest())
    bundle.check_tokenizers()
    return bundle


def _copy(bundle: Bundle, to: Path) -> None:
    paths = [path for path in bundle.manifest.files if path.startswith(f"{TOKENIZER_DIRECTORY}/")]
    for path in (MANIFEST_FILE, *paths):
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.directory / path, to / path)
