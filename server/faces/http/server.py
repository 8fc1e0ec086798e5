"""The HTTP server: what answers which path, in the front end's event loop."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from http import HTTPStatus
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware

from dragoman.server.config import ServerConfig
from dragoman.server.core.core import CLOSE_SECONDS, Core
from dragoman.server.faces.http import documents
from dragoman.server.faces.http.around import Around
from dragoman.server.faces.http.connection import HEADERS, Connection
from dragoman.server.faces.http.exchange import Endpoint, Manner
from dragoman.server.faces.http.inference import ROOT, InferenceApi
from dragoman.server.faces.http.libre import LibreApi
from dragoman.server.faces.http.listening import Listening
from dragoman.server.faces.http.native import NativeApi
from dragoman.server.faces.http.origins import Origins
from dragoman.server.faces.http.reading import Bodies
from dragoman.server.faces.http.statuses import HttpRefusal, NothingThere
from dragoman.server.faces.tls_files import TlsFiles

# A connection on which nothing is asked for, or the head of a request does not come, is closed after this time at the latest.
IDLE_SECONDS = 75.0
# Of the line and of each header of a request, and headers.
MAX_LINE_BYTES = 8190
MAX_HEADERS = 64

Answering = Callable[[web.Request], Awaitable[web.StreamResponse]]


class HttpServer:
    """The HTTP face of the server. Make it inside the event loop.

    Attributes:
        port: Where it listens.
    """

    def __init__(self, config: ServerConfig, core: Core, tls: TlsFiles | None = None) -> None:
        """Take the port; nobody is answered yet.

        Args:
            config: Address and limits.
            core: What answers.
            tls: Files to show; None for HTTP without TLS.

        Raises:
            ConfigError: If the port is taken or files cannot be used.
        """
        self._core = core
        self._listening = Listening(config, tls)
        self.port = self._listening.port
        around = Around(core, Bodies(config.max_message_bytes))
        native = NativeApi(core, config.max_message_bytes)
        origins = Origins(config.http_allowed_origins)
        libre = LibreApi(core, config.max_message_bytes, origins)
        inference = InferenceApi(core, config.max_message_bytes, origins)
        manners: dict[str, Manner] = {endpoint.path: libre for endpoint in libre.endpoints()}

        def manner_of(path: str) -> Manner:
            return inference if path == ROOT or path.startswith(f"{ROOT}/") else manners.get(path, native)

        app = web.Application(middlewares=[_tell_http_errors(manner_of), origins.middleware()], handler_args=None)
        add(app, around, native, native.endpoints())
        add(app, around, libre, libre.endpoints())
        add(app, around, inference, inference.endpoints())
        for path, answer in inference.probes():
            app.router.add_get(path, answer)
        app.router.add_get(documents.PATH, documents.answer_document)
        app.router.add_get(documents.PAGE_PATH, documents.answer_page)
        app.on_response_prepare.extend((_add_headers, origins.add_headers))
        logger = logging.getLogger("aiohttp.server")
        logger.setLevel(logging.CRITICAL)  # what goes wrong in a call is in the records of calls
        idle = config.max_connection_idle_seconds or IDLE_SECONDS
        self._native = native
        self._settings: dict[str, Any] = {
            "access_log": None,
            "logger": logger,
            "keepalive_timeout": min(idle, IDLE_SECONDS),
            "lingering_time": 1.0,
            "max_line_size": MAX_LINE_BYTES,
            "max_field_size": MAX_LINE_BYTES,
            "max_headers": MAX_HEADERS,
            "auto_decompress": False,
        }
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=CLOSE_SECONDS)

    async def start(self) -> int:
        """Start answering; return the port.

        Raises:
            ConfigError: If the files of TLS cannot be used.
        """
        await self._runner.setup()
        server = self._runner.server
        assert server is not None
        make = partial(Connection, server, self._native, loop=asyncio.get_running_loop(), **self._settings)
        await self._listening.start(make, lambda: len(server.connections))
        return self.port

    def renew(self, _: object = None) -> None:
        """Show new connections what the files of TLS say now."""
        self._renewing = asyncio.ensure_future(self._listening.renew())

    async def stop(self) -> None:
        """Close the port and what is left of connections."""
        self._listening.close()
        await self._runner.cleanup()


def add(app: web.Application, around: Around, manner: Manner, endpoints: Iterable[Endpoint]) -> None:
    """Have an application answer at some endpoints."""
    for endpoint in endpoints:
        app.router.add_route(endpoint.method, endpoint.path, partial(around.serve, endpoint, manner))


def _tell_http_errors(manner_of: Callable[[str], Manner]) -> Middleware:
    """Return what says in a protocol's manner what aiohttp would in its own: that nothing is there, or not by this method.

    Args:
        manner_of: Returns the manner of a path, whether anything is there or not.
    """

    @web.middleware
    async def tell(request: web.Request, handler: Answering) -> web.StreamResponse:
        try:
            return await handler(request)
        except web.HTTPMethodNotAllowed as error:
            allowed = ", ".join(sorted(error.allowed_methods))
            refusal = HttpRefusal(error.status, f"{request.method} is not for this path; {allowed} is", {"Allow": allowed})
        except web.HTTPNotFound:
            refusal = NothingThere()
        except web.HTTPException as error:
            refusal = HttpRefusal(error.status, HTTPStatus(error.status).phrase)
        return manner_of(request.path).refuse(refusal, "")

    return tell


async def _add_headers(_: web.Request, response: web.StreamResponse) -> None:
    for name, value in HEADERS.items():
        response.headers.setdefault(name, value)
    response.headers["Server"] = HEADERS["Server"]
