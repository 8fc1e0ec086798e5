"""Object stores and web servers as stores, through obstore: S3, Google Cloud Storage, Azure Blob Storage, HTTP.

obstore finds credentials, endpoints and proxies where each provider's own tools do; see `address`.
"""

import contextlib
import queue
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
import obstore.store
from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, PreconditionError, UnauthenticatedError

from dragoman.export.fields import one_line
from dragoman.server.stores.address import WEB_SCHEMES, Address, client_options, object_options
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
_MAX_PIECES_AHEAD = 4
_POLL_SECONDS = 0.1
_LEAVING_SECONDS = 1.0
_RETRY_SECONDS = 10.0
# Longest request of one file, continued by another; ends abandoned threads that read from a very slow store.
_READ_SECONDS = 3600.0
# Cloud metadata addresses, the last source of credentials: in an error they mean that there are none.
_METADATA_HOSTS = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")
_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z -]*)")

# Possible secrets in an address: user and password, and the query.
_SECRET = re.compile(r"(?<=://)[^/?#\s]*@|\?\S*")

# Parts of a message that differ between attempts.
_VARYING = re.compile(r" in [\d.]+[nµm]?s\b(, after \d+ retries, max_retries: \d+, retry_timeout: \S+)? *")

_STORES: Any = {
    "s3": obstore.store.S3Store,
    "gs": obstore.store.GCSStore,
    "az": obstore.store.AzureStore,
    "https": obstore.store.HTTPStore,
    "http": obstore.store.HTTPStore,
}

T = TypeVar("T")


def open_bucket(address: Address) -> "Opened":
    """Return obstore's own store of an object address, to be read and written; raises as `ObjectStore`."""
    options = object_options(address)
    try:
        client = client_options(address, SILENCE_SECONDS, _READ_SECONDS)
        store: Opened = _STORES[address.scheme].from_url(address.text, client_options=client, **options)
    except (BaseError, ValueError) as error:
        raise StoreError(f"{address.text}: {_reason(error)}") from error
    return store


class ObjectStore:
    """A prefix of a bucket, or a folder of a web server, as a `Store`."""

    def __init__(self, address: Address, silence_seconds: float = SILENCE_SECONDS) -> None:
        """Open an address, without a request; raises `InputError` for settings or credentials, `StoreError` for the address."""
        self._address = address.text
        self._is_web = address.scheme in WEB_SCHEMES
        # WebDAV lists paths from the server's root, the others below the address.
        self._listed_before = f"{unquote(urlsplit(address.text).path).strip('/')}/" if self._is_web else ""
        self._silence_seconds = silence_seconds
        retrying = {
            "max_retries": _MAX_RETRIES,
            "retry_timeout": timedelta(seconds=min(_RETRY_SECONDS, silence_seconds)),
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1), "base": 2},
        }
        options: dict[str, Any] = {"retry_config": retrying, **object_options(address)}

        # The first client is for short requests, the second for reading files.
        limits = silence_seconds + 1, max(_READ_SECONDS, silence_seconds + 1)
        clients = [client_options(address, silence_seconds, limit) for limit in limits]
        opened: list[Opened] = []
        try:
            for client in clients:
                opened.append(_STORES[address.scheme].from_url(address.text, client_options=client, **options))
        except (BaseError, ValueError) as error:
            raise StoreError(f"{address.text}: {_reason(error)}") from error
        self._asked, self._read = opened

    @property
    def address(self) -> str:
        return self._address

    def list(self) -> Listing:
        """Return the files; for a web server without WebDAV, `bundle.json` if present."""
        if self._is_web:
            try:
                return Listing({"bundle.json": _stamp(self._head("bundle.json"))}, self._address)
            except NotThereError:
                pass
        stamps: dict[str, str] = {}
        with self._errors(""):
            for found in self._wait_for(lambda: obstore.list(self._asked), ""):
                stamps.update((each["path"].removeprefix(self._listed_before), _stamp(each)) for each in found)
                if len(stamps) > MAX_LISTED_FILES:
                    raise StoreError(f"{self._address}: more than {MAX_LISTED_FILES} files")
        return Listing(stamps, self._address)

    def size(self, path: str) -> int:
        return int(self._head(path)["size"])

    def read(self, path: str, offset: int, take: Take) -> None:

        def pieces() -> Iterator[bytes]:
            found = obstore.get(self._read, path, options={"range": {"offset": offset}} if offset else {})
            if found.range[0] != offset:
                raise RangeError(f"{self._address}/{path}: begins at byte {found.range[0]} where {offset} was asked for")
            for piece in found.stream(min_chunk_size=LEAST_BYTES):
                yield bytes(piece)

        with self._errors(path), contextlib.closing(self._wait_for(pieces, path)) as coming:
            for piece in coming:
                take(piece)

    def _head(self, path: str) -> Any:
        with self._errors(path):
            (found,) = self._wait_for(lambda: iter([obstore.head(self._asked, path)]), path)
        return found

    def _wait_for(self, produce: Callable[[], Iterable[T]], path: str) -> Generator[T, None, None]:
        """Yield items produced on a thread (obstore's coroutines may outlive the interpreter), abandoned when too slow."""
        found: queue.Queue[Callable[[], T]] = queue.Queue(_MAX_PIECES_AHEAD)
        is_left = threading.Event()

        def offer(item: Callable[[], T]) -> bool:
            while not is_left.is_set():
                with contextlib.suppress(queue.Full):
                    found.put(item, timeout=_POLL_SECONDS)
                    return True
            return False

        def work() -> None:
            try:
                for item in produce():
                    if not offer(partial(_give, item)):
                        return
                offer(partial(_raise, _EndedError()))
            except BaseException as error:  # raised again by the caller
                offer(partial(_raise, error))

        thread = threading.Thread(target=work, name="store", daemon=True)
        thread.start()
        try:
            while True:
                try:
                    come = found.get(timeout=self._silence_seconds)
                except queue.Empty:
                    name = f"{self._address}/{path}" if path else self._address
                    raise SilentError(f"{name}: silent for {self._silence_seconds:g} seconds") from None
                yield come()
        except _EndedError:
            return
        finally:
            is_left.set()
            thread.join(_LEAVING_SECONDS)  # or the library might return after the end of the interpreter

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Map the library's errors to `StoreError`."""
        name = f"{self._address}/{path}" if path else self._address
        try:
            yield
        except NotSupportedError as error:
            raise RangeError(f"{name}: the server does not give parts of files") from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise StoreError(f"{name}: access denied: {_reason(error)}") from error
        except PreconditionError as error:
            raise StoreError(f"{name}: has changed while it was read") from error
        except FileNotFoundError as error:
            if error.errno is not None:
                raise  # a local file's error
            raise NotThereError(f"{name}: no such file") from error
        except BaseError as error:
            status = _STATUS.search(str(error))
            if status is not None and status[1] == "416":
                raise RangeError(f"{name}: is shorter") from error
            if status is not None and status[1] == "404":
                raise NotThereError(f"{name}: no such place") from error
            if self._is_web and not path:
                raise NotThereError(f"{name}: has no bundle.json, and cannot be listed: {_reason(error)}") from error
            raise StoreError(f"{name}: {_reason(error)}") from error


class _EndedError(Exception):
    """The producer has ended."""


def _give(item: T) -> T:
    return item


def _raise(error: BaseException) -> NoReturn:
    raise error


def _stamp(found: Any) -> str:
    return f"{found['e_tag']}-{found['size']}-{found['last_modified']}"


def _reason(error: Exception) -> str:
    """Return a short line for a library's error, without possible secrets of an address."""
    text = str(error).partition("\n")[0]
    status = _STATUS.search(text)
    if status is not None:
        return f"the server answers {status[1]} {status[2].strip()}".strip()
    if any(host in text for host in _METADATA_HOSTS):
        return "no credentials: none in the environment, and no cloud gives this machine any"
    return one_line(_VARYING.sub("", _SECRET.sub("", text)), 300)
