"""Who may call: bearer tokens and TLS. Both are read once, at the start; what is wrong with them stops it."""

import hashlib
import hmac
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import grpc
from structlog.contextvars import bind_contextvars

from dragoman.server.api.interceptors import HEALTH_PREFIX, Context, Continuation, Handler
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.errors import ClientFault


class Unauthenticated(ClientFault):
    """The caller did not show a token we know."""

    code = "UNAUTHENTICATED"


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """Refuses every RPC without a known bearer token, unknown methods too, before its message is read; health needs none."""

    def __init__(self, callers: Mapping[str, str]) -> None:
        """Accept these tokens.

        Args:
            callers: Names of callers by token; the name goes into the log.
        """
        self._callers = [(_digest(token), name) for token, name in callers.items()]
        # A stream on both sides fits every kind of RPC: it takes no message before it answers.
        self._refusal: Handler = grpc.stream_stream_rpc_method_handler(_refuse)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> "Handler | None":
        """Return the RPC's handler, or one that refuses."""
        if handler_call_details.method.startswith(HEALTH_PREFIX):
            return await continuation(handler_call_details)
        caller = self._identify(handler_call_details.invocation_metadata)
        if caller is None:
            return self._refusal
        bind_contextvars(caller=caller)
        return await continuation(handler_call_details)

    def _identify(self, metadata: Any) -> str | None:
        """Return the caller's name; it takes the same time whichever token it is, and for none."""
        values = [value for key, value in metadata or () if key == "authorization"]
        scheme, _, token = values[0].partition(" ") if len(values) == 1 else ("", "", "")
        digest = _digest(token)
        found: str | None = None
        for known, name in self._callers:
            if hmac.compare_digest(known, digest):
                found = name
        return found if scheme.lower() == "bearer" else None


def read_tokens(path: Path) -> dict[str, str]:
    """Read the file of tokens: one `name:token` or `token` a line; blank lines and lines that start with `#` do not count.

    Returns:
        Names by token; a token without a name is called after its line.

    Raises:
        ConfigError: Naming file and line, never the token.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"auth_tokens_file: {path} cannot be read: {reason}") from None
    callers: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        content = line.strip()
        if not content or content.startswith("#"):
            continue
        name, separator, token = content.rpartition(":")
        name, token = name.strip(), token.strip()
        if separator and not name:
            raise ConfigError(f"auth_tokens_file: {path}, line {number}: no name before the colon")
        if not token or not token.isascii() or not token.isprintable() or " " in token:
            raise ConfigError(f"auth_tokens_file: {path}, line {number}: a token is printable ASCII without spaces")
        if token in callers:
            raise ConfigError(f"auth_tokens_file: {path}, line {number}: the same token as before")
        callers[token] = name or f"line {number}"
    if not callers:
        raise ConfigError(f"auth_tokens_file: {path} holds no token")
    return callers


def tls_credentials(config: ServerConfig) -> grpc.ServerCredentials | None:
    """Return the server's credentials, with client certificates required where there is an authority for them; None without TLS.

    Raises:
        ConfigError: Naming the setting whose file cannot be used.
    """
    if config.tls_certificate is None or config.tls_key is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    # gRPC only logs what is wrong with a file and then fails to bind, so the files are tried here first.
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key, password=_no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls_certificate, tls_key: {config.tls_certificate}, {config.tls_key}: {error}") from error
    authorities = None
    if config.tls_client_ca is not None:
        try:
            context.load_verify_locations(config.tls_client_ca)
        except OSError as error:
            raise ConfigError(f"tls_client_ca: {config.tls_client_ca}: {error}") from error
        authorities = config.tls_client_ca.read_bytes()
    pair = (config.tls_key.read_bytes(), config.tls_certificate.read_bytes())
    return grpc.ssl_server_credentials([pair], authorities, require_client_auth=authorities is not None)


def _no_password() -> NoReturn:
    """Refuse to ask for a password: nobody is there to type it."""
    raise ValueError("the key is encrypted")


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()


async def _refuse(_: Any, context: Context) -> NoReturn:
    raise Unauthenticated("authorization: a bearer token that this server knows is needed")
