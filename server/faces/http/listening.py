"""The port of HTTP: sockets, TLS that follows its files, and how many connections there may be."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Sequence

import structlog

from dragoman.server.addresses import addresses_of
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.credentials import no_password
from dragoman.server.faces.tls_files import TlsFiles

BACKLOG = 512

log = structlog.get_logger("dragoman.http")


class Refusing(asyncio.Protocol):
    """Closes a connection that is one too many."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it at once."""
        assert isinstance(transport, asyncio.Transport)
        transport.abort()


class Listening:
    """Takes connections and hands them on; what is refused is closed."""

    def __init__(self, config: ServerConfig, tls: TlsFiles | None) -> None:
        """Take the port; nobody is answered yet.

        Args:
            config: Address and limits.
            tls: Files to show; None for HTTP without TLS.

        Raises:
            ConfigError: If the port is taken.
        """
        self._config, self._tls = config, tls
        self._sockets = bind(config.http_host, config.http_port, is_shared=config.front_ends > 1)
        self._servers: list[asyncio.Server] = []
        self.port: int = self._sockets[0].getsockname()[1]

    async def start(self, make: Callable[[], asyncio.Protocol], count: Callable[[], int]) -> None:
        """Begin to answer.

        Args:
            make: Makes what speaks on a connection.
            count: Returns how many connections there are.
        """
        self._make, self._count = make, count
        await self._listen()

    async def renew(self) -> None:
        """Show new connections what the files say now; those there are go on."""
        servers, self._servers = self._servers, []
        try:
            await self._listen()
        except ConfigError as error:
            self._servers = servers
            log.error("TLS files cannot be used for HTTP, what was read before stays in use", reason=str(error))
            return
        for server in servers:
            server.close()

    def close(self) -> None:
        """Take no more connections, and give the port up."""
        for server in self._servers:
            server.close()
        for each in self._sockets:
            each.close()

    async def _listen(self) -> None:
        context = None if self._tls is None else make_context(self._tls, self._config)
        loop = asyncio.get_running_loop()
        seconds = None if context is None else self._config.handshake_seconds
        self._servers = [
            await loop.create_server(self._protocol, sock=each.dup(), ssl=context, backlog=BACKLOG, ssl_handshake_timeout=seconds)
            for each in self._sockets
        ]

    def _protocol(self) -> asyncio.Protocol:
        limit = self._config.max_connections
        return Refusing() if limit and self._count() >= limit else self._make()


def make_context(tls: TlsFiles, config: ServerConfig) -> ssl.SSLContext:
    """Return what shakes hands with the files as they are.

    Raises:
        ConfigError: If they cannot be used.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    assert config.tls_certificate is not None and config.tls_key is not None
    try:
        context.load_cert_chain(config.tls_certificate, config.tls_key, password=no_password)
        if (authorities := tls.contents.client_ca) is not None:
            context.load_verify_locations(cadata=authorities.decode())
            context.verify_mode = ssl.CERT_REQUIRED
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls_certificate, tls_key: {config.tls_certificate}, {config.tls_key}: {error}") from error
    context.set_alpn_protocols(["http/1.1"])
    return context


def bind(host: str, port: int, *, is_shared: bool) -> Sequence[socket.socket]:
    """Return sockets that have a port at every address that a host stands for.

    Args:
        host: Name or address.
        port: 0 for any that is free.
        is_shared: Whether other processes of this server have it, too.

    Raises:
        ConfigError: If it is taken, or there is no such address.
    """
    bound: list[socket.socket] = []
    try:
        for family, address in addresses_of(host, port):
            each = socket.socket(family, socket.SOCK_STREAM)
            bound.append(each)
            each.setblocking(False)
            if family == socket.AF_INET6:
                each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
            each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if is_shared:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            chosen = bound[0].getsockname()[1] if len(bound) > 1 else port
            each.bind((address[0], chosen, *address[2:]))
            each.listen(BACKLOG)  # two may bind a port, and one alone may listen
    except (OSError, UnicodeError) as error:  # the second for a name that IDNA cannot encode
        for each in bound:
            each.close()
        reason = error.strerror or str(error) if isinstance(error, OSError) else "no such host"
        raise ConfigError(f"http_port: cannot listen on {host}:{port}: {reason}") from error
    return bound
