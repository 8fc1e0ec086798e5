"""The store interface, its errors, and the bundles found in a store."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Protocol

from dragoman.export.bundle import MANIFEST_FILE, BundleError
from dragoman.export.fields import MAX_PATH_CHARACTERS, one_line
from dragoman.export.manifest import check_name
from dragoman.server.models.model_file import check_version_name, natural_key

# How long a store may give nothing before it counts as silent, and how little, for so long, is nothing.
SILENCE_SECONDS = 30.0
LEAST_BYTES = 1 << 16
# A folder of models has some thousands of files; more is another place that was given by mistake.
MAX_LISTED_FILES = 100_000

Take = Callable[[bytes], None]


class StoreError(Exception):
    """A store cannot be reached, or does not give what it is asked for; the message names it, in one line."""


class NotThereError(StoreError):
    """There is no such file, or no such place."""


class RangeError(StoreError):
    """The store cannot go on from an offset: it has no ranges, or the file is shorter."""


class SilentError(StoreError):
    """The store has given nothing for as long as it may; it is not asked again at once."""


class StoppedError(StoreError):
    """Whoever asked does not want it any more."""


@dataclass(frozen=True, slots=True)
class Listing:
    """What a store has at one moment.

    Attributes:
        stamps: By the path of each file, with forward slashes and relative to the address, what changes when the file does.
        address: Where exactly this is: an address whose content cannot change, where the store has such; otherwise as it was given.
    """

    stamps: Mapping[str, str]
    address: str


class Store(Protocol):
    """Files that lie somewhere."""

    @property
    def address(self) -> str:
        """As it was given, for messages."""
        ...

    def list(self) -> Listing:
        """Return what there is. A store that cannot be listed says whether it has `bundle.json`.

        Raises:
            StoreError: If it cannot be asked.
        """
        ...

    def size(self, path: str) -> int:
        """Return how many bytes a file has.

        Raises:
            NotThereError: If there is no such file.
            StoreError: If it cannot be asked.
        """
        ...

    def read(self, path: str, offset: int, take: Take) -> None:
        """Read a file from an offset to its end.

        Args:
            path: As `list` has it.
            offset: In bytes; the first byte that is wanted.
            take: Called with one piece after the other; what it raises ends the reading.

        Raises:
            NotThereError: If there is no such file.
            RangeError: If the store cannot begin there; nothing has been taken.
            StoreError: If it cannot be asked, breaks off, or is silent for too long.
        """
        ...


def read_bounded(store: Store, path: str, max_bytes: int) -> bytes:
    """Return a small file.

    Raises:
        StoreError: If it cannot be had, or is larger.
    """
    content = bytearray()

    def take(piece: bytes) -> None:
        content.extend(piece)
        if len(content) > max_bytes:
            raise StoreError(f"{named(store, path)}: more than {max_bytes} bytes")

    store.read(path, 0, take)
    return bytes(content)


def named(store: Store, path: str) -> str:
    """Return what messages call a file."""
    return f"{store.address.rstrip('/')}/{path}" if path else store.address


MODEL_FILE = "model.toml"


@dataclass(frozen=True, slots=True)
class Found:
    """A bundle in a store.

    Attributes:
        folder: Its path below the address, empty for the address itself.
        model: Name of the folder of versions that it lies in; empty where it lies in none.
        version: Name of its own folder there; empty likewise.
    """

    folder: str
    model: str = ""
    version: str = ""

    def path(self, file: str) -> str:
        """Return the path of one of its files, as the store has it."""
        return f"{self.folder}/{file}" if self.folder else file

    def check(self, place: str) -> None:
        """Refuse names that no folder of models may have.

        Args:
            place: What messages call it.

        Raises:
            BundleError: If it has one.
        """
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
    """Return the bundles, in natural order; what is hidden or lies deeper is left alone.

    Args:
        paths: Of files, relative to the address.
        address: For messages.

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
