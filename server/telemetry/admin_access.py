"""Who may read the metrics, and over what: the bearer tokens and the certificate of the metrics port, read again when asked to."""

import hmac
import ssl
from pathlib import Path

import structlog

from dragoman.model.files import read_bounded
from dragoman.server.certificates import read_dates
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.credentials import digest_of, is_token, no_password

LOOPBACK = ("127.0.0.1", "::1", "localhost")

_MAX_FILE_BYTES = 1 << 16

log = structlog.get_logger("dragoman.admin")


class AdminAccess:
    """Tokens and certificate as the files said last.

    Attributes:
        paths: The files there are, for whoever watches them.
        context: For connections that come from now on; None without TLS.
        expires: When the certificate expires, in seconds since 1970; None without one, or if it is not known.
    """

    def __init__(self, certificate: Path | None = None, key: Path | None = None, tokens: Path | None = None) -> None:
        """Read the files.

        Args:
            certificate: PEM file with the certificate's chain; None for plain HTTP.
            key: PEM file with its private key.
            tokens: File with a bearer token a line; None lets everybody read the metrics.

        Raises:
            ConfigError: Naming the setting whose file cannot be used.
        """
        self._certificate, self._key, self._tokens = certificate, key, tokens
        self.paths = tuple(path for path in (certificate, key, tokens) if path is not None)
        self.context: ssl.SSLContext | None = None
        self.expires: float | None = None
        self._digests: tuple[bytes, ...] = ()
        self.reload()

    @classmethod
    def of(cls, config: ServerConfig) -> "AdminAccess":
        """Read what the settings name.

        Raises:
            ConfigError: Naming the setting whose file cannot be used.
        """
        access = cls(config.metrics_tls_certificate, config.metrics_tls_key, config.metrics_token_file)
        if access.needs_token and access.context is None and config.metrics_host not in LOOPBACK:
            log.warning("the token for the metrics travels unencrypted: set metrics_tls_certificate and metrics_tls_key")
        return access

    def reload(self) -> None:
        """Read all files again, from any thread; connections that there are stay as they are.

        Raises:
            ConfigError: Naming the setting whose file cannot be used; then everything stays as it was.
        """
        context = None if self._certificate is None or self._key is None else _context(self._certificate, self._key)
        digests = () if self._tokens is None else tuple(map(digest_of, read_metrics_tokens(self._tokens)))
        expires = None if context is None or self._certificate is None else _expiry(context, self._certificate)
        self.context, self.expires, self._digests = context, expires, digests

    @property
    def needs_token(self) -> bool:
        """Whether the metrics are only for who shows a token."""
        return self._tokens is not None

    def admits(self, authorization: str) -> bool:
        """Return whether metrics may be read with an `Authorization` header; it takes the same time whatever that says."""
        if not self.needs_token:
            return True
        scheme, _, token = authorization.partition(" ")
        digest = digest_of(token.strip())
        is_known = sum([hmac.compare_digest(known, digest) for known in self._digests]) > 0
        return is_known and scheme.lower() == "bearer"


def read_metrics_tokens(path: Path) -> list[str]:
    """Read a file of tokens: one a line, so that an old one is still taken while scrapers get the new one; blank lines are skipped.

    Raises:
        ConfigError: Naming file and line, never the token.
    """
    try:
        lines = read_bounded(path, _MAX_FILE_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"metrics_token_file: {path} cannot be read: {reason}") from None
    tokens: list[str] = []
    for number, line in enumerate(lines, 1):
        token = line.strip()
        if not token:
            continue
        if not is_token(token):
            raise ConfigError(f"metrics_token_file: {path}, line {number}: a token is printable ASCII without spaces")
        tokens.append(token)
    if not tokens:
        raise ConfigError(f"metrics_token_file: {path} holds no token")
    return tokens


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    """Return a context for new connections.

    Raises:
        ConfigError: If certificate and key cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(f"metrics_tls_certificate, metrics_tls_key: {certificate}, {key}: {error}") from error
    return context


def _expiry(context: ssl.SSLContext, certificate: Path) -> float | None:
    """Return when the certificate that a context shows expires; None for one that no client could accept."""
    try:
        return read_dates(context, read_bounded(certificate, _MAX_FILE_BYTES))[1]
    except (OSError, ValueError):  # those of TLS are of the first family
        return None
