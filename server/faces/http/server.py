"""The HTTP server: a port and its connections, in the front end's event loop."""

import logging
from functools import partial
from typing import Any

from aiohttp import web

from dragoman.server.config import ServerConfig
from dragoman.server.core.administration import OperatorCalls
from dragoman.server.core.core import CLOSE_SECONDS, Core
from dragoman.server.errors import ServiceError
from dragoman.server.faces.http.application import HEADERS, make_application
from dragoman.server.faces.http.exchange import Manner
from dragoman.server.faces.http.listening import Listening
from dragoman.server.faces.http.native import NativeApi
from dragoman.server.faces.http.speaking import Speaking
from dragoman.server.faces.tls_files import TlsFiles

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
