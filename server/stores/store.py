"""Store interface, its errors, local folders as stores, and discovery of bundles in a store."""

import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dragoman.export.bundle import MANIFEST_FILE, BundleError
from dragoman.export.fields import MAX_PATH_CHARACTERS, one_line
from dragoman.export.manifest import check_name
from dragoman.model.files import leads_out, open_regular
from dragoman.server.models.model_file import check_version_name, natural_key

# A store that sends fewer bytes than this in this time is silent.
SILENCE_SECONDS = 30.0
LEAST_BYTES = 1 << 16
# A folder of models has some thousands of files; more is probably another folder.
MAX_LISTED_FILES = 100_000

Take = Callable[[bytes], None]


class StoreError(Exception):
    """A store is unreachable, or a request failed; the message is one line and names the store."""


class NotThereError(StoreError):
    """No such file or folder."""


class RangeError(StoreError):
    """The store cannot read from an offset: it has no ranges, or the file is shorter."""


class SilentError(StoreError):
    """The store was silent for too long; the request is not retried at once."""


class StoppedError(StoreError):
    """The pull was stopped."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The files of a store at one moment, and the immutable address of this content if the store has one.

    `stamps` are texts that change with the file, by path relative to the address with forward slashes.
    """

    stamps: Mapping[str, str]
    address: str


class Store(Protocol):
    """A store of files."""

    @property
    def address(self) -> str:
        """The address as given, for messages."""

    def list(self) -> Listing:
        """Return the files; for a store without listing, `bundle.json` if present. Raises `StoreError`."""

    def size(self, path: str) -> int:
        """Return the size of a file; raises `NotThereError` or another `StoreError`."""

    def read(self, path: str, offset: int, take: Take) -> None:
        """Read a file from an offset to its end; exceptions of `take` end the reading.

        Raises:
            NotThereError: If there is no such file.
            RangeError: If the store cannot begin there; no piece was taken.
            StoreError: If the request fails, breaks off, or is silent for too long.
        """


def read_bounded(store: Store, path: str, max_bytes: int) -> bytes:
    """Return a small file; raises `StoreError` if reading fails or it is larger."""
    content = bytearray()

    def take(piece: bytes) -> None:
        content.extend(piece)
        if len(content) > max_bytes:
            raise StoreError(f"{named(store, path)}: more than {max_bytes} bytes")

    store.read(path, 0, take)
    return bytes(content)


def named(store: Store, path: str) -> str:
    """Return the address of a file, for messages."""
    return f"{store.address.rstrip('/')}/{path}" if path else store.address


MODEL_FILE = "model.toml"


@dataclass(frozen=True, slots=True)
class Found:
    """A bundle in a store: path below the address, and names of the folders of versions and version; empty without."""

    folder: str
    model: str = ""
    version: str = ""

    def path(self, file: str) -> str:
        """Return the store's path of one of the bundle's files."""
        return f"{self.folder}/{file}" if self.folder else file

    def check(self, place: str) -> None:
        """Raise `BundleError` if folder names are invalid; `place` is the bundle's address for the message."""
        if not self.folder.isprintable():
            raise BundleError(f"{one_line(place)}: no folder of bundles is called so")
        if not self.version:
            return
        try:
            check_name(self.model)
            check_version_name(self.version)
        except ValueError as error:
            raise BundleError(f"{place}: {error}") from error


def find(paths: Collection[str], address: str) -> list[Found]:
    """Return the bundles among paths in natural order; hidden and deeper folders are skipped.

    Raises `BundleError` if there is none, or one at the address itself and others below it.
    """
    found = []
    for path in paths:
        *parts, name = path.split("/")
        if name != MANIFEST_FILE or any(not part or part.startswith(".") for part in parts):
            continue
        if len(parts) == 1:
            found.append(Found(parts[0]))
        elif len(parts) == 2:
            found.append(Found("/".join(parts), *parts))
    if MANIFEST_FILE in paths and found:
        raise BundleError(f"{address}: holds {MANIFEST_FILE} beside folders of bundles; only one of the two can be meant")
    if MANIFEST_FILE in paths:
        found = [Found("")]
    if not found:
        raise BundleError(f"{address}: holds no bundle")
    return sorted(found, key=lambda each: natural_key(each.folder[:MAX_PATH_CHARACTERS]))


def find_model_files(paths: Collection[str]) -> dict[str, str]:
    """Return the path of each model's `model.toml`, by model."""
    split = (path.split("/") for path in paths)
    return {parts[0]: "/".join(parts) for parts in split if parts[1:] == [MODEL_FILE] and parts[0][:1] not in ("", ".")}


MAX_DEPTH = 12
_PIECE_BYTES = 1 << 20


class FolderStore:
    """A local folder, such as a mounted volume, as a `Store`; links out of it are not followed."""

    def __init__(self, folder: Path, address: str = "") -> None:
        """Use a folder, which may not exist yet; the address for messages defaults to its path."""
        self._folder = folder
        self._address = address or str(folder)

    @property
    def address(self) -> str:
        return self._address

    def list(self) -> Listing:
        """Return the files, without hidden ones."""
        if not self._folder.is_dir():
            raise NotThereError(f"{self.address}: {'not a folder' if self._folder.exists() else 'no such folder'}")
        stamps: dict[str, str] = {}
        try:
            self._add(self._folder, "", stamps, 0)
        except OSError as error:
            raise StoreError(f"{error.filename or self.address}: {error.strerror}") from error
        return Listing(stamps, self.address)

    def size(self, path: str) -> int:
        location = self._folder / path
        try:
            return location.stat().st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotThereError(f"{location}: no such file") from error
        except OSError as error:
            raise StoreError(f"{location}: {error.strerror}") from error

    def read(self, path: str, offset: int, take: Take) -> None:
        location = self._folder / path
        if leads_out(location, self._folder):
            raise StoreError(f"{location}: a link that leads out of the folder")
        try:
            with open_regular(location) as file:
                if os.fstat(file.fileno()).st_size < offset:
                    raise RangeError(f"{location}: is shorter")
                file.seek(offset)
                while piece := file.read(_PIECE_BYTES):
                    take(piece)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotThereError(f"{location}: no such file") from error
        except OSError as error:
            if error.filename not in (None, str(location)):
                raise  # raised by `take`
            raise StoreError(f"{location}: {error.strerror}") from error

    def _add(self, folder: Path, prefix: str, stamps: dict[str, str], depth: int) -> None:
        if depth > MAX_DEPTH:
            raise StoreError(f"{folder}: folders in folders, more than {MAX_DEPTH} deep")
        with os.scandir(folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    if entry.is_symlink() and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(entry)):
                        continue  # a link to a folder above
                    self._add(folder / entry.name, f"{prefix}{entry.name}/", stamps, depth + 1)
                elif entry.is_file():
                    found = entry.stat()
                    stamps[prefix + entry.name] = f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"
                    if len(stamps) > MAX_LISTED_FILES:
                        raise StoreError(f"{self.address}: more than {MAX_LISTED_FILES} files")
