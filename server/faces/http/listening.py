"""The port of HTTP: sockets, TLS that follows its files, and how many connections there may be."""

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import structlog

from dragoman.server.addresses import addresses_of, cannot_listen
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.credentials import no_password
from dragoman.server.faces.tls_files import TlsFiles

BACKLOG = 512
HANDSHAKE_SECONDS = 10.0

log = structlog.get_logger("dragoman.http")


class Arriving(asyncio.Protocol):
    """A connection that has come: it is closed if it is one too many, and else shakes hands, where TLS is on, and is handed on."""

    def __init__(self, listening: "Listening") -> None:
        """Come to a port."""
        self._listening = listening
        self._early = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close it, hand it on, or begin to shake hands."""
        assert isinstance(transport, asyncio.Transport)
        if self._listening.is_full:
            transport.abort()
        elif self._listening.context is None:
            self._hand_on(transport)
        else:
            transport.pause_reading()
            self._listening.shake(self._shake(transport, self._listening.context))

    def data_received(self, data: bytes) -> None:
        """Keep what comes between the end of the handshake and what is handed on."""
        self._early += data

    async def _shake(self, transport: asyncio.Transport, context: ssl.SSLContext) -> None:
        loop, seconds = asyncio.get_running_loop(), HANDSHAKE_SECONDS
        try:
            secure = await loop.start_tls(transport, self, context, server_side=True, ssl_handshake_timeout=seconds)
        except OSError:  # what is no handshake, or takes too long, among them
            transport.abort()
            return
        if secure is not None and not secure.is_closing():
            self._hand_on(secure)

    def _hand_on(self, transport: asyncio.Transport) -> None:
        made = self._listening.make()
        transport.set_protocol(made)
        made.connection_made(transport)
        if self._early:
            made.data_received(self._early)


class Listening:
    """Takes connections and hands them on; what is refused is closed.

    Attributes:
        port: Where it listens.
        context: Shakes hands; None without TLS.
    """

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
        self._shaking: set[asyncio.Task[None]] = set()
        self.port: int = self._sockets[0].getsockname()[1]
        self.context: ssl.SSLContext | None = None

    @property
    def is_full(self) -> bool:
        """Whether there are as many connections as may be, those that shake hands among them."""
        limit = self._config.max_connections
        return bool(limit) and self._count() + len(self._shaking) >= limit

    async def start(self, make: Callable[[], asyncio.Protocol], count: Callable[[], int]) -> None:
        """Begin to answer.

        Args:
            make: Makes what speaks on a connection.
            count: Returns how many connections there are of that.

        Raises:
            ConfigError: If the files of TLS cannot be used.
        """
        self.make, self._count = make, count
        self.context = None if self._tls is None else make_context(self._tls, self._config)
        loop, arriving = asyncio.get_running_loop(), partial(Arriving, self)
        self._servers = [await loop.create_server(arriving, sock=each.dup(), backlog=BACKLOG) for each in self._sockets]

    def shake(self, shaking: Coroutine[Any, Any, None]) -> None:
        """Shake hands, and count the connection meanwhile."""
        task = asyncio.get_running_loop().create_task(shaking)
        self._shaking.add(task)
        task.add_done_callback(self._shaking.discard)

    def renew(self) -> None:
        """Show new connections what the files say now; those there are go on."""
        assert self._tls is not None
        try:
            self.context = make_context(self._tls, self._config)
        except ConfigError as error:
            log.error("TLS files cannot be used for HTTP, what was read before stays in use", reason=str(error))

    def close(self) -> None:
        """Take no more connections, and give the port up."""
        for server in self._servers:
            server.close()
        for each in self._sockets:
            each.close()
        for task in self._shaking:
            task.cancel()


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
    except (OSError, UnicodeError) as error:
        for each in bound:
            each.close()
        raise cannot_listen("http_port", host, port, error) from error
    return bound
