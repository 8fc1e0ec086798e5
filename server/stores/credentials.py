"""Where object stores and web servers get credentials and endpoints from, beyond what obstore itself looks for.

obstore reads each provider's variables of the environment, its files of service accounts, and the metadata of the machine. Added
here: AWS profiles, which boto3 reads, Google's variable for emulators, endpoints without TLS where somebody has set one, and for
web servers a token or `.netrc`.
"""

import base64
import netrc
import os
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from dragoman.model.errors import InputError
from dragoman.server.stores.address import OBJECT_SCHEMES, WEB_SCHEMES, Address, host_of

TOKEN_VARIABLE: Final = "DRAGOMAN_STORE_TOKEN"
_ENDPOINT_VARIABLES: Final = (
    "AWS_ENDPOINT",
    "AWS_ENDPOINT_URL",
    "AWS_ENDPOINT_URL_S3",
    "AZURE_ENDPOINT",
    "AZURE_STORAGE_ENDPOINT",
    "STORAGE_EMULATOR_HOST",
)
# Any of these says that no profile is needed.
_AWS_VARIABLES: Final = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
_CONNECT_SECONDS: Final = 10.0


def client_options(address: Address, silence_seconds: float, request_seconds: float) -> dict[str, Any]:
    """Return how connections to an address are made.

    Args:
        address: Of a bucket, or of a web server.
        silence_seconds: How long the store may be silent.
        request_seconds: How long a request may take, whatever comes.

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
    """Return what obstore is to be told of a bucket beside its address.

    Raises:
        InputError: If an AWS profile is asked for and cannot be used.
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
    """Return credentials of the profile that AWS's own tools would take.

    Raises:
        InputError: If boto3 is not installed, or the profile holds none.
    """
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
    """Return what a web server is shown: a token that was given, or what `.netrc` has for its host."""
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
