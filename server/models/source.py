"""Source of the models folder: a local folder, or the mirror of a store (`server/stores`)."""

import asyncio
import hashlib
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import structlog

from dragoman.export.bundle import BundleError
from dragoman.export.signing import Keys
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.models.discovery import FoundVersion, place_of_file
from dragoman.server.models.model_file import ModelFile, read_model_file
from dragoman.server.models.policy import wanted
from dragoman.server.stores.address import Address
from dragoman.server.stores.cache import Cache
from dragoman.server.stores.mirror import Mirror
from dragoman.server.stores.pull import CACHE_FOLDER, Order
from dragoman.server.stores.store import StoppedError, StoreError

# Spare versions beyond those of the policy, in case the newest is refused.
NUM_SPARE = 1
# Stores charge for requests, and versions come hours apart; SIGHUP makes the server read the store at once.
POLL_SECONDS = 30.0
# Cache of downloaded files, from which a version is rebuilt without the store.
CACHE_GIB = 20.0

log = structlog.get_logger("dragoman.stores")


class ModelSource:
    """The local models folder; `folder` is its path."""

    def __init__(self, config: ServerConfig, keys: Keys | None) -> None:
        """Resolve the folder or address `models`; raise `InputError` for an unusable address, setting or credential."""
        self._mirror: Mirror | None = None
        self._stopping, self._syncing = threading.Event(), asyncio.Lock()
        # Until the served versions are known, all count as served.
        self._is_used: Callable[[Path], bool] = lambda directory: True
        self._poll_seconds, self._files = POLL_SECONDS if config.models_poll_seconds else 0.0, config.model_files
        if isinstance(config.models, Path):
            self.folder = config.models
            return
        self.folder = default_folder(config.models)
        self._address = Address.parse(config.models)
        order = Order(Cache(self.folder / CACHE_FOLDER, CACHE_GIB), keys, is_stopped=self._stopping.is_set)
        try:
            self._mirror = Mirror(self._address, self.folder, order, self._choose, lambda directory: self._is_used(directory))
        except StoreError as error:
            raise ConfigError(f"models: {error}") from error
        except ModuleNotFoundError as error:
            raise ConfigError(f"models: {config.models}: {error.name} is not installed; install dragoman[stores]") from error

    @property
    def is_followed(self) -> bool:
        """Whether the folder mirrors a store."""
        return self._mirror is not None

    def fetch(self) -> None:
        """Mirror the store before the first scan; an earlier copy is enough if it does not answer.

        Raises:
            BundleError: If there is no bundle.
            StoreError: If this is because the store does not answer.
        """
        if self._mirror is None:
            return
        synced = self._mirror.sync()
        if not synced.reason:
            synced = self._mirror.sync()  # again, by the models' files, which may have arrived
        if not any(self.folder.glob("*/*/bundle.json")) and not any(self.folder.glob("*/bundle.json")):
            reasons = [synced.reason, *synced.problems.values()]
            message = "\n".join(filter(None, reasons)) or f"{self._address.text}: holds no bundle"
            raise StoreError(message) if synced.is_away else BundleError(message)

    async def follow(self, on_change: Callable[[], Awaitable[None]], is_used: Callable[[Path], bool]) -> None:
        """Mirror the store until cancelled; `is_used`, called on any thread, returns whether a directory may be served."""
        assert self._mirror is not None
        self._is_used = is_used
        try:
            while True:
                await asyncio.sleep(self._poll_seconds or 3600.0)
                if self._poll_seconds:
                    await self.sync(on_change)
        finally:
            self._stopping.set()

    async def sync(self, on_change: Callable[[], Awaitable[None]]) -> None:
        """Mirror the store once; without effect for a local folder."""
        if self._mirror is None:
            return
        try:
            async with self._syncing:
                synced = await asyncio.to_thread(self._mirror.sync)
        except StoppedError:
            return
        except Exception:  # for example no thread can be started; the next attempt may succeed
            log.exception("cannot follow the store")
            return
        if synced.is_changed:
            await on_change()

    def _choose(self, model: str, names: Sequence[str]) -> set[str]:
        """Return the versions that the model's policy wants, and spare ones."""
        directory, file = self.folder / model, ModelFile()
        try:
            if (path := place_of_file(directory, model, self._files)).exists():
                file = read_model_file(path)
        except ConfigError:  # the scan reports the error, and the previous file stays in use
            if here := {name for name in names if (directory / name).is_dir()}:
                return here
        found = [FoundVersion(name, self.folder / model / name, (0, 0, 0)) for name in names]
        chosen = {version.name for version in wanted(found, file).versions}
        older = [name for name in names if name not in chosen]
        return chosen | set(older[-NUM_SPARE:])


def default_folder(address: str) -> Path:
    """Return the default folder of an address, in the user's cache directory."""
    caches = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(caches) / "dragoman" / "models" / hashlib.sha256(address.encode()).hexdigest()[:16]
