"""Local folders as stores, and the choice of a store by its address; libraries of other stores are imported on demand."""

import os
from pathlib import Path

from dragoman.model.files import leads_out, open_regular
from dragoman.server.stores.address import OBJECT_SCHEMES, WEB_SCHEMES, Address
from dragoman.server.stores.store import (
    MAX_LISTED_FILES,
    SILENCE_SECONDS,
    Listing,
    NotThereError,
    RangeError,
    Store,
    StoreError,
    Take,
)

MAX_DEPTH = 12
_PIECE_BYTES = 1 << 20


def open_store(address: Address, silence_seconds: float = SILENCE_SECONDS) -> Store:
    """Return the store of an address, without connecting.

    Raises:
        InputError: If settings or credentials cannot be used.
        StoreError: If the store's library refuses the address.
        ModuleNotFoundError: If that library is not installed.
    """
    if address.scheme in (*OBJECT_SCHEMES, *WEB_SCHEMES):
        from dragoman.server.stores.objects import ObjectStore

        return ObjectStore(address, silence_seconds)
    if address.scheme == "oci":
        from dragoman.server.stores.registry import RegistryStore

        return RegistryStore(address, silence_seconds)
    return FolderStore(Path(address.text))


class FolderStore:
    """Files below a folder; links that lead out of it are not followed."""

    def __init__(self, folder: Path, address: str = "") -> None:
        """Use a folder, which need not exist yet; `address` is its name in messages, by default its path."""
        self._folder = folder
        self._address = address or str(folder)

    @property
    def address(self) -> str:
        """See `Store`."""
        return self._address

    def list(self) -> Listing:
        """See `Store`; hidden files are left out."""
        if not self._folder.is_dir():
            raise NotThereError(f"{self.address}: {'not a folder' if self._folder.exists() else 'no such folder'}")
        stamps: dict[str, str] = {}
        try:
            self._add(self._folder, "", stamps, 0)
        except OSError as error:
            raise StoreError(f"{error.filename or self.address}: {error.strerror}") from error
        return Listing(stamps, self.address)

    def size(self, path: str) -> int:
        """See `Store`."""
        location = self._folder / path
        try:
            return location.stat().st_size
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotThereError(f"{location}: no such file") from error
        except OSError as error:
            raise StoreError(f"{location}: {error.strerror}") from error

    def read(self, path: str, offset: int, take: Take) -> None:
        """See `Store`."""
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
                raise  # from `take`
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
                        continue  # a link to a folder around it
                    self._add(folder / entry.name, f"{prefix}{entry.name}/", stamps, depth + 1)
                elif entry.is_file():
                    found = entry.stat()
                    stamps[prefix + entry.name] = f"{found.st_ino}-{found.st_size}-{found.st_mtime_ns}"
                    if len(stamps) > MAX_LISTED_FILES:
                        raise StoreError(f"{self.address}: more than {MAX_LISTED_FILES} files")
