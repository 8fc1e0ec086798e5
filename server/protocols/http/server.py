"""The HTTP server: listening socket, TLS, connections, aiohttp's protocol handler."""

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from http import HTTPStatus
from typing import Any

import structlog
from aiohttp import HttpVersion11, web

from dragoman.server.addresses import addresses_of, cannot_listen
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.credentials import no_password
from dragoman.server.errors import ServiceError
from dragoman.server.protocols.http.application import HEADERS, make_application
from dragoman.server.protocols.http.native import NativeApi
from dragoman.server.protocols.http.requests import Manner
from dragoman.server.protocols.http.responses import HttpRefusal
from dragoman.server.protocols.tls import TlsFiles
from dragoman.server.service.administration import OperatorCalls
from dragoman.server.service.service import CLOSE_SECONDS, Core

# Between signs to a client that has ended its side of a connection.
PROBE_SECONDS = 0.1

Refuse = Callable[[ServiceError, str], web.Response]


class Speaking(web.RequestHandler):
    """Speaks on a connection. What it cannot read it refuses without showing it, for a token may be part of it."""

    __slots__ = ("_max_request_bytes", "_num_bytes", "_refuse")

    def __init__(self, server: web.Server, refuse: Refuse, max_request_bytes: int, **options: Any) -> None:
        """Speak for a server.

        Args:
            server: It.
            refuse: Makes the answer to what cannot be read.
            max_request_bytes: Of a request on the wire, with all that is around its body.
            options: aiohttp's, as for its own.
        """
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._refuse, self._max_request_bytes, self._num_bytes = refuse, max_request_bytes, 0

    def data_received(self, data: bytes) -> None:
        """Pass bytes on, and end a connection that sends too many.

        The close of a connection that aiohttp stops reading behind a request in hand would not be seen. Chunk extensions may go on
        for ever and are no part of a body.
        """
        num_requests = self._request_count
        super().data_received(data)
        self._num_bytes = len(data) + (self._num_bytes if self._request_count == num_requests else 0)
        is_behind = len(self._messages) + self._request_in_progress > 1
        is_full = self._buffer_paused or (self._reading_paused and is_behind) or self._num_bytes > self._max_request_bytes
        if is_full and self.transport is not None:
            self.transport.abort()

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's closes the connection
        """Return whether requests are still answered: the client may have ended its own side alone, after all that it sends.

        Not if an answer has begun, in which nothing can be sent to see whether the client is there; TLS ends both sides.
        """
        request = self._current_request
        has_begun = request is not None and request.writer.output_size > 0
        is_answered = self._is_answered and not has_begun and self.ssl_context is None
        if is_answered:
            self._probe()
        return is_answered

    def _probe(self) -> None:
        """Send what a client skips: one that has left resets the connection, which is seen when the next bytes are sent."""
        request = self._current_request
        if self.transport is None:
            return
        if not self._is_answered or (request is not None and request.version < HttpVersion11):
            self.force_close()
            return
        if request is not None and request.writer.output_size == 0:
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        self._loop.call_later(PROBE_SECONDS, self._probe)

    @property
    def _is_answered(self) -> bool:
        """Whether there are requests, of which all has come; one on its way from the queue to its task is known by neither."""
        request = self._current_request
        last = self._messages[-1][1] if self._messages else None if request is None else request.content
        return (bool(self._messages) or self._waiter is None) and (last is None or last.is_eof())

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send an answer; an error of aiohttp's own, which may repeat what it refuses, is told as what cannot be read is."""
        if isinstance(resp, web.HTTPException):
            resp = self.handle_error(request, resp.status)
        return await super().finish_response(request, resp, start_time)

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        """Return the answer to what is no request, or went wrong outside of any call; the connection is closed after it."""
        if request.writer.output_size > 0:
            raise ConnectionError("an answer has begun")
        # aiohttp shows an expectation that it does not know, and fails where it is no text.
        if isinstance(exc, UnicodeEncodeError) and "Expect" in request.headers:
            status = HTTPStatus.EXPECTATION_FAILED
        what = "the request cannot be read as HTTP/1.1" if status < 500 else HTTPStatus(status).phrase
        response = self._refuse(HttpRefusal(status, what), "")
        response.force_close()
        return response


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


# A connection on which nothing is asked for, or the head of a request does not come, is closed after this time at the latest.
IDLE_SECONDS = 75.0
# Of the line and of each header of a request, and headers.
MAX_LINE_BYTES = 8190
MAX_HEADERS = 64
# Bytes on the wire for each byte that a body may have: a chunk of one byte takes six.
MAX_FRAMING = 8


class HttpServer:
    """The HTTP face of the server. Make it inside the event loop.

    Attributes:
        port: Where it listens.
    """

    def __init__(
        self,
        config: ServerConfig,
        core: Core,
        tls: TlsFiles | None = None,
        operators: OperatorCalls | None = None,
        grpc_port: int | None = None,
    ) -> None:
        """Take the port; nobody is answered yet.

        Args:
            config: Address and limits.
            core: What answers.
            tls: Files to show; None for HTTP without TLS.
            operators: The way in for operators; None if there is none here.
            grpc_port: Where gRPC is answered, which the console tells; None for where it is set to be.

        Raises:
            ConfigError: If the port is taken or files cannot be used.
        """
        self._listening = Listening(config, tls)
        self.port = self._listening.port
        native = NativeApi(core, config.max_message_bytes)
        logger = logging.getLogger("aiohttp.server")
        logger.setLevel(logging.CRITICAL)  # what goes wrong in a call is in the records of calls
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
        app = make_application(config, core, native, operators, grpc_port)
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS, **options)
        most = MAX_FRAMING * config.max_message_bytes + MAX_HEADERS * MAX_LINE_BYTES
        self._speaking = partial(Speaking, refuse=partial(_refuse_unread, native), max_request_bytes=most, **options)

    async def start(self) -> int:
        """Start answering; return the port.

        Raises:
            ConfigError: If the files of TLS cannot be used.
        """
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        await self._listening.start(partial(self._speaking, server), lambda: len(server.connections))
        return self.port

    def renew(self, _: object = None) -> None:
        """Show new connections what the files of TLS say now."""
        self._listening.renew()

    async def stop(self) -> None:
        """Close the port and what is left of connections."""
        self._listening.close()
        await self._runner.cleanup()


def _refuse_unread(manner: Manner, error: ServiceError, request_id: str) -> web.Response:
    """Return the answer to what is no request; nothing else gives it headers, for no application has seen it."""
    response = manner.refuse(error, request_id)
    response.headers.update(HEADERS)
    return response
