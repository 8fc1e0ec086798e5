"""What front ends read of bundles, copied when a version is adopted: one that is started again asks nothing of a model's folder."""

import hashlib
import shutil
import threading
from pathlib import Path

from dragoman.export.bundle import MANIFEST_FILE, TOKENIZER_DIRECTORY, Bundle, BundleError
from dragoman.export.manifest_file import parse_manifest, read_manifest_bytes


class HandedBundles:
    """Copies of manifests and tokenisers: one of each bundle, for as long as somebody needs it. May be used by several threads."""

    def __init__(self, folder: Path) -> None:
        """Copy nothing yet.

        Args:
            folder: An empty one, that only this server writes to.
        """
        self._folder = folder
        self._num_users: dict[str, int] = {}
        self._lock = threading.Lock()

    def folder_of(self, bundle: Bundle) -> Path:
        """Return where the copy is, or would be."""
        return self._folder / bundle.digest

    def add(self, bundle: Bundle) -> None:
        """Copy what front ends read of a bundle, if that has not been done; `remove` it as often as it was added.

        Raises:
            BundleError: If the files are not those that were opened any more, or cannot be copied.
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
        """Delete a copy, if nobody else needs it."""
        with self._lock:
            self._num_users[bundle.digest] -= 1
            if not self._num_users[bundle.digest]:
                del self._num_users[bundle.digest]
                shutil.rmtree(self.folder_of(bundle), ignore_errors=True)


def open_handed(folder: Path) -> Bundle:
    """Open a copy: a bundle of which there are the manifest and the tokenisers.

    Raises:
        BundleError: If they are not what the manifest says.
    """
    content = read_manifest_bytes(folder / MANIFEST_FILE)
    bundle = Bundle(folder, parse_manifest(content, folder / MANIFEST_FILE), hashlib.sha256(content).hexdigest())
    bundle.check_tokenizers()
    return bundle


def _copy(bundle: Bundle, to: Path) -> None:
    """Copy the manifest and the files of the tokenisers.

    Raises:
        OSError: If they cannot be.
    """
    paths = [path for path in bundle.manifest.files if path.startswith(f"{TOKENIZER_DIRECTORY}/")]
    for path in (MANIFEST_FILE, *paths):
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(bundle.directory / path, to / path)
