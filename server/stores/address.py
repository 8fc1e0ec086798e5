"""Addresses of bundles in commands and settings; messages repeat no secrets of them."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final
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
    """An invalid address; the message repeats none of its secrets."""


@dataclass(frozen=True, slots=True)
class Address:
    """Location of bundles.

    Attributes:
        scheme: `s3`, `gs`, `az`, `https`, `http`, `oci`, or empty for a local folder.
        text: The address as given, without a trailing slash; it holds no secret.
        host: Host with its port, or bucket; empty for a local folder.
    """

    scheme: str
    text: str
    host: str

    @classmethod
    def parse(cls, text: str) -> "Address":
        """Parse an address.

        Raises:
            AddressError: If it is invalid.
        """
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
            raise AddressError(f"{scheme}://{parts.hostname}: an address holds no user and no password; see docs/stores.md")
        if not host:
            raise AddressError(f"{shown}: lacks a {'bucket' if scheme in OBJECT_SCHEMES else 'host'}")
        if "?" in text or "#" in text:
            raise AddressError(f"{shown}: an address of bundles does not go on with '?' or '#'; see docs/stores.md for credentials")
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
        """Whether it is an archive of folders."""
        return self.scheme != "oci" and is_archive(self.text) and not (self.scheme == "" and Path(self.text).is_dir())

    @property
    def is_loopback(self) -> bool:
        """Whether the host is this machine."""
        return _LOOPBACK.fullmatch(self.host.rpartition(":")[0] if re.search(r":\d+$", self.host) else self.host) is not None

    @property
    def is_plain(self) -> bool:
        """Whether the transport is unprotected."""
        return self.scheme == "http" and not self.is_loopback


def is_archive(text: str) -> bool:
    """Return whether an address ends like an archive's."""
    return text.lower().endswith(ARCHIVE_SUFFIXES)


def host_of(url: str) -> str:
    """Return the host of a URL, without its port."""
    return urlsplit(url).hostname or ""
