"""Copies of the manifests and tokenisers of served bundles, so that a restarted worker does not depend on the models folder."""

import hashlib
import shutil
import threading
from pathlib import Path

from dragoman.export.bundle import MANIFEST_FILE, TOKENIZER_DIRECTORY, Bundle, BundleError
from dragoman.export.manifest_file import parse_manifest, read_manifest_bytes


class HandedBundles:
    """Reference-counted copies, one a bundle; thread-safe."""

    def __init__(self, folder: Path) -> None:
        """Keep copies below an empty folder of this server."""
        self._folder = folder
        self._num_users: dict[str, int] = {}
        self._lock = threading.Lock()

    def folder_of(self, bundle: Bundle) -> Path:
        """Return the folder of a bundle's copy."""
        return self._folder / bundle.digest

    def add(self, bundle: Bundle) -> None:
        """Copy a bundle, unless there is a copy; call `remove` as often as `add`.

        Raises:
            BundleError: If the files have changed since the bundle was opened, or cannot be copied.
        """
        with self._lock:
            if not self._num_users.get(bundle.digest):
                folder = self.folder_of(bundle)
                try:
                    _copy(bundle, folder)
                    open_handed(folder).refuse_other(bundle.digest)
                except BaseException as error:
                    shutil.rmtree(folder, ignore_errors=True)
                    if isinstance(error, OSError):
                        raise BundleError(f"{error.filename or bundle.directory}: {error.strerror}") from error
                    raise
            self._num_users[bundle.digest] = self._num_users.get(bundle.digest, 0) + 1

    def remove(self, bundle: Bundle) -> None:
        """Delete a copy that was added as often as removed."""
        with self._lock:
            self._num_users[bundle.digest] -= 1
            if not self._num_users[bundle.digest]:
                del self._num_users[bundle.digest]
                shutil.rmtree(self.folder_of(bundle), ignore_errors=True)


def open_handed(folder: Path) -> Bundle:
    """Open a copy. Raises `BundleError` if it does not match its manifest."""
    content = read_manifest_bytes(folder / MANIFEST_FILE)
    bundle = Bundle(folder, parse_manifest(content, folder / MANIFEST_FILE), hashlib.sha256(content).hexdigest())
    bundle.check_tokenizers()
    return bundle


def _copy(bundle: Bundle, to: Path) -> None:
    """Copy the manifest and the files of the tokenisers."""
    paths = [path for path in bundle.manifest.files if path.startswith(f"{TOKENIZER_DIRECTORY}/")]
    for path in (MANIFEST_FILE, *paths):
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.directory / path, to / path)
