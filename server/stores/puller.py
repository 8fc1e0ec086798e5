"""From a store to a folder: each file is compared with the manifest before anybody opens it, and the bundle appears at once.

The manifest is read once. If keys are given it is believed only after one of them is found to have signed those very bytes; only
what it lists is read, and only under the names that a manifest may list.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dragoman.export.bundle import MANIFEST_FILE, Bundle, BundleError, Manifest
from dragoman.export.manifest_file import MAX_MANIFEST_BYTES, parse_manifest
from dragoman.export.signing import MAX_SIGNATURE_BYTES, SIGNATURE_FILE, Keys
from dragoman.model.files import replaced
from dragoman.server.stores.cache import Cache, put
from dragoman.server.stores.download import Download, Progress
from dragoman.server.stores.found import Found
from dragoman.server.stores.placing import Place, Placed, Record, sync_folder
from dragoman.server.stores.store import NotThereError, Store, named, read_bounded


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Name the folder in errors of the file system that name nothing, as those of a full disk do."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from error


def say_nothing(path: str, size: int, total: int) -> None:
    """Take how far a download is, and do nothing."""


def never() -> bool:
    """Say that nothing is to be stopped."""
    return False


@dataclass(frozen=True, slots=True)
class Pulled:
    """A bundle that is here now.

    Attributes:
        manifest: What it says of itself.
        digest: SHA-256 of the bytes of its manifest, which its checksums make that of the whole.
        placed: Where it is.
        is_new: Whether it was not here before.
    """

    manifest: Manifest
    digest: str
    placed: Placed
    is_new: bool

    def __str__(self) -> str:
        """Return a line for whoever asked for it."""
        manifest, directory = self.manifest, self.placed.directory
        verb = "pulled" if self.is_new else "is there:"
        return f"{verb} {manifest.name} {directory.name}, version {manifest.version}, sha256:{self.digest}, in {directory}"


class Puller:
    """Pulls bundles of one store into one folder."""

    def __init__(
        self,
        store: Store,
        place: Place,
        cache: Cache | None,
        keys: Keys | None = None,
        digest: str = "",
        on_progress: Progress = say_nothing,
        is_stopped: Callable[[], bool] = never,
    ) -> None:
        """Take what all its bundles have in common.

        Args:
            store: Where they lie.
            place: Where they are wanted.
            cache: Where files are kept by their SHA-256; None if the store is as near as that.
            keys: Of which one must have signed each; None if they need not be signed.
            digest: SHA-256 that the manifest must have; empty for any.
            on_progress: Called as files come.
            is_stopped: Asked as files come; see `Download`.
        """
        self._store, self._place, self._cache, self._keys, self._digest = store, place, cache, keys, digest
        self._on_progress, self._is_stopped = on_progress, is_stopped

    def pull(self, found: Found) -> Pulled:
        """Bring a bundle here; one that is here stays as it is.

        Raises:
            BundleError: If it is not signed as it must be, or is not what its manifest says, or another is in its place.
            StoreError: If it cannot be had.
            OSError: If it cannot be written.
        """
        name = named(self._store, found.path(MANIFEST_FILE))
        found.check(named(self._store, found.folder))
        content = read_bounded(self._store, found.path(MANIFEST_FILE), MAX_MANIFEST_BYTES)
        digest = hashlib.sha256(content).hexdigest()
        if self._digest not in ("", digest):
            raise BundleError(f"{name}: SHA-256 {digest}, but {self._digest} is asked for")
        signature = self._read_signature(found)
        if self._keys is not None:
            if signature is None:
                raise BundleError(f"{named(self._store, found.folder)}: is not signed (there is no {SIGNATURE_FILE}), and must be")
            self._keys.check(content, signature, name)
        manifest = parse_manifest(content, name)
        if found.model not in ("", manifest.name):
            raise BundleError(f"{name}: is of model {manifest.name}, but lies in the folder of {found.model}")
        _check_paths(manifest, name)
        if (there := self._find(manifest.name, found, digest)) is not None:
            with self._place.locked():
                _write_signature(there.directory, signature)
            return Pulled(manifest, digest, there, is_new=False)
        with naming(self._place.folder), self._place.scratch() as scratch:
            directory = scratch / manifest.name
            directory.mkdir()
            (directory / MANIFEST_FILE).write_bytes(content)
            _write_signature(directory, signature)
            self._read_files(found, manifest, directory)
            Bundle.open(directory, is_checked=False)
            placed = self._place.put(directory, manifest.name, found.version, Record(self._store.address, found.folder))
        return Pulled(manifest, digest, placed, is_new=True)

    def _read_signature(self, found: Found) -> bytes | None:
        try:
            return read_bounded(self._store, found.path(SIGNATURE_FILE), MAX_SIGNATURE_BYTES)
        except NotThereError:
            return None

    def _find(self, model: str, found: Found, digest: str) -> Placed | None:
        """Return this very bundle if it was pulled before and is whole; a version that is damaged is taken away."""
        for placed in self._place.placed(model):
            if found.version not in ("", placed.directory.name) or placed.digest != digest:
                continue
            try:
                Bundle.open(placed.directory)
            except BundleError:
                self._place.remove(placed)
                continue
            return placed
        return None

    def _read_files(self, found: Found, manifest: Manifest, directory: Path) -> None:
        """Bring every file that the manifest lists."""
        if self._cache is None:
            for path in manifest.files:
                target = directory / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("w+b", buffering=0) as file:
                    self._download(found, path, manifest).fill(file)
            return
        with self._cache.hold(manifest.files, named(self._store, found.folder)):
            for path, entry in manifest.files.items():
                put(self._cache.obtain(entry, self._download(found, path, manifest).fill, self._is_stopped), directory / path)

    def _download(self, found: Found, path: str, manifest: Manifest) -> Download:
        return Download(self._store, found.path(path), manifest.files[path], self._on_progress, self._is_stopped)


def _check_paths(manifest: Manifest, name: str) -> None:
    """Refuse files that would take the place of what a pull itself writes; export makes none.

    Raises:
        BundleError: Naming the first.
    """
    for path in manifest.files:
        if path == SIGNATURE_FILE or path.startswith("."):
            raise BundleError(f"{name}: files has {path}, which is not a file of a bundle")


def _write_signature(directory: Path, signature: bytes | None) -> None:
    """Write a signature beside the manifest, if it is not there."""
    path = directory / SIGNATURE_FILE
    if signature is None or (path.is_file() and path.read_bytes() == signature):
        return
    with replaced(path) as temporary:
        temporary.write_bytes(signature)
    sync_folder(path)
    sync_folder(directory)
