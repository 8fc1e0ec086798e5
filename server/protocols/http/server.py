"""The HTTP server: sockets, reloadable TLS, connection limit, and aiohttp's runner."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Sequence
from functools import partial
from typing import Any

from aiohttp import web

from dragoman.server.config import ServerConfig
from dragoman.server.errors import ServiceError
from dragoman.server.listening import addresses_of, cannot_listen
from dragoman.server.protocols.http.application import HEADERS, make_application
from dragoman.server.protocols.http.connection import Connection
from dragoman.server.protocols.http.responses import NATIVE_ERRORS
from dragoman.server.protocols.tls import TlsFiles
from dragoman.server.service.administration import OperatorCalls
from dragoman.server.service.batch_store import MAX_FILE_BYTES, BatchStore
from dragoman.server.service.documents import DocumentStore
from dragoman.server.service.glossary_store import GlossaryStore
from dragoman.server.service.service import CLOSE_SECONDS, Service

BACKLOG = 512
HANDSHAKE_SECONDS = 10.0
# Longest time a connection may be idle or have an incomplete request head.
IDLE_SECONDS = 75.0
# Limit of the request line and of each header.
MAX_LINE_BYTES = 8190
MAX_HEADERS = 64
# Bytes on the wire per body byte: a 1-byte chunk takes six.
MAX_FRAMING = 8


class HttpServer:
    """The HTTP port; create it in the event loop."""

    def __init__(
        self,
        config: ServerConfig,
        service: Service,
        tls: TlsFiles | None,
        operators: OperatorCalls | None,
        grpc_port: int,
        documents: DocumentStore,
        glossaries: GlossaryStore,
        batches: BatchStore | None = None,
    ) -> None:
        """Bind the port; raise `ConfigError` if it is taken. Arguments as `make_application`."""
        self._config, self._tls = config, tls
        self._sockets = bind(config.http_host, config.http_port, is_shared=config.front_ends > 1)
        self.port: int = self._sockets[0].getsockname()[1]
        self._listeners: list[asyncio.Server] = []
        self._handshakes: set[asyncio.Task[None]] = set()
        logger = logging.getLogger("aiohttp.server")
        logger.setLevel(logging.CRITICAL)  # failed requests are in the access log
        options: dict[str, Any] = {
            "access_log": None,
            "logger": logger,
            "keepalive_timeout": min(config.max_connection_idle_seconds or IDLE_SECONDS, IDLE_SECONDS),
            "lingering_time": 1.0,
            "max_line_size": MAX_LINE_BYTES,
            "max_field_size": MAX_LINE_BYTES,
            "max_headers": MAX_HEADERS,
            "auto_decompress": False,
        }
        app = make_application(config, service, operators, grpc_port, documents, glossaries, batches)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS, **options)
        max_bytes = MAX_FRAMING * config.max_message_bytes + MAX_HEADERS * MAX_LINE_BYTES
        max_bytes = max(max_bytes, 2 * MAX_FILE_BYTES if batches is not None else 0)
        self._connection_options = options | {"refuse": _refuse_unread, "max_request_bytes": max_bytes}

    async def start(self) -> None:
        """Start serving."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        for each in self._sockets:
            self._listeners.append(await loop.create_server(partial(_Accepted, self), sock=each.dup(), backlog=BACKLOG))

    async def stop(self) -> None:
        """Close the port and every connection."""
        for server in self._listeners:
            server.close()
        for each in self._sockets:
            each.close()
        for task in self._handshakes:
            task.cancel()
        await self._runner.cleanup()

    def accept(self, transport: asyncio.Transport, accepted: "_Accepted") -> None:
        """Serve a new connection, or close it at `max_connections`, handshakes included."""
        server, limit = self._runner.server, self._config.max_connections
        assert server is not None
        if limit and len(server.connections) + len(self._handshakes) >= limit:
            transport.abort()
        elif self._tls is None:
            accepted.pass_to_http(transport, Connection(server, **self._connection_options))
        else:
            transport.pause_reading()
            task = asyncio.get_running_loop().create_task(self._shake_hands(transport, accepted, self._tls.context, server))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    async def _shake_hands(
        self, transport: asyncio.Transport, accepted: "_Accepted", context: ssl.SSLContext, server: web.Server
    ) -> None:
        loop, seconds = asyncio.get_running_loop(), HANDSHAKE_SECONDS
        try:
            secure = await loop.start_tls(transport, accepted, context, server_side=True, ssl_handshake_timeout=seconds)
        except OSError:  # includes timeouts and data that is not TLS
            transport.abort()
            return
        if secure is not None and not secure.is_closing():
            accepted.pass_to_http(secure, Connection(server, **self._connection_options))


class _Accepted(asyncio.Protocol):
    """A new connection, until it is passed to aiohttp's protocol handler."""

    def __init__(self, server: HttpServer) -> None:
        self._server, self._early = server, b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._server.accept(transport, self)

    def data_received(self, data: bytes) -> None:
        """Buffer bytes between the end of the handshake and `pass_to_http`."""
        self._early += data

    def pass_to_http(self, transport: asyncio.Transport, connection: Connection) -> None:
        transport.set_protocol(connection)
        connection.connection_made(transport)
        if self._early:
            connection.data_received(self._early)


def bind(host: str, port: int, *, is_shared: bool) -> Sequence[socket.socket]:
    """Return sockets bound to a port (0: any) at all addresses of a host or raise `ConfigError`; `is_shared` among frontends."""
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
            each.listen(BACKLOG)  # two sockets may bind a port, but only one may listen
    except (OSError, UnicodeError) as error:
        for each in bound:
            each.close()
        raise cannot_listen("http_port", host, port, error) from error
    return bound


def _refuse_unread(error: ServiceError) -> web.Response:
    """Return the response to bytes that are not a request; they do not reach the application."""
    response = NATIVE_ERRORS.response(error)
    response.headers.update(HEADERS)
    return response
