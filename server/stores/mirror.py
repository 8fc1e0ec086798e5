"""Mirror of a store in a folder: versions are added and removed as in the store; nothing changes while it is unreachable.

A server calls `Mirror.sync` before it first reads the folder, then periodically on a thread. Problems are logged when they appear
or change, not each time.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic

import structlog

from dragoman.export.bundle import MANIFEST_FILE, BundleError
from dragoman.export.signing import SIGNATURE_FILE
from dragoman.server.stores.address import Address
from dragoman.server.stores.placing import Place, Placed
from dragoman.server.stores.pull import (
    MARK_FILE,
    Order,
    Pulled,
    Puller,
    check_address,
    naming,
    open_store,
    pull_model_file,
    remove_model_file,
)
from dragoman.server.stores.store import (
    MODEL_FILE,
    Found,
    Listing,
    StoppedError,
    Store,
    StoreError,
    find,
    find_model_files,
)

# A refused bundle is retried when its listing changes, and after this time: transfer may have damaged it.
REFUSED_SECONDS = 300.0

log = structlog.get_logger("dragoman.stores")

# Returns the wanted versions, given a model and its versions in natural order.
Choose = Callable[[str, Sequence[str]], Collection[str]]


@dataclass(frozen=True, slots=True)
class Synced:
    """Result of one synchronisation; `reason` is empty if listing the store succeeded, `problems` are by folder in the store."""

    reason: str = ""
    added: list[Pulled] = field(default_factory=list)
    removed: list[Path] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    is_away: bool = False

    @property
    def is_changed(self) -> bool:
        return bool(self.added or self.removed)


class Mirror:
    """Synchronisation of a folder with a store."""

    def __init__(
        self,
        address: Address,
        folder: Path,
        order: Order,
        choose: Choose | None = None,
        is_used: Callable[[Path], bool] = lambda directory: False,
    ) -> None:
        """Open the store of a bundle or a folder of models, not of an archive, without a request.

        `choose` returns the wanted versions of a model, None for all; `is_used` whether the version in a directory is served,
        which stays while it is in the store. The order's checksum is for a single bundle.

        Raises:
            InputError: If the address, settings or credentials cannot be used.
            StoreError: If the store's library refuses the address.
        """
        if address.is_archive:
            raise BundleError(f"{address.text}: an archive does not change; pull it once")
        check_address(address, order.keys, order.sha256)
        self._store: Store = open_store(address, order.silence_seconds)
        self._place, self._order, self._choose, self._is_used = Place(folder), order, choose, is_used
        cache = None if address.scheme == "" else order.cache
        self._puller = Puller(self._store, self._place, order, cache, order.sha256)
        # By folder in the store: stamps of manifest and signature when pulled, and the placed version.
        self._known: dict[str, tuple[object, Placed]] = {}
        # By folder in the store: stamps, time and reason of a refusal.
        self._refused: dict[str, tuple[object, float, str]] = {}
        self._model_files: dict[str, str] = {}
        self._said: dict[str, str] = {}
        self._resolved = self._store.address

    def sync(self) -> Synced:
        """Pull new bundles, then remove those no longer in the store; raise `StoppedError` once the order's `is_stopped` is true.

        Nothing is removed if no bundle can be read, nor of a model with an unreadable wanted version.
        """
        try:
            listing = self._store.list()
            found = find(listing.stamps, self._store.address)
        except StoppedError:
            raise
        except (StoreError, BundleError) as error:
            self._say({"": str(error)}, "the store cannot be read; what is here stays")
            return Synced(reason=str(error), is_away=isinstance(error, StoreError))
        if listing.address != self._resolved:
            log.info("the address was resolved", address=self._store.address, is_now=listing.address)
            self._resolved = listing.address
        added: list[Pulled] = []
        problems: dict[str, str] = {}
        wanted = self._wanted(found)
        for each in wanted:
            self._guard(each.folder, problems, partial(self._bring, each, listing, added))
        for model, path in find_model_files(listing.stamps).items():
            self._guard(path, problems, partial(self._bring_model_file, model, path, listing.stamps))
        self._forget_all_but({each.folder for each in wanted})
        removed: list[Path] = []
        if any(each.folder not in problems for each in wanted):
            self._guard("", problems, partial(self._remove, found, wanted, listing, problems, removed))
        self._say(problems, "a bundle of the store is refused")
        return Synced("", added, removed, problems)

    def _wanted(self, found: list[Found]) -> list[Found]:
        if self._choose is None:
            return found
        versions: dict[str, list[str]] = {}
        for each in found:
            if each.version:
                versions.setdefault(each.model, []).append(each.version)
        chosen = {model: set(self._choose(model, names)) for model, names in versions.items()}
        return [each for each in found if not each.version or each.version in chosen[each.model]]

    def _guard(self, name: str, problems: dict[str, str], work: Callable[[], object]) -> None:
        """Call `work` and record a failure as a problem."""
        try:
            with naming(self._place.folder):
                work()
        except StoppedError:
            raise
        except (StoreError, BundleError) as error:
            problems[name] = str(error)
        except OSError as error:
            problems[name] = f"{error.filename}: {error.strerror}" if error.filename else str(error)

    def _bring(self, found: Found, listing: Listing, added: list[Pulled]) -> None:
        stamp = tuple(listing.stamps.get(found.path(file), "") for file in (MANIFEST_FILE, SIGNATURE_FILE))
        known = self._known.get(found.folder)
        if known is not None and known[0] == stamp and known[1].digest:
            return
        whole = _stamps_below(found.folder, listing.stamps)
        refused = self._refused.get(found.folder)
        if refused is not None and refused[0] == whole and monotonic() - refused[1] < REFUSED_SECONDS:
            raise BundleError(refused[2])
        try:
            pulled = self._puller.pull(found)
        except BundleError as error:
            self._refused[found.folder] = whole, monotonic(), str(error)
            raise
        self._refused.pop(found.folder, None)
        self._known[found.folder] = stamp, pulled.placed
        if pulled.is_new:
            manifest, directory = pulled.manifest, str(pulled.placed.directory)
            log.info("pulled", model=manifest.name, version=manifest.version, sha256=pulled.digest, folder=directory)
            added.append(pulled)

    def _bring_model_file(self, model: str, path: str, stamps: Mapping[str, str]) -> None:
        folder = self._place.folder / model
        if not folder.is_dir() or (self._model_files.get(model) == stamps[path] and (folder / MODEL_FILE).exists()):
            return
        if pull_model_file(self._store, path, self._place, model, self._order.keys):
            log.info("pulled", model=model, file=str(folder / MODEL_FILE))
        self._model_files[model] = stamps[path]

    def _remove(
        self, found: list[Found], wanted: list[Found], listing: Listing, problems: Mapping[str, str], removed: list[Path]
    ) -> None:
        there, folders = {each.folder for each in found}, {each.folder for each in wanted}
        lacking = {each.model for each in wanted if each.folder in problems}
        for placed in self._place.placed():
            if placed.record.address != self._store.address:
                continue
            folder = placed.record.folder
            known = self._known.get(folder)
            is_replaced = known is not None and known[1].directory != placed.directory and folder not in problems
            if folder in folders and not is_replaced:
                continue
            if placed.directory.parent.name in lacking or (folder in there and self._is_used(placed.directory)):
                continue
            self._place.remove(placed)
            removed.append(placed.directory)
            log.info("removed, as it is no longer in the store", folder=str(placed.directory))
        marked = {path.parent.name for path in self._place.folder.glob(f"*/{MARK_FILE}")}
        for model in marked - find_model_files(listing.stamps).keys():
            self._model_files.pop(model, None)
            if remove_model_file(self._place.folder / model):
                log.info("removed, as it is no longer in the store", folder=str(self._place.folder / model), file=MODEL_FILE)

    def _forget_all_but(self, folders: set[str]) -> None:
        for kept in (self._known, self._refused):
            for folder in set(kept) - folders:
                del kept[folder]

    def _say(self, problems: dict[str, str], event: str) -> None:
        """Log new problems, and their end."""
        for name, reason in problems.items():
            if self._said.get(name) != reason:
                log.warning(event, store=self._store.address, folder=name, reason=reason)
        if self._said and not problems:
            log.info("the store is read again, without problems", store=self._store.address)
        self._said = dict(problems)


def _stamps_below(folder: str, stamps: Mapping[str, str]) -> list[tuple[str, str]]:
    return sorted((path, stamp) for path, stamp in stamps.items() if not folder or path.startswith(f"{folder}/"))


def sync(address: str, folder: Path, order: Order) -> Synced:
    """Synchronise a folder with an address once; raises as `Mirror`."""
    return Mirror(Address.parse(address), folder, order).sync()
