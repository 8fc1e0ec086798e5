"""Pulling of bundles from a store into a folder."""

import hashlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dragoman.export.bundle import MANIFEST_FILE, Bundle, BundleError, FileEntry, Manifest
from dragoman.export.manifest_file import MAX_MANIFEST_BYTES, parse_manifest
from dragoman.export.signing import MAX_SIGNATURE_BYTES, SIGNATURE_FILE, SIGNATURE_SUFFIX, Keys
from dragoman.model.errors import InputError
from dragoman.model.files import read_bounded as read_file
from dragoman.model.files import replaced
from dragoman.server.stores.address import Address
from dragoman.server.stores.archive import unpack
from dragoman.server.stores.cache import Cache, put
from dragoman.server.stores.download import Download, Progress
from dragoman.server.stores.folder import FolderStore
from dragoman.server.stores.opening import open_store
from dragoman.server.stores.placing import Place, Placed, Record, sync_folder
from dragoman.server.stores.store import (
    MODEL_FILE,
    SILENCE_SECONDS,
    Found,
    NotThereError,
    Store,
    find,
    find_model_files,
    named,
    read_bounded,
)

MAX_MODEL_FILE_BYTES: Final = 1 << 16
MARK_FILE: Final = ".model.toml.pulled"
"""Holds the SHA-256 of the file that was pulled, and of the one before it: one that has another was written here."""

_DIGEST_CHARACTERS: Final = 64


def pull_model_file(store: Store, path: str, place: Place, model: str, keys: Keys | None) -> bool:
    """Bring a model's file here.

    Args:
        store: Where it lies.
        path: As the store has it.
        place: Where bundles are pulled into.
        model: Whose file it is; its folder is there.
        keys: Of which one must have signed it; None if it need not be signed.

    Returns:
        Whether it is another than before.

    Raises:
        BundleError: If it is not signed as it must be, or one that was written here is in its place.
        StoreError: If it cannot be had.
        OSError: If it cannot be written.
    """
    name = named(store, path)
    content = read_bounded(store, path, MAX_MODEL_FILE_BYTES)
    if keys is not None:
        try:
            signature = read_bounded(store, path + SIGNATURE_SUFFIX, MAX_SIGNATURE_BYTES)
        except NotThereError:
            raise BundleError(f"{name}: is not signed (there is no {MODEL_FILE}{SIGNATURE_SUFFIX}), and must be") from None
        keys.check(content, signature, name)
    with place.locked():
        return _put(content, place.folder / model)


def _put(content: bytes, folder: Path) -> bool:
    """Write a model's file if it is another; whoever is killed between the two leaves a mark that knows the file from before."""
    target, known = folder / MODEL_FILE, [_digest(content)]
    if target.exists():
        there = read_file(target, MAX_MODEL_FILE_BYTES)
        if there == content:
            return False
        if not is_pulled(folder):
            raise BundleError(f"{target}: was written here, and stays; the store has another")
        known.append(_digest(there))
    for file, written in ((folder / MARK_FILE, "\n".join(known).encode()), (target, content)):
        with replaced(file) as temporary:
            temporary.write_bytes(written)
            sync_folder(temporary)
    sync_folder(folder)
    return True


def is_pulled(folder: Path) -> bool:
    """Tell whether a model's file is one that was pulled."""
    try:
        marked = read_file(folder / MARK_FILE, 2 * _DIGEST_CHARACTERS + 1).decode("ascii").split("\n")
        return _digest(read_file(folder / MODEL_FILE, MAX_MODEL_FILE_BYTES)) in marked
    except (OSError, UnicodeDecodeError):
        return False


def remove_model_file(folder: Path) -> bool:
    """Take a model's file away if it was pulled; return whether it was."""
    if not is_pulled(folder):
        return False
    (folder / MODEL_FILE).unlink(missing_ok=True)
    (folder / MARK_FILE).unlink(missing_ok=True)
    return True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


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


CACHE_FOLDER: Final = ".cache"
"""Where the cache lies that is not put elsewhere, in the folder that is pulled into: on its disk, and hidden from servers."""


@dataclass(frozen=True, slots=True)
class Order:
    """What is wanted, beside where from and where to.

    Attributes:
        cache: Where files are kept.
        keys: Of which one must have signed each bundle; None if they need not be signed.
        sha256: Of an archive, or of the manifest of the one bundle that an address holds; empty for any.
        silence_seconds: How long a store may be silent.
        on_progress: Called as files come.
        is_stopped: Asked as files come; what is under way ends with `StoppedError` when it says so.
        on_address: Called with what exactly an address names, where that is not what was given: the digest of a tag.
    """

    cache: Cache
    keys: Keys | None = None
    sha256: str = ""
    silence_seconds: float = SILENCE_SECONDS
    on_progress: Progress = say_nothing
    is_stopped: Callable[[], bool] = never
    on_address: Callable[[str], None] = lambda address: None


def pull(address: Address, folder: Path, order: Order) -> list[Pulled]:
    """Bring what an address holds into a folder; what is there already stays as it is.

    Raises:
        InputError: If the address, the checksum or the bundle cannot be used, `BundleError` among them.
        StoreError: If the store does not give it.
        OSError: If it cannot be written.
    """
    check_address(address, order.keys, order.sha256)
    place = Place(folder)
    if not address.is_archive:
        store = open_store(address, order.silence_seconds)
        return _pull_all(store, place, order, order.sha256, None if address.scheme == "" else order.cache)
    if not order.sha256:
        raise InputError(f"{address.text}: an archive is opened only if its SHA-256 is given (--sha256)")
    parent, _, name = address.text.rpartition("/")
    if not address.scheme:
        parent = os.path.dirname(address.text) or "."
    store = open_store(Address(address.scheme, parent, address.host), order.silence_seconds)
    entry = FileEntry(store.size(name), order.sha256)
    download = Download(store, name, entry, order.on_progress, order.is_stopped)
    with naming(folder), order.cache.hold({name: entry}, address.text), place.scratch() as scratch:
        unpack(order.cache.obtain(entry, download.fill, order.is_stopped), scratch, address.text)
        return _pull_all(FolderStore(scratch, address.text), place, order, "", None)


def check_address(address: Address, keys: Keys | None, sha256: str) -> None:
    """Refuse an address by which anybody on the way could send something else.

    Raises:
        InputError: If it is one.
    """
    if address.is_plain and keys is None and not sha256:
        raise InputError(
            f"{address.text}: without TLS, what comes must be signed (--require-signatures) or have a checksum (--sha256)"
        )


def _pull_all(store: Store, place: Place, order: Order, digest: str, cache: Cache | None) -> list[Pulled]:
    listing = store.list()
    if listing.address != store.address:
        order.on_address(listing.address)
    found = find(listing.stamps, store.address)
    if digest and len(found) > 1:
        raise InputError(f"{store.address}: holds {len(found)} bundles, and a checksum is of one")
    puller = Puller(store, place, cache, order.keys, digest, order.on_progress, order.is_stopped)
    _refuse_twins(found, store)
    pulled = [puller.pull(each) for each in found]
    with naming(place.folder):
        for model, path in find_model_files(listing.stamps).items():
            if (place.folder / model).is_dir():
                pull_model_file(store, path, place, model, order.keys)
    return pulled


def _refuse_twins(found: list[Found], store: Store) -> None:
    """Refuse a folder that is both a bundle and a folder of versions."""
    flat = {each.folder for each in found if not each.version}
    for each in found:
        if each.version and each.model in flat:
            raise BundleError(f"{store.address}/{each.model}: is a bundle, and has versions in it, too")
