"""What `dragoman pull` does: from an address to a folder, once."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dragoman.export.bundle import BundleError, FileEntry
from dragoman.export.signing import Keys
from dragoman.model.errors import InputError
from dragoman.server.stores.address import Address
from dragoman.server.stores.archive import unpack
from dragoman.server.stores.cache import Cache
from dragoman.server.stores.download import Download, Progress
from dragoman.server.stores.folder import FolderStore
from dragoman.server.stores.found import Found, find, find_model_files
from dragoman.server.stores.model_files import pull_model_file
from dragoman.server.stores.opening import open_store
from dragoman.server.stores.placing import Place
from dragoman.server.stores.puller import Pulled, Puller, naming, never, say_nothing
from dragoman.server.stores.store import SILENCE_SECONDS, Store

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
