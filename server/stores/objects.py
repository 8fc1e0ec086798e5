"""Object stores and web servers as stores, through obstore: S3, Google Cloud Storage, Azure Blob Storage, HTTP.

obstore finds credentials, endpoints and proxies in each provider's environment variables, service account files and the metadata of
the machine. Added here: AWS profiles (read by boto3), Google's variable for emulators, endpoints without TLS where one is set, and
for web servers a token or `.netrc`.
"""

import base64
import contextlib
import netrc
import os
import queue
import re
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, TypeVar
from urllib.parse import unquote, urlsplit

import obstore
import obstore.store
from obstore.exceptions import BaseError, NotSupportedError, PermissionDeniedError, PreconditionError, UnauthenticatedError

from dragoman.export.fields import one_line
from dragoman.model.errors import InputError
from dragoman.server.stores.address import OBJECT_SCHEMES, WEB_SCHEMES, Address, host_of
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

TOKEN_VARIABLE: Final = "DRAGOMAN_STORE_TOKEN"
_ENDPOINT_VARIABLES: Final = (
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "STORAGE_EMULATOR_HOST",
)
# With any of these no profile is needed.
_AWS_VARIABLES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_CONNECT_SECONDS: Final = 10.0
_MAX_RETRIES = 2
_MAX_PIECES_AHEAD = 4
_POLL_SECONDS = 0.1
_LEAVING_SECONDS = 1.0
_RETRY_SECONDS = 10.0
# Of one file; a longer read is continued by another request. Ends threads that were abandoned with a slow store.
_READ_SECONDS = 3600.0
# Hosts of cloud metadata: asked last for credentials.
_METADATA_HOSTS = ("169.254.169.254", "metadata.google.internal", "169.254.170.2")
_STATUS = re.compile(r"status code: (\d{3}) ?([A-Za-z -]*)")

# Secrets of an address: user and password, and the query.
_SECRET = re.compile(r"(?<=://)[^/?#\s]*@|\?\S*")

# Parts of a reason that differ between attempts.
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
    """Files below a prefix of a bucket, or below a folder of a web server."""

    def __init__(self, address: Address, silence_seconds: float = SILENCE_SECONDS) -> None:
        """Prepare access, without connecting.

        Args:
            address: Address of a bucket or a web server.
            silence_seconds: Longest silence of the store.

        Raises:
            InputError: If settings or credentials cannot be used.
            StoreError: If the library refuses the address.
        """
        self._address = address.text
        self._is_web = address.scheme in WEB_SCHEMES
        # WebDAV lists by the path on the server, the others by that below the address.
        self._listed_before = f"{unquote(urlsplit(address.text).path).strip('/')}/" if self._is_web else ""
        self._silence_seconds = silence_seconds
        retrying = {
            "max_retries": _MAX_RETRIES,
            "retry_timeout": timedelta(seconds=min(_RETRY_SECONDS, silence_seconds)),
            "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=1), "base": 2},
        }
        options: dict[str, Any] = {"retry_config": retrying, **object_options(address)}

        # Metadata requests answer at once; reads of files may last.
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
        """See `Store`."""
        return self._address

    def list(self) -> Listing:
        """See `Store`; web servers without WebDAV cannot be listed."""
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
        """See `Store`."""
        return int(self._head(path)["size"])

    def read(self, path: str, offset: int, take: Take) -> None:
        """See `Store`."""

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
        """Yield items produced on a thread, which is abandoned when it is silent for too long or the consumer stops.

        (The library's own coroutines report from its threads, perhaps after the end of the interpreter.)
        """
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
            except BaseException as error:  # handled by the consumer
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
            thread.join(_LEAVING_SECONDS)  # it must not return from the library after the end of the interpreter

    @contextlib.contextmanager
    def _errors(self, path: str) -> Iterator[None]:
        """Convert the library's errors."""
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
                raise  # a local file
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
    """The end of a thread's items."""


def _give(item: T) -> T:
    return item


def _raise(error: BaseException) -> NoReturn:
    raise error


def _stamp(found: Any) -> str:
    return f"{found['e_tag']}-{found['size']}-{found['last_modified']}"


def _reason(error: Exception) -> str:
    """Return the library's reason in one short line, without secrets of an address."""
    text = str(error).partition("\n")[0]
    status = _STATUS.search(text)
    if status is not None:
        return f"the server answers {status[1]} {status[2].strip()}".strip()
    if any(host in text for host in _METADATA_HOSTS):
        return "no credentials: none in the environment, and no cloud gives this machine any"
    return one_line(_VARYING.sub("", _SECRET.sub("", text)), 300)


def client_options(address: Address, silence_seconds: float, request_seconds: float) -> dict[str, Any]:
    """Return obstore's options of connections to an address.

    Args:
        address: Address of a bucket or a web server.
        silence_seconds: Longest silence of the store.
        request_seconds: Longest duration of a request.

    Raises:
        InputError: If a token or a file of certificates cannot be used.
    """
    options: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=min(_CONNECT_SECONDS, silence_seconds)),
        "timeout": timedelta(seconds=request_seconds),
        "read_timeout": timedelta(seconds=silence_seconds + 1),
        "allow_http": address.scheme == "http" or (address.scheme in OBJECT_SCHEMES and _has_plain_endpoint(os.environ)),
    }
    if authority := os.environ.get("SSL_CERT_FILE"):
        try:
            options["root_certificate"] = Path(authority).read_bytes()
        except OSError as error:
            raise InputError(f"SSL_CERT_FILE: {authority}: {error.strerror}") from error
    if address.scheme in WEB_SCHEMES and (authorization := _authorization(address)):
        options["default_headers"] = {"authorization": authorization}
    return options


def object_options(address: Address) -> dict[str, Any]:
    """Return obstore's options of a bucket.

    Raises:
        InputError: If an AWS profile is set and cannot be used.
    """
    if address.scheme == "gs" and (emulator := os.environ.get("STORAGE_EMULATOR_HOST")):
        url = emulator if "://" in emulator else f"http://{emulator}"
        return {"config": {"base_url": url, "skip_signature": True}}
    if address.scheme == "s3" and _wants_profile(os.environ):
        return _profile()
    return {}


def _has_plain_endpoint(environment: Mapping[str, str]) -> bool:
    if any(environment.get(name, "").startswith("http://") for name in _ENDPOINT_VARIABLES):
        return True
    emulator = environment.get("STORAGE_EMULATOR_HOST", "https://")
    return "://" not in emulator or environment.get("AZURE_STORAGE_USE_EMULATOR", "").lower() in ("1", "true")


def _wants_profile(environment: Mapping[str, str]) -> bool:
    if environment.get("AWS_PROFILE"):
        return True
    if any(environment.get(name) for name in _AWS_VARIABLES):
        return False
    files = (
        environment.get("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
        environment.get("AWS_CONFIG_FILE", "~/.aws/config"),
    )
    return any(Path(os.path.expanduser(file)).is_file() for file in files)


def _profile() -> dict[str, Any]:
    """Return credentials of the AWS profile, as AWS's own tools choose it."""
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider
    except ModuleNotFoundError:
        raise InputError("AWS profiles are read by boto3, which is not installed: pip install boto3") from None
    from botocore.exceptions import BotoCoreError

    try:
        provider = Boto3CredentialProvider()
    except (BotoCoreError, ValueError) as error:
        raise InputError(f"AWS profile {os.environ.get('AWS_PROFILE', 'default')!r}: {error}") from error
    return {"credential_provider": provider}


def _authorization(address: Address) -> str | None:
    """Return the `Authorization` header for a web server: of a token variable, or of `.netrc`."""
    if token := os.environ.get(TOKEN_VARIABLE):
        if not token.isascii() or not token.isprintable() or " " in token:
            raise InputError(f"{TOKEN_VARIABLE}: not a bearer token")
        return f"Bearer {token}"
    file = Path(os.environ.get("NETRC") or os.path.expanduser("~/.netrc"))
    if not file.is_file():
        return None
    try:
        found = netrc.netrc(str(file)).authenticators(host_of(address.text))
    except (OSError, netrc.NetrcParseError, UnicodeDecodeError) as error:
        raise InputError(f"{file}: cannot be read as .netrc ({type(error).__name__})") from error
    if found is None:
        return None
    return "Basic " + base64.b64encode(f"{found[0]}:{found[2] or ''}".encode()).decode("ascii")
