"""The interface of stores, their errors, and the bundles found in a listing."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from dragoman.export.bundle import MANIFEST_FILE, BundleError
from dragoman.export.fields import MAX_PATH_CHARACTERS, one_line
from dragoman.export.manifest import check_name
from dragoman.server.models.version_names import check_version_name, natural_key

# A store is silent if it sends fewer bytes than this in so long.
SILENCE_SECONDS = 30.0
LEAST_BYTES = 1 << 16
# A folder of models has some thousands of files; more is a wrong address.
MAX_LISTED_FILES = 100_000

Take = Callable[[bytes], None]


class StoreError(Exception):
    """A store cannot be reached or does not deliver; the message names it, in one line."""


class NotThereError(StoreError):
    """No such file or place."""


class RangeError(StoreError):
    """The store cannot read from an offset: it has no ranges, or the file is shorter."""


class SilentError(StoreError):
    """The store has been silent for too long; it is not retried at once."""


class StoppedError(StoreError):
    """The operation was stopped by its caller."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The content of a store at one moment.

    Attributes:
        stamps: By the path of each file, relative to the address and with forward slashes, a text that changes with the file.
        address: The resolved, immutable address where the store has such; otherwise as given.
    """

    stamps: Mapping[str, str]
    address: str


class Store(Protocol):
    """A store of files: a folder, an object store, a web server, an OCI registry."""

    @property
    def address(self) -> str:
        """The address as given, for messages."""
        ...

    def list(self) -> Listing:
        """List the files; of a store that cannot be listed only `bundle.json`, if it is there.

        Raises:
            StoreError: If the store fails.
        """
        ...

    def size(self, path: str) -> int:
        """Return the size of a file in bytes.

        Raises:
            NotThereError: If there is no such file.
            StoreError: If the store fails.
        """
        ...

    def read(self, path: str, offset: int, take: Take) -> None:
        """Read a file from an offset to its end.

        Args:
            path: Path in the listing.
            offset: First byte wanted.
            take: Called with one piece after the other; its exceptions end the reading.

        Raises:
            NotThereError: If there is no such file.
            RangeError: If the store cannot begin there; nothing has been taken.
            StoreError: If the store fails, breaks off, or is silent for too long.
        """
        ...


def read_bounded(store: Store, path: str, max_bytes: int) -> bytes:
    """Return a small file.

    Raises:
        StoreError: If it cannot be read, or is larger.
    """
    content = bytearray()

    def take(piece: bytes) -> None:
        content.extend(piece)
        if len(content) > max_bytes:
            raise StoreError(f"{named(store, path)}: more than {max_bytes} bytes")

    store.read(path, 0, take)
    return bytes(content)


def named(store: Store, path: str) -> str:
    """Return the name of a file in messages."""
    return f"{store.address.rstrip('/')}/{path}" if path else store.address


MODEL_FILE = "model.toml"


@dataclass(frozen=True, slots=True)
class Found:
    """A bundle in a store.

    Attributes:
        folder: Path below the address; empty for the address itself.
        model: Name of its folder of versions; empty outside of one.
        version: Name of its own folder there; empty likewise.
    """

    folder: str
    model: str = ""
    version: str = ""

    def path(self, file: str) -> str:
        """Return the path of one of its files in the store."""
        return f"{self.folder}/{file}" if self.folder else file

    def check(self, place: str) -> None:
        """Raise `BundleError`, naming `place`, if its folders have names that a folder of models may not have."""
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
    """Return the bundles among files, in natural order; hidden and deeper ones are ignored.

    Args:
        paths: Paths of files, relative to the address.
        address: The address, for messages.

    Raises:
        BundleError: If there is none, or one at the address itself and others below it.
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
    """Return the path of each model's `model.toml`, by the model."""
    split = (path.split("/") for path in paths)
    return {parts[0]: "/".join(parts) for parts in split if parts[1:] == [MODEL_FILE] and parts[0][:1] not in ("", ".")}
