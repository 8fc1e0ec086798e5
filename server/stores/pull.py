"""Pulling of bundles, bundle archives and model files from a store into a folder."""

import hashlib
import lzma
import os
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dragoman.export.bundle import MANIFEST_FILE, Bundle, BundleError, FileEntry, Manifest
from dragoman.export.fields import MAX_BUNDLE_BYTES, one_line
from dragoman.export.manifest import MAX_MANIFEST_BYTES, parse_manifest
from dragoman.export.signing import MAX_SIGNATURE_BYTES, SIGNATURE_FILE, SIGNATURE_SUFFIX, Keys
from dragoman.model.errors import InputError
from dragoman.model.files import read_bounded as read_file
from dragoman.model.files import replaced
from dragoman.server.stores.address import OBJECT_SCHEMES, WEB_SCHEMES, Address
from dragoman.server.stores.cache import Cache, Download, Progress, put
from dragoman.server.stores.placing import Place, Placed, Record, sync_folder
from dragoman.server.stores.store import (
    MODEL_FILE,
    SILENCE_SECONDS,
    FolderStore,
    Found,
    NotThereError,
    Store,
    find,
    find_model_files,
    named,
    read_bounded,
)

MAX_MEMBERS: Final = 100_000


def unpack(archive: Path, folder: Path, name: str) -> None:
    """Unpack a tar archive into an empty folder; raise `BundleError` if it is no tar, too large, or would write outside."""
    room = min(shutil.disk_usage(folder).free, MAX_BUNDLE_BYTES)
    try:
        with tarfile.open(archive) as opened:
            for number, member in enumerate(opened, start=1):
                room -= member.size
                if number > MAX_MEMBERS or room < 0:
                    raise BundleError(f"{name}: holds more than there is room for")
                if not (member.isreg() or member.isdir()):
                    raise BundleError(f"{name}: {one_line(member.name)} is neither a file nor a folder")
                opened.extract(member, folder, filter="data")
    except BundleError:
        raise
    except (tarfile.TarError, EOFError, ValueError, lzma.LZMAError, zlib.error) as error:
        raise BundleError(f"{name}: cannot be unpacked: {one_line(str(error))}") from error
    except OSError as error:
        if error.errno is not None:
            raise OSError(error.errno, os.strerror(error.errno), error.filename or str(folder)) from error
        raise BundleError(f"{name}: cannot be unpacked: {one_line(str(error))}") from error  # a compression error


MAX_MODEL_FILE_BYTES: Final = 1 << 16
# SHA-256 of the pulled model file and of its predecessor; other digests mean a file written locally.
MARK_FILE: Final = ".model.toml.pulled"

_DIGEST_CHARACTERS: Final = 64


def pull_model_file(store: Store, path: str, place: Place, model: str, keys: Keys | None) -> bool:
    """Pull a model's `model.toml` into its folder; return whether it changed.

    Raises `BundleError` if a required signature by one of `keys` is missing or a local file is in its place; else as `pull`.
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
    """Write a changed model file after its mark, which includes the previous file's digest in case this process is killed."""
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
    """Return whether a model file was pulled."""
    try:
        marked = read_file(folder / MARK_FILE, 2 * _DIGEST_CHARACTERS + 1).decode("ascii").split("\n")
        return _digest(read_file(folder / MODEL_FILE, MAX_MODEL_FILE_BYTES)) in marked
    except (OSError, UnicodeDecodeError):
        return False


def remove_model_file(folder: Path) -> bool:
    """Remove a model file if it was pulled; return whether it was."""
    if not is_pulled(folder):
        return False
    (folder / MODEL_FILE).unlink(missing_ok=True)
    (folder / MARK_FILE).unlink(missing_ok=True)
    return True


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@contextmanager
def naming(folder: Path) -> Iterator[None]:
    """Add the folder's name to file-system errors without one, such as a full disk."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from error


@dataclass(frozen=True, slots=True)
class Pulled:
    """A pulled bundle; `digest` is its manifest's SHA-256, which covers the files by their checksums."""

    manifest: Manifest
    digest: str
    placed: Placed
    is_new: bool

    def __str__(self) -> str:
        manifest, directory = self.manifest, self.placed.directory
        verb = "pulled" if self.is_new else "is there:"
        return f"{verb} {manifest.name} {directory.name}, version {manifest.version}, sha256:{self.digest}, in {directory}"


# Subfolder of the bundles' folder: on the same disk, and hidden from servers.
CACHE_FOLDER: Final = ".cache"


@dataclass(frozen=True, slots=True)
class Order:
    """Options of a pull; one of `keys` must have signed each bundle, None for unsigned bundles.

    Attributes:
        sha256: SHA-256 of an archive, or of the manifest of a single bundle; empty for any.
        is_stopped: Polled during downloads, which then raise `StoppedError`.
        on_address: Called with the immutable address of a tag.
    """

    cache: Cache
    keys: Keys | None = None
    sha256: str = ""
    silence_seconds: float = SILENCE_SECONDS
    on_progress: Progress = lambda path, size, total: None
    is_stopped: Callable[[], bool] = lambda: False
    on_address: Callable[[str], None] = lambda address: None


class Puller:
    """Pulls from one store into one folder."""

    def __init__(self, store: Store, place: Place, order: Order, cache: Cache | None, digest: str) -> None:
        """Prepare pulls; `cache` is None for local stores, `digest` the expected SHA-256 of the manifest or empty."""
        self._store, self._place, self._order, self._cache, self._digest = store, place, order, cache, digest

    def pull(self, found: Found) -> Pulled:
        """Pull a bundle, unless it is already present.

        Raises:
            BundleError: If a required signature is missing, checksums do not match, or another bundle is in its place.
            StoreError: If reading fails.
            OSError: If writing fails.
        """
        name = named(self._store, found.path(MANIFEST_FILE))
        found.check(named(self._store, found.folder))
        content = read_bounded(self._store, found.path(MANIFEST_FILE), MAX_MANIFEST_BYTES)
        digest = hashlib.sha256(content).hexdigest()
        if self._digest not in ("", digest):
            raise BundleError(f"{name}: SHA-256 {digest}, but {self._digest} is asked for")
        signature = self._read_signature(found)
        if self._order.keys is not None:
            if signature is None:
                raise BundleError(f"{named(self._store, found.folder)}: is not signed (there is no {SIGNATURE_FILE}), and must be")
            self._order.keys.check(content, signature, name)
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
        """Return this bundle if already pulled and undamaged; remove a damaged one."""
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
        if self._cache is None:
            for path in manifest.files:
                target = directory / path
                target.parent.mkdir(parents=True, exist_ok=True)
                with target.open("w+b", buffering=0) as file:
                    self._download(found, path, manifest).fill(file)
            return
        with self._cache.hold(manifest.files, named(self._store, found.folder)):
            for path, entry in manifest.files.items():
                put(self._cache.obtain(entry, self._download(found, path, manifest).fill, self._order.is_stopped), directory / path)

    def _download(self, found: Found, path: str, manifest: Manifest) -> Download:
        return Download(self._store, found.path(path), manifest.files[path], self._order.on_progress, self._order.is_stopped)


def _check_paths(manifest: Manifest, name: str) -> None:
    """Raise `BundleError` for names of files that a pull itself writes; export creates none."""
    for path in manifest.files:
        if path == SIGNATURE_FILE or path.startswith("."):
            raise BundleError(f"{name}: files has {path}, which is not a file of a bundle")


def _write_signature(directory: Path, signature: bytes | None) -> None:
    """Write a signature beside the manifest, if it is missing or differs."""
    path = directory / SIGNATURE_FILE
    if signature is None or (path.is_file() and path.read_bytes() == signature):
        return
    with replaced(path) as temporary:
        temporary.write_bytes(signature)
    sync_folder(path)
    sync_folder(directory)


def pull(address: Address, folder: Path, order: Order) -> list[Pulled]:
    """Pull the bundles of an address into a folder; existing ones are unchanged.

    Raises:
        InputError: If the address, the checksum or the bundle cannot be used, `BundleError` among them.
        StoreError: If reading the store fails.
        OSError: If writing the folder fails.
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
    """Raise `InputError` for an address without TLS, signature and checksum."""
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
    puller = Puller(store, place, order, cache, digest)
    _refuse_twins(found, store)
    pulled = [puller.pull(each) for each in found]
    with naming(place.folder):
        for model, path in find_model_files(listing.stamps).items():
            if (place.folder / model).is_dir():
                pull_model_file(store, path, place, model, order.keys)
    return pulled


def _refuse_twins(found: list[Found], store: Store) -> None:
    """Raise `BundleError` for a folder that is both a bundle and a folder of versions."""
    flat = {each.folder for each in found if not each.version}
    for each in found:
        if each.version and each.model in flat:
            raise BundleError(f"{store.address}/{each.model}: is a bundle, and has versions in it, too")


def open_store(address: Address, silence_seconds: float = SILENCE_SECONDS) -> Store:
    """Return the store of an address, without a request; imports the store's library, or raises `ModuleNotFoundError`.

    Raises `InputError` for unusable settings or credentials, `StoreError` if the library refuses the address.
    """
    if address.scheme in (*OBJECT_SCHEMES, *WEB_SCHEMES):
        from dragoman.server.stores.objects import ObjectStore

        return ObjectStore(address, silence_seconds)
    if address.scheme == "oci":
        from dragoman.server.stores.registry import RegistryStore

        return RegistryStore(address, silence_seconds)
    return FolderStore(Path(address.text))
