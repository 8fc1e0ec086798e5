"""OCI registry artefact as a store, through oras: each file is a layer whose title is its path.

Listing resolves a tag to a manifest's digest, checks its SHA-256, and reads the files' blobs from it. Credentials come from
Docker's configuration and its helpers.
"""

import contextlib
import hashlib
import io
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any, Final

import oras.auth
import oras.auth.base
import oras.container
import requests
import urllib3.exceptions
from requests.adapters import HTTPAdapter

from dragoman.export.fields import one_line
from dragoman.server.stores.address import Address
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

MAX_MANIFEST_BYTES: Final = 4 << 20
TITLE: Final = "org.opencontainers.image.title"
_FOLDER_MARK: Final = "io.deis.oras.content.unpack"
_MEDIA_TYPES: Final = "application/vnd.oci.image.manifest.v1+json", "application/vnd.docker.distribution.manifest.v2+json"
_PIECE_BYTES: Final = 1 << 20


class RegistryStore:
    """The files of one artefact as a `Store`."""

    def __init__(self, address: Address, silence_seconds: float = SILENCE_SECONDS) -> None:
        self._address = address
        self._silence_seconds = silence_seconds
        self._container = oras.container.Container(address.text.removeprefix("oci://"))
        self._scheme = "http" if address.is_loopback else "https"
        self._session: tuple[requests.Session, oras.auth.base.AuthBackend] | None = None
        self._shown: dict[str, str] = {}
        self._blobs: dict[str, str] = {}
        # oras' log repeats ours.
        logging.getLogger("oras").setLevel(logging.CRITICAL + 1)

    @property
    def address(self) -> str:
        return self._address.text

    def list(self) -> Listing:
        reference = self._container.digest or self._container.tag
        content = bytearray()

        def take(piece: bytes) -> None:
            content.extend(piece)
            if len(content) > MAX_MANIFEST_BYTES:
                raise StoreError(f"{self.address}: its manifest has more than {MAX_MANIFEST_BYTES} bytes")

        self._get(self._container.manifest_url(reference), {"Accept": ", ".join(_MEDIA_TYPES)}, 0, take, self.address)
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if self._container.digest not in (None, digest):
            raise StoreError(f"{self.address}: the registry gives a manifest of digest {digest}")
        blobs = self._read_manifest(bytes(content))
        self._blobs = blobs
        host_and_path = f"{self._container.registry}/{self._container.api_prefix}"
        return Listing(blobs, f"oci://{host_and_path}@{digest}")

    def size(self, path: str) -> int:
        raise StoreError(f"{self.address}/{path}: an artefact's files are read whole, by their digests")

    def read(self, path: str, offset: int, take: Take) -> None:
        if not self._blobs:
            self.list()
        name = f"{self.address}/{path}"
        if path not in self._blobs:
            raise NotThereError(f"{name}: no such file")
        self._get(self._container.get_blob_url(self._blobs[path]), {}, offset, take, name)

    def _read_manifest(self, content: bytes) -> dict[str, str]:
        """Return the digest of each file in a manifest."""
        try:
            manifest = json.loads(content)
            layers = manifest["layers"]
            found = {}
            for layer in layers:
                annotations = layer.get("annotations") or {}
                title = annotations.get(TITLE)
                if title is None:
                    continue
                if annotations.get(_FOLDER_MARK) == "true":
                    raise StoreError(f"{self.address}: {one_line(str(title))} is a packed folder; push its files one by one")
                if title in found:
                    raise StoreError(f"{self.address}: two files are called {one_line(str(title))}")
                found[title] = layer["digest"]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise StoreError(f"{self.address}: not the manifest of an artefact") from error
        if len(found) > MAX_LISTED_FILES or not all(
            _is_digest(digest) and isinstance(title, str) for title, digest in found.items()
        ):
            raise StoreError(f"{self.address}: not the manifest of an artefact")
        if not found:
            raise StoreError(f"{self.address}: no file in it has a title ({TITLE}), as `oras push` gives")
        return found

    def _get(self, place: str, headers: dict[str, str], offset: int, take: Take, name: str) -> None:
        """Read a resource of the registry from an offset."""
        asked = headers | {"Accept-Encoding": "identity"} | ({"Range": f"bytes={offset}-"} if offset else {})
        with self._errors(name), self._ask(f"{self._scheme}://{place}", asked) as answer:
            _check_status(answer, offset, name)
            self._pass_on(answer, take, name)

    def _pass_on(self, answer: requests.Response, take: Take, name: str) -> None:
        """Pass the body to `take`; raise `SilentError` if it is too slow."""
        since, waiting = monotonic(), 0
        while piece := answer.raw.read1(_PIECE_BYTES):
            take(piece)
            waiting += len(piece)
            now = monotonic()
            if waiting >= LEAST_BYTES:
                since, waiting = now, 0
            elif now - since > self._silence_seconds:
                raise SilentError(f"{name}: silent for {self._silence_seconds:g} seconds")

    def _ask(self, url: str, headers: Mapping[str, str]) -> requests.Response:
        """Send a request, and again with credentials if refused."""
        session, auth = self._opened()
        answer: requests.Response = session.get(url, headers={**headers, **self._shown}, stream=True)
        if answer.status_code not in (401, 403):
            return answer
        answer.close()
        try:
            asked, is_known = auth.authenticate_request(answer, dict(headers), refresh=bool(self._shown))
        except (AttributeError, KeyError, ValueError) as error:  # no credentials, or in a form unknown to oras
            raise _DeniedError from error
        if not is_known:
            raise _DeniedError
        self._shown = {"Authorization": asked["Authorization"]}
        return session.get(url, headers=asked, stream=True)

    def _opened(self) -> tuple[requests.Session, oras.auth.base.AuthBackend]:
        """Return a session and its authentication backend, created once."""
        if self._session is not None:
            return self._session
        session, authority = requests.Session(), os.environ.get("SSL_CERT_FILE") or True
        session.verify = authority
        session.auth = lambda request: request  # or .netrc would replace Docker's configuration
        session.mount("https://", _Limited(self._silence_seconds))
        session.mount("http://", _Limited(self._silence_seconds) if self._scheme == "http" else _Refusing())
        with session.get(f"{self._scheme}://{self._container.registry}/v2/", stream=True) as answer:
            is_basic = answer.headers.get("WWW-Authenticate", "").lower().startswith("basic")
        auth = oras.auth.get_auth_backend("basic" if is_basic else "token", session, self._scheme == "http", tls_verify=authority)
        auth.load_configs(self._container, [str(file) for file in _configurations(os.environ)])
        self._session = session, auth
        return self._session

    @contextlib.contextmanager
    def _errors(self, name: str) -> Iterator[None]:
        """Map the libraries' errors to `StoreError`."""
        try:
            yield
        except StoreError:
            raise
        except (requests.exceptions.Timeout, urllib3.exceptions.TimeoutError) as error:
            raise SilentError(f"{name}: silent for {self._silence_seconds:g} seconds") from error
        except requests.exceptions.SSLError as error:
            raise StoreError(f"{name}: TLS: {_innermost(error)}") from error
        except (requests.exceptions.RequestException, ValueError) as error:  # ValueError from redirections to invalid addresses
            raise StoreError(f"{name}: {_innermost(error)}") from error
        except _DeniedError as error:
            raise StoreError(f"{name}: access denied, and Docker's configuration has no credentials that help") from error
        except urllib3.exceptions.HTTPError as error:
            raise StoreError(f"{name}: broke off: {_innermost(error)}") from error


class _DeniedError(Exception):
    """The registry requires credentials that are not configured."""


class _Limited(HTTPAdapter):
    """Adapter with timeouts and bounded bodies of redirections and tokens, which requests and oras lack."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        super().__init__()

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:  # type: ignore[override]
        answer = super().send(request, **options | {"timeout": (min(10.0, self._seconds), self._seconds)})
        if answer.is_redirect:
            answer.raw.close()  # or requests would read the body
        elif not options.get("stream"):
            content = answer.raw.read(MAX_MANIFEST_BYTES + 1, decode_content=True)
            answer.raw.close()
            if len(content) > MAX_MANIFEST_BYTES:
                raise requests.exceptions.RequestException(f"more than {MAX_MANIFEST_BYTES} bytes where a token should be")
            answer.raw = io.BytesIO(content)
        return answer


class _Refusing(HTTPAdapter):
    """Adapter that refuses redirections from TLS to an address without it."""

    def send(self, request: requests.PreparedRequest, **_: Any) -> requests.Response:  # type: ignore[override]
        raise requests.exceptions.RequestException("leads to an address without TLS")


def _check_status(answer: requests.Response, offset: int, name: str) -> None:
    """Raise for a response that is not the requested range."""
    status = answer.status_code
    if status == 404:
        raise NotThereError(f"{name}: the registry does not have it")
    if status in (401, 403):
        raise StoreError(f"{name}: access denied: the registry answers {status}")
    if status == 416:
        raise RangeError(f"{name}: is shorter")
    if offset and status == 200:
        raise RangeError(f"{name}: the registry does not give parts of files")
    if status != (206 if offset else 200):
        raise StoreError(f"{name}: the registry answers {status} {one_line(answer.reason or '', 80)}".rstrip())
    if offset and not answer.headers.get("Content-Range", "").startswith(f"bytes {offset}-"):
        raise RangeError(f"{name}: begins elsewhere than at byte {offset}")


def _configurations(environment: Mapping[str, str]) -> list[Path]:
    """Return configuration files besides Docker's default, which oras reads itself."""
    named = []
    if folder := environment.get("DOCKER_CONFIG"):
        named.append(Path(folder) / "config.json")
    if file := environment.get("REGISTRY_AUTH_FILE"):
        named.append(Path(file))
    return [file for file in named if file.is_file()]


def _is_digest(text: object) -> bool:
    prefix, _, digits = text.partition(":") if isinstance(text, str) else ("", "", "")
    return prefix == "sha256" and len(digits) == 64 and set(digits) <= set("0123456789abcdef")


def _innermost(error: BaseException) -> str:
    """Return the innermost cause in one line, without possible secrets of an address."""
    while (inner := error.__cause__ or error.__context__ or next(filter(_is_error, error.args), None)) is not None:
        error = inner
    reason = getattr(error, "reason", None)
    if isinstance(reason, BaseException):
        return _innermost(reason)
    said = getattr(error, "strerror", None) or str(error).partition("\n")[0] or type(error).__name__
    return one_line(re.sub(r" object at 0x[0-9a-f]+|\?\S*", "", said), 200)


def _is_error(found: object) -> bool:
    return isinstance(found, BaseException)
