"""Admin port: /metrics, /healthz and /readyz over HTTP, for Prometheus and Kubernetes.

Runs on its own thread and event loop, so that scrapes never delay requests and /healthz works as long as the process lives. A
connection carries one request. Kubernetes probes send no token: only /metrics and /readyz?verbose require one.
"""

import asyncio
import contextlib
import gzip
import hmac
import logging
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from http import HTTPStatus
from pathlib import Path
from threading import Thread
from typing import Any

import structlog
from aiohttp import HttpVersion10, HttpVersion11, hdrs, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import _ErrInfo
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder, gzip_accepted

from dragoman.model.files import read_bounded
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.listening import cannot_listen, digest_of, is_token, no_password, read_dates

LOOPBACK = ("127.0.0.1", "::1", "localhost")
BACKLOG = 512
# A further connection closes the oldest; at one accept per millisecond each connection still lives 0.25 s.
MAX_CONNECTIONS = 256
CROWDED_PAUSE_SECONDS = 0.001
# While file descriptors are short; requests need them more.
ACCEPT_PAUSE_SECONDS = 0.1
# Timeout of a handshake and of a request head; then of a whole connection.
CLIENT_TIMEOUT_SECONDS = 10.0
CONNECTION_SECONDS = 60.0
# Wait for the client to close: data arriving on a closed socket would reset the connection and lose the answer.
LINGER_SECONDS = 1.0
MAX_HEAD_BYTES = 8192
MAX_WAITING_SCRAPES = 8
# Pause after a scrape, as a multiple of its time: encoding metrics holds the interpreter lock.
REST = 4.0
MAX_REST_SECONDS = 1.0
# Headers that may not be repeated.
SINGLE = (hdrs.AUTHORIZATION, hdrs.CONTENT_LENGTH, hdrs.HOST)
MAX_FILE_BYTES = 1 << 16

log = structlog.get_logger("dragoman.admin")


class AdminServer:
    """HTTP server of the admin port, running until closed; a context manager."""

    def __init__(
        self,
        host: str,
        port: int,
        registry: CollectorRegistry,
        is_ready: Callable[[], bool],
        access: "AdminAccess | None" = None,
        troubles: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Listen and start serving; raise `ConfigError` if the address cannot be bound.

        Port 0 is any free port, then in `self.port`. `is_ready` and `troubles` (further lines of `/readyz?verbose`) are called on
        the server's thread; the registry is collected on another.
        """
        self.access = access or AdminAccess()
        self._is_ready, self._troubles = is_ready, troubles
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._connections: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        self._scrapes = _Scrapes(registry)
        self._http = web.Server(self._respond, handler_cancellation=True, loop=self._loop)
        self._accepting = self._loop.create_task(self._accept())
        self._thread = Thread(target=self._run, name="admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port; idempotent."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop is already closed
                self._loop.call_soon_threadsafe(self._accepting.cancel)
            self._thread.join()

    def __enter__(self) -> "AdminServer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._accepting)
            self._loop.run_until_complete(self._close_connections())
        finally:
            self._scrapes.close()
            self._socket.close()
            self._loop.close()

    async def _accept(self) -> None:
        """Accept one connection per iteration of the event loop."""
        while True:
            try:
                connection, _ = await self._loop.sock_accept(self._socket)
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            task = self._loop.create_task(self._serve(connection))
            task.add_done_callback(partial(self._forget, connection))
            self._connections[task] = None
            if len(self._connections) > MAX_CONNECTIONS:
                oldest = next(iter(self._connections))
                oldest.cancel()
                del self._connections[oldest]
                await asyncio.sleep(CROWDED_PAUSE_SECONDS)

    async def _serve(self, connection: socket.socket) -> None:
        context = self.access.context
        seconds = None if context is None else CLIENT_TIMEOUT_SECONDS
        protocol = _Connection(self._http)
        transport: asyncio.BaseTransport | None = None
        try:
            async with asyncio.timeout(CONNECTION_SECONDS):
                transport, _ = await self._loop.connect_accepted_socket(
                    lambda: protocol, connection, ssl=context, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=seconds
                )
                await protocol.closed.wait()
        except (OSError, TimeoutError):
            pass  # no handshake, or a client that is too slow
        finally:
            if isinstance(transport, asyncio.Transport):
                transport.abort()

    def _forget(self, connection: socket.socket, task: "asyncio.Task[None]") -> None:
        self._connections.pop(task, None)
        connection.close()  # where the task was cancelled before it began
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection to the metrics port failed", exc_info=error)

    async def _close_connections(self) -> None:
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.shutdown(0)

    async def _respond(self, request: web.BaseRequest) -> web.Response:
        if request.version not in (HttpVersion10, HttpVersion11):
            return _status(HTTPStatus.BAD_REQUEST if request.version < HttpVersion10 else HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        if any(len(request.headers.getall(name, ())) > 1 for name in SINGLE):
            return _status(HTTPStatus.BAD_REQUEST)
        if request.method not in (hdrs.METH_GET, hdrs.METH_HEAD):
            return _text(HTTPStatus.METHOD_NOT_ALLOWED, "use GET", Allow="GET, HEAD")
        match request.rel_url.raw_path:
            case "/metrics":
                return await self._scrapes.respond(request) if self._admits(request) else _unauthorized()
            case "/healthz":
                return _text(HTTPStatus.OK, "ok")
            case "/readyz":
                return self._respond_to_readyz(request)
        return _text(HTTPStatus.NOT_FOUND, "try /metrics, /healthz or /readyz")

    def _respond_to_readyz(self, request: web.BaseRequest) -> web.Response:
        """Return the readiness; for `?verbose` with a token also the versions that are not in the wanted state."""
        status, text = (HTTPStatus.OK, "ready") if self._is_ready() else (HTTPStatus.SERVICE_UNAVAILABLE, "not ready")
        if "verbose" not in request.query:
            return _text(status, text)
        return _text(status, "\n".join((text, *self._troubles()))) if self._admits(request) else _unauthorized()

    def _admits(self, request: web.BaseRequest) -> bool:
        return self.access.admits(request.headers.get(hdrs.AUTHORIZATION, ""))


class _Connection(web.RequestHandler):
    """aiohttp's HTTP/1 connection with a bounded head, closed after one request."""

    def __init__(self, server: web.Server) -> None:
        logger = logging.getLogger("dragoman.admin")
        logger.setLevel(logging.CRITICAL)  # `handle_error` logs
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # aiohttp's own way to have none
            logger=logger,
            keepalive_timeout=CLIENT_TIMEOUT_SECONDS,
            lingering_time=0,
            max_line_size=MAX_HEAD_BYTES,
            max_field_size=MAX_HEAD_BYTES,
            max_headers=MAX_HEAD_BYTES,
        )
        self.closed = asyncio.Event()
        self._has_peer_ended = asyncio.Event()
        self._head, self._is_read = b"", False

    def data_received(self, data: bytes) -> None:
        """Collect the head of the request and parse it; discard anything after it."""
        if self._is_read:
            return
        self._head += data
        head, end, _ = self._head.partition(b"\r\n\r\n")
        if not end and len(head) <= MAX_HEAD_BYTES:
            return
        self._is_read = True
        if len(head) > MAX_HEAD_BYTES:
            self._refuse(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
            return
        if b"\r\nhost:" not in head.lower():  # required by aiohttp, omitted by simple probes
            head += b"\r\nHost: -"
        super().data_received(head.decode("ascii", "replace").encode("ascii", "replace") + end)
        if not self._messages and self._waiter is not None and not self._waiter.done():
            self._refuse(HTTPStatus.BAD_REQUEST)

    def _refuse(self, status: HTTPStatus) -> None:
        """Queue an error response, as aiohttp does for unparsable requests."""
        self._messages.append((_ErrInfo(status, HttpProcessingError(code=status), ""), EMPTY_PAYLOAD))
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def eof_received(self) -> bool:  # type: ignore[override]  # aiohttp's closes the connection
        """Keep the connection open for the answer if the client half-closes it after a request."""
        self._has_peer_ended.set()
        return self._is_read and self.ssl_context is None

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._has_peer_ended.set()
        self.closed.set()

    async def finish_response(
        self, request: web.BaseRequest, resp: web.StreamResponse, start_time: float | None
    ) -> tuple[web.StreamResponse, bool]:
        """Send a response, then wait briefly for the client to close."""
        finished = await super().finish_response(request, resp, start_time)
        if self.transport is not None and self.transport.can_write_eof():  # TLS closes by itself
            self.transport.write_eof()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._has_peer_ended.wait()
        return finished

    def handle_error(
        self, request: web.BaseRequest, status: int = 500, exc: BaseException | None = None, message: str | None = None
    ) -> web.StreamResponse:
        if status >= 500:
            log.error("a request to the metrics port failed", exc_info=exc)
        return _status(HTTPStatus(status))


class _Scrapes:
    """Encoding of metrics for scrapes: on its own thread, one at a time, with pauses and a bounded queue."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="admin-scrape")
        self._lock = asyncio.Lock()
        self._num_waiting = 0
        self._next_at = 0.0

    async def respond(self, request: web.BaseRequest) -> web.Response:
        """Return the metrics, or 503 if too many scrapes wait."""
        if self._num_waiting >= MAX_WAITING_SCRAPES:
            return _text(HTTPStatus.SERVICE_UNAVAILABLE, "too many scrapes are waiting", **{"Retry-After": "1"})
        self._num_waiting += 1
        try:
            async with self._lock:
                await asyncio.sleep(self._next_at - time.monotonic())
                try:
                    # If cancelled, the thread continues, and the next scrape still waits for it.
                    return await asyncio.get_running_loop().run_in_executor(self._thread, self._write, request)
                except Exception:
                    log.exception("metrics cannot be written out")
                    return _text(HTTPStatus.INTERNAL_SERVER_ERROR, "metrics cannot be written out; the log says why")
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _write(self, request: web.BaseRequest) -> web.Response:
        """Write the metrics; the pause that follows holds also where the client has gone meanwhile."""
        time.sleep(max(0.0, self._next_at - time.monotonic()))
        started = time.monotonic()
        try:
            return self._write_now(request)
        finally:
            ended = time.monotonic()
            self._next_at = ended + min(REST * (ended - started), MAX_REST_SECONDS)

    def _write_now(self, request: web.BaseRequest) -> web.Response:
        names = request.query.getall("name[]", None)
        encode, content_type = choose_encoder(",".join(request.headers.getall(hdrs.ACCEPT, ())))
        body = encode(self._registry.restricted_registry(names) if names else self._registry)
        headers: dict[str, str] = {}
        if gzip_accepted(",".join(request.headers.getall(hdrs.ACCEPT_ENCODING, ()))):
            body, headers = gzip.compress(body), {hdrs.CONTENT_ENCODING: "gzip"}
        return _response(HTTPStatus.OK, body, headers | {hdrs.CONTENT_TYPE: content_type})


class AdminAccess:
    """Tokens and TLS certificate of the admin port, as last read; `expires` in seconds since 1970, None if unknown."""

    def __init__(self, certificate: Path | None = None, key: Path | None = None, tokens: Path | None = None) -> None:
        """Read the PEM files (None for plain HTTP) and the file of tokens (None for open access to metrics); raises as `reload`."""
        self._certificate, self._key, self._tokens = certificate, key, tokens
        self.paths = tuple(path for path in (certificate, key, tokens) if path is not None)
        self.context: ssl.SSLContext | None = None
        self.expires: float | None = None
        self._digests: tuple[bytes, ...] = ()
        self.reload()

    @classmethod
    def of(cls, config: ServerConfig) -> "AdminAccess":
        """Read the files named by the settings; raises `ConfigError` as the constructor."""
        access = cls(config.metrics_tls_certificate, config.metrics_tls_key, config.metrics_token_file)
        if access._digests and access.context is None and config.metrics_host not in LOOPBACK:
            log.warning("the token for the metrics travels unencrypted: set metrics_tls_certificate and metrics_tls_key")
        return access

    def reload(self) -> None:
        """Read all files again; thread-safe, open connections are unaffected.

        Raises `ConfigError`, naming the setting, if a file cannot be used; everything then stays unchanged.
        """
        context = None if self._certificate is None or self._key is None else _context(self._certificate, self._key)
        digests = () if self._tokens is None else tuple(map(digest_of, read_metrics_tokens(self._tokens)))
        expires = None if context is None or self._certificate is None else _expiry(context, self._certificate)
        self.context, self.expires, self._digests = context, expires, digests

    def admits(self, authorization: str) -> bool:
        """Return whether an `Authorization` header permits reading metrics, in constant time."""
        if not self._digests:
            return True
        scheme, _, token = authorization.partition(" ")
        digest = digest_of(token.strip())
        is_known = sum([hmac.compare_digest(known, digest) for known in self._digests]) > 0
        return is_known and scheme.lower() == "bearer"


def read_metrics_tokens(path: Path) -> list[str]:
    """Return a file's tokens, one per line; several permit rotation. Raise `ConfigError` naming file and line, never the token."""
    try:
        lines = read_bounded(path, MAX_FILE_BYTES).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"metrics_token_file: {path} cannot be read: {reason}") from None
    tokens = [(number, token) for number, line in enumerate(lines, 1) if (token := line.strip())]
    for number, token in tokens:
        if not is_token(token):
            raise ConfigError(f"metrics_token_file: {path}, line {number}: a token is printable ASCII without spaces")
    if not tokens:
        raise ConfigError(f"metrics_token_file: {path} holds no token")
    return [token for _, token in tokens]


def _context(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(certificate, key, password=no_password)
    except (OSError, ValueError) as error:
        raise ConfigError(f"metrics_tls_certificate, metrics_tls_key: {certificate}, {key}: {error}") from error
    return context


def _expiry(context: ssl.SSLContext, certificate: Path) -> float | None:
    try:
        return read_dates(context, read_bounded(certificate, MAX_FILE_BYTES))[1]
    except (OSError, ValueError):  # SSL errors are OSErrors
        return None


def _response(status: HTTPStatus, body: bytes, headers: dict[str, Any]) -> web.Response:
    response = web.Response(status=status, body=body, headers={**headers, hdrs.SERVER: "dragoman", hdrs.CONNECTION: "close"})
    response.force_close()
    return response


def _text(status: HTTPStatus, text: str, **headers: str) -> web.Response:
    body = f"{text}\n".encode(errors="backslashreplace")  # file names may not be valid UTF-8
    return _response(status, body, {hdrs.CONTENT_TYPE: "text/plain; charset=utf-8", **headers})


def _status(status: HTTPStatus) -> web.Response:
    return _text(status, status.phrase)


def _unauthorized() -> web.Response:
    return _text(HTTPStatus.UNAUTHORIZED, "a bearer token is needed", **{hdrs.WWW_AUTHENTICATE: "Bearer"})


def _listen(host: str, port: int) -> socket.socket:
    """Return a listening socket; raise `ConfigError` if the address cannot be bound."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise cannot_listen("metrics_port", host, port, error) from error
    try:
        # Without SO_REUSEPORT, with which two servers would silently share one port's connections.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise cannot_listen("metrics_port", host, port, error) from error
    listener.setblocking(False)
    return listener
