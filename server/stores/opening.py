"""From an address to the store that it is of. The libraries of a store are loaded when somebody uses one."""

from pathlib import Path

from dragoman.server.stores.address import OBJECT_SCHEMES, WEB_SCHEMES, Address
from dragoman.server.stores.folder import FolderStore
from dragoman.server.stores.store import SILENCE_SECONDS, Store


def open_store(address: Address, silence_seconds: float = SILENCE_SECONDS) -> Store:
    """Return the store of an address; nothing is asked of it yet.

    Raises:
        InputError: If settings or credentials that are there cannot be used.
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
