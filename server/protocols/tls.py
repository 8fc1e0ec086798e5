"""TLS certificate and key files, reloadable while the server runs."""

import ssl
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import structlog

from dragoman.model.files import read_bounded
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.listening import no_password, read_dates, text_of

MAX_FILE_BYTES = 16 * 2**20

log = structlog.get_logger("dragoman")


def printable(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names of a client certificate that are printable text."""
    return tuple(name for name in names if name and name.isprintable() and "\N{REPLACEMENT CHARACTER}" not in name)


@dataclass(frozen=True, slots=True)
class Contents:
    """Contents of the files in PEM."""

    certificate: bytes
    key: bytes
    client_ca: bytes | None


class TlsFiles:
    """The server's certificate and key, and optional authorities of client certificates, which are then required.

    Reload when one of `paths` changes; new connections use the last valid `contents`, over HTTP as `context`.
    """

    def __init__(self, certificate: Path, key: Path, client_ca: Path | None = None) -> None:
        """Read the files or raise `ConfigError`; a certificate outside its dates is only logged, as a new one may follow."""
        self._certificate, self._key, self._client_ca = certificate, key, client_ca
        self.paths = tuple(path for path in (certificate, key, client_ca) if path is not None)
        self.contents = self._read()
        self.context, self._dates = self._check(self.contents)
        if (reason := _out_of_date(self._dates)) is not None:
            log.warning(f"the certificate {reason}", file=str(certificate))

    @classmethod
    def of(cls, config: ServerConfig) -> Self | None:
        """Return the files of the settings, None without TLS; raise `ConfigError` as the constructor does."""
        if config.tls_certificate is None or config.tls_key is None:
            return None
        return cls(config.tls_certificate, config.tls_key, config.tls_client_ca)

    @property
    def expires(self) -> float:
        """Expiry of the server's certificate as a Unix time."""
        return self._dates[1]

    def reload(self) -> bool:
        """Read the files again; return whether they changed. Invalid or expired ones raise `ConfigError` and change nothing."""
        contents = self._read()
        if contents == self.contents:
            return False
        context, dates = self._check(contents)
        if (reason := _out_of_date(dates)) is not None:
            raise ConfigError(f"tls_certificate: {self._certificate}: {reason}")
        self.contents, self.context, self._dates = contents, context, dates
        return True

    def _read(self) -> Contents:
        settings = ("tls_certificate", self._certificate), ("tls_key", self._key), ("tls_client_ca", self._client_ca)
        certificate, key, client_ca = (_read(setting, path) for setting, path in settings)
        assert certificate is not None and key is not None
        return Contents(certificate, key, client_ca)

    def _check(self, contents: Contents) -> tuple[ssl.SSLContext, tuple[float, float]]:
        """Return a context of HTTP/1.1 and the certificate's validity dates as Unix times, or raise `ConfigError`."""
        # gRPC only logs an invalid file, and then fails to bind or to shake hands.
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        pair = f"tls_certificate, tls_key: {self._certificate}, {self._key}"
        try:
            context.load_cert_chain(self._certificate, self._key, password=no_password)
            dates = read_dates(context, contents.certificate)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{pair}: {error}") from error
        if contents.client_ca is not None:
            try:
                context.load_verify_locations(cadata=text_of(contents.client_ca))
                context.verify_mode = ssl.CERT_REQUIRED
            except (OSError, ValueError) as error:
                raise ConfigError(f"tls_client_ca: {self._client_ca}: {error}") from error
        if self._read() != contents:
            raise ConfigError(f"{pair}: changed while they were read")
        return context, dates


def _read(setting: str, path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return read_bounded(path, MAX_FILE_BYTES)
    except OSError as error:
        raise ConfigError(f"{setting}: {path} cannot be read: {error.strerror}") from None


def _out_of_date(dates: tuple[float, float]) -> str | None:
    """Return the problem with a certificate's dates; None if it is valid now."""
    begin, end = dates
    now = time.time()
    if begin <= now < end:
        return None
    verb, moment = ("is not valid before", begin) if now < begin else ("expired on", end)
    return f"{verb} {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(moment))} UTC"
