"""Object stores and web servers as stores, through obstore: S3, Google Cloud Storage, Azure Blob Storage, HTTP.

Credentials, endpoints and proxies are found by obstore where each provider's own tools look for them; see `credentials`.
"""

import asyncio
import re
import weakref
from collections.abc import Coroutine
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
import obstore.store
from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, PreconditionError, UnauthenticatedError

from dragoman.export.fields import one_line
from dragoman.server.stores.address import WEB_SCHEMES, Address
from dragoman.server.stores.credentials import client_options, object_options
from dragoman.server.stores.store import (
    LEAST_BYTES,
    MAX_LISTED_FILES,
    SILENCE_SECONDS,
    Listing,
    NotThereError,
    RangeError,
    SilentError,
    StoreError,
    Take,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore as Opened

_MAX_RETRIES = 2
_RETRY_SECONDS = 10.0
# Sign of credentials that were looked for everywhere: the address of the metadata of a cloud's machine.
_METADATA_HOSTS = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")
_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z -]*)")

# What differs from one attempt to the next, and would make a reason a new one.
_VARYING = re.compile(r" in [\d.]+[nµm]?s\b(, after \d+ retries, max_retries: \d+, retry_timeout: \S+)? *")

_STORES: Any = {
    "s3": obstore.store.S3Store,
    "gs": obstore.store.GCSStore,
    "az": obstore.store.AzureStore,
    "https": obstore.store.HTTPStore,
    "http": obstore.store.HTTPStore,
}

T = TypeVar("T")


class ObjectStore:
    """What lies below a prefix of a bucket, or below a folder of a web server."""

    def __init__(self, address: Address, silence_seconds: float = SILENCE_SECONDS) -> None:
        """Take an address; nothing is asked for yet.

        Args:
            address: Of a bucket, or of a web server.
            silence_seconds: How long the store may be silent.

        Raises:
            InputError: If the settings or credentials that are there cannot be used.
            StoreError: If the library refuses the address.
        """
        self._address = address.text
        self._is_web = address.scheme in WEB_SCHEMES
        # WebDAV lists by the path on the server, the others by that below the address.
        self._listed_before = f"{unquote(urlsplit(address.text).path).strip('/')}/" if self._is_web else ""
        self._silence_seconds = silence_seconds
        # One loop for all that is asked: what was given up may still report to it. At the end of the process it stays open, as nobody
        # listens any more.
        loop = asyncio.new_event_loop()
        self._runner = asyncio.Runner(loop_factory=lambda: loop)
        weakref.finalize(self, loop.close).atexit = False
        retrying = {
            "max_retries": _MAX_RETRIES,
            "retry_timeout": timedelta(seconds=min(_RETRY_SECONDS, silence_seconds)),
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1), "base": 2},
        }
        options: dict[str, Any] = {"client_options": client_options(address, silence_seconds), "retry_config": retrying}
        options |= object_options(address)
        try:
            self._store: Opened = _STORES[address.scheme].from_url(address.text, **options)
        except (BaseError, ValueError) as error:
            raise StoreError(f"{address.text}: {_reason(error)}") from error

    @property
    def address(self) -> str:
        """As it was given."""
        return self._address

    def list(self) -> Listing:
        """Return the files; of a web server without WebDAV, whether it has `bundle.json`.

        Raises:
            StoreError: If it cannot be asked.
        """
        if self._is_web:
            try:
                found = self._run(self._head("bundle.json"), "bundle.json")
                return Listing({"bundle.json": _stamp(found)}, self._address)
            except NotThereError:
                pass
        return Listing(self._run(self._list(), ""), self._address)

    def size(self, path: str) -> int:
        """See `Store`."""
        return int(self._run(self._head(path), path)["size"])

    def read(self, path: str, offset: int, take: Take) -> None:
        """See `Store`."""
        self._run(self._read(path, offset, take), path)

    async def _head(self, path: str) -> Any:
        return await self._within(obstore.head_async(self._store, path))

    async def _list(self) -> dict[str, str]:
        stamps: dict[str, str] = {}
        stream = obstore.list(self._store)
        while True:
            try:
                found = await self._within(anext(stream))
            except StopAsyncIteration:
                return stamps
            stamps.update((each["path"].removeprefix(self._listed_before), _stamp(each)) for each in found)
            if len(stamps) > MAX_LISTED_FILES:
                raise StoreError(f"{self._address}: more than {MAX_LISTED_FILES} files")

    async def _read(self, path: str, offset: int, take: Take) -> None:
        found = await self._within(obstore.get_async(self._store, path, options={"range": {"offset": offset}} if offset else {}))
        if found.range[0] != offset:
            raise RangeError(f"{self._address}/{path}: begins at byte {found.range[0]} where {offset} was asked for")
        stream = found.stream(min_chunk_size=LEAST_BYTES)
        while True:
            try:
                piece = await self._within(anext(stream))
            except StopAsyncIteration:
                return
            take(bytes(piece))

    async def _within(self, waiting: Any) -> Any:
        """Wait for an answer, but for no longer than a store may be silent."""
        async with asyncio.timeout(self._silence_seconds):
            return await waiting

    def _run(self, work: Coroutine[Any, Any, T], path: str) -> T:
        """Run to the end; errors of the library become ours."""
        name = f"{self._address}/{path}" if path else self._address
        try:
            return self._runner.run(work)
        except TimeoutError as error:
            raise SilentError(f"{name}: silent for {self._silence_seconds:g} seconds") from error
        except FileNotFoundError as error:
            raise NotThereError(f"{name}: no such file") from error
        except NotSupportedError as error:
            raise RangeError(f"{name}: the server does not give parts of files") from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise StoreError(f"{name}: access denied: {_reason(error)}") from error
        except PreconditionError as error:
            raise StoreError(f"{name}: has changed while it was read") from error
        except BaseError as error:
            status = _STATUS.search(str(error))
            if status is not None and status[1] == "416":
                raise RangeError(f"{name}: is shorter") from error
            if status is not None and status[1] == "404":
                raise NotThereError(f"{name}: no such place") from error
            if self._is_web and not path:
                raise NotThereError(f"{name}: has no bundle.json, and cannot be listed: {_reason(error)}") from error
            raise StoreError(f"{name}: {_reason(error)}") from error


def _stamp(found: Any) -> str:
    return f"{found['e_tag']}-{found['size']}-{found['last_modified']}"


def _reason(error: Exception) -> str:
    """Return one short line of what the library says, without what may be a secret in an address."""
    text = str(error).partition("\n")[0]
    status = _STATUS.search(text)
    if status is not None:
        return f"the server answers {status[1]} {status[2].strip()}".strip()
    if any(host in text for host in _METADATA_HOSTS):
        return "no credentials: none in the environment, and no cloud gives this machine any"
    return one_line(_VARYING.sub("", re.sub(r"\?\S*", "", text)), 300)
