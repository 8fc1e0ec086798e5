"""What a store is to those who read bundles from one, and how it fails. It knows nothing of bundles."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

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
