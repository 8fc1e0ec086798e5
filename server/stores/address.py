"""Store addresses, and credentials that obstore does not find itself.

obstore reads providers' environment variables, service-account files and cloud metadata. Added here: AWS profiles (read by boto3),
Google's emulator variable, endpoints without TLS where configured, and for web servers a token or `.netrc`.
"""

import base64
import netrc
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from dragoman.model.errors import InputError

OBJECT_SCHEMES: Final = ("s3", "gs", "az")
WEB_SCHEMES: Final = ("https", "http")
SCHEMES: Final = (*OBJECT_SCHEMES, *WEB_SCHEMES, "oci")
ARCHIVE_SUFFIXES: Final = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tbz2", ".tar.xz", ".txz")

_OCI = re.compile(
    r"oci://(?P<host>[A-Za-z0-9.-]+(?::\d{1,5})?)/(?P<repository>[a-z0-9]+(?:[._/-]+[a-z0-9]+)*)"
    r"(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]{0,127}))?(?:@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://")
_LOOPBACK = re.compile(r"localhost|127(\.\d{1,3}){3}|\[::1\]")


class AddressError(InputError):
    """An invalid address; the message contains no secret of it."""


@dataclass(frozen=True, slots=True)
class Address:
    """Address of bundles: scheme (empty for a local folder), text without secrets, and host with port, or the bucket's name."""

    scheme: str
    text: str
    host: str

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse an address; raises `AddressError` if it is invalid."""
        if not text or "\0" in text or any(not char.isprintable() for char in text):
            raise AddressError("an address of bundles is a folder or SCHEME://…, in one line")
        found = _SCHEME.match(text)
        if found is None:
            return cls("", text, "")
        scheme = found[1].lower()
        if scheme == "file":
            raise AddressError(f"{text}: give the folder itself, without file://")
        if scheme not in SCHEMES:
            raise AddressError(f"{scheme}://: not a scheme that bundles come by: {', '.join(SCHEMES)}, or a folder")
        if scheme == "oci":
            return cls._oci(text)
        try:
            parts = urlsplit(text)
            host = parts.netloc if parts.port is None or scheme in WEB_SCHEMES else ""
        except ValueError:
            host, parts = "", urlsplit("")
        shown = text.partition("?")[0].partition("#")[0]
        if "@" in parts.netloc:
            raise AddressError(f"{scheme}://{parts.hostname}: an address holds no user and no password; see docs/models.md")
        if not host:
            raise AddressError(f"{shown}: lacks a {'bucket' if scheme in OBJECT_SCHEMES else 'host'}")
        if "?" in text or "#" in text:
            raise AddressError(f"{shown}: an address of bundles does not go on with '?' or '#'; see docs/models.md for credentials")
        url = f"{scheme}{text[len(scheme) :]}".rstrip("/")
        return cls(scheme, url, host)

    @classmethod
    def _oci(cls, text: str) -> "Address":
        found = _OCI.fullmatch(text)
        if found is None or not (found["tag"] or found["digest"]):
            shown = re.sub(r"(?<=//)[^/]*@", "", text.partition("?")[0])
            raise AddressError(f"{shown}: not oci://HOST/REPOSITORY:TAG or oci://HOST/REPOSITORY@sha256:DIGEST")
        return cls("oci", text, found["host"])

    @property
    def is_archive(self) -> bool:
        return self.scheme != "oci" and is_archive(self.text) and not (self.scheme == "" and Path(self.text).is_dir())

    @property
    def is_loopback(self) -> bool:
        return _LOOPBACK.fullmatch(self.host.rpartition(":")[0] if re.search(r":\d+$", self.host) else self.host) is not None

    @property
    def is_plain(self) -> bool:
        """Whether data is sent without TLS to another machine."""
        return self.scheme == "http" and not self.is_loopback


def is_archive(text: str) -> bool:
    """Return whether an address has an archive's suffix."""
    return text.lower().endswith(ARCHIVE_SUFFIXES)


def host_of(url: str) -> str:
    """Return the host of a web address, without its port."""
    return urlsplit(url).hostname or ""


TOKEN_VARIABLE: Final = "DRAGOMAN_STORE_TOKEN"
_ENDPOINT_VARIABLES: Final = (
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "STORAGE_EMULATOR_HOST",
)
# If one of these is set, no profile is needed.
_AWS_VARIABLES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_CONNECT_SECONDS: Final = 10.0


def client_options(address: Address, silence_seconds: float, request_seconds: float) -> dict[str, Any]:
    """Return obstore's client options; raise `InputError` if a token or certificate file cannot be used."""
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
    """Return obstore's options for a bucket; raises `InputError` if a required AWS profile cannot be used."""
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
    """Return credentials of the AWS profile; raises `InputError` if boto3 is not installed or the profile has none."""
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
    """Return the Authorization header for a web server: the given token, or the one in `.netrc` for the host."""
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
