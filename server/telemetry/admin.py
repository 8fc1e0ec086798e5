"""The admin port: /metrics, /healthz and /readyz."""

import asyncio
import contextlib
import hmac
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from http import HTTPStatus
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs

import structlog

from dragoman.model.files import read_bounded
from dragoman.server.config import ConfigError, ServerConfig
from dragoman.server.listening import cannot_listen, digest_of, is_token, no_password, read_dates

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication


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


MAX_HEAD_BYTES = 8192
# Headers that may not come twice; others may, and mean the same as one line with commas.
SINGLE = frozenset({"authorization", "content-length", "host"})


class BadRequest(Exception):
    """What came is not HTTP that is answered here."""

    def __init__(self, status: HTTPStatus) -> None:
        """Answer with this."""
        super().__init__(status.phrase)
        self.status = status


@dataclass(frozen=True, slots=True)
class AdminRequest:
    """What was asked for; names of headers are in lower case."""

    method: str
    path: str
    query: str
    headers: Mapping[str, str]

    @classmethod
    def parse(cls, head: bytes) -> "AdminRequest":
        """Read a head, the empty line at its end included.

        Raises:
            BadRequest: If it is none.
        """
        first, *lines = head.decode("latin-1").rstrip("\r\n").split("\r\n")
        parts = first.split(" ")
        if len(parts) != 3 or not parts[0].isalpha():
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        method, target, version = parts
        if target.startswith(("http://", "https://")):  # as a proxy is asked
            target = "/" + target.split("/", 3)[3] if target.count("/") > 2 else "/"
        if not target.startswith("/"):
            raise BadRequest(HTTPStatus.BAD_REQUEST)
        if version not in ("HTTP/1.0", "HTTP/1.1"):
            raise BadRequest(HTTPStatus.HTTP_VERSION_NOT_SUPPORTED)
        headers: dict[str, str] = {}
        for line in lines:
            name, colon, value = line.partition(":")
            key = name.lower()
            if not colon or not name or name != name.strip() or (key in SINGLE and key in headers):
                raise BadRequest(HTTPStatus.BAD_REQUEST)
            headers[key] = f"{headers[key]}, {value.strip()}" if key in headers else value.strip()
        path, _, query = target.partition("?")
        return cls(method, path, query, headers)


@dataclass(frozen=True, slots=True)
class AdminAnswer:
    """A status and what comes with it."""

    status: HTTPStatus
    body: bytes
    headers: tuple[tuple[str, str], ...] = field(default=())

    @classmethod
    def text(cls, status: HTTPStatus, text: str, *headers: tuple[str, str]) -> "AdminAnswer":
        """Answer with a line of text, or several; names of files in it may be no text."""
        return cls(status, f"{text}\n".encode(errors="backslashreplace"), (("Content-Type", "text/plain; charset=utf-8"), *headers))

    def to_bytes(self, *, has_body: bool) -> bytes:
        """Return what goes over the wire; an answer to HEAD has no body."""
        lines = [f"HTTP/1.1 {self.status.value} {self.status.phrase}", *(f"{name}: {value}" for name, value in self.headers)]
        lines += [f"Content-Length: {len(self.body)}", "Connection: close", "", ""]
        return "\r\n".join(lines).encode("latin-1") + (self.body if has_body else b"")


MAX_WAITING = 8
# Writing the metrics out takes the interpreter from the requests that are served, so after each time it rests this much longer.
REST = 4.0
MAX_REST_SECONDS = 1.0


class Scrapes:
    """Runs the application that answers /metrics, on a thread of its own. All but the thread belongs to one event loop."""

    def __init__(self, metrics_app: "WSGIApplication") -> None:
        """Answer with this."""
        self._app = metrics_app
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="admin-scrape")
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._next_at = 0.0

    async def answer(self, request: AdminRequest) -> AdminAnswer:
        """Return the metrics, or why there are none now."""
        if self._num_waiting >= MAX_WAITING:
            text = "too many scrapes are waiting"
            return AdminAnswer.text(HTTPStatus.SERVICE_UNAVAILABLE, text, ("Retry-After", "1"))
        self._num_waiting += 1
        try:
            async with self._turn:
                loop = asyncio.get_running_loop()
                await asyncio.sleep(self._next_at - loop.time())
                started = loop.time()
                try:
                    # Where this is cancelled the thread goes on, and whoever comes next waits for it all the same.
                    return await loop.run_in_executor(self._thread, self._run, request)
                except Exception:
                    log.exception("metrics cannot be written out")
                    return AdminAnswer.text(HTTPStatus.INTERNAL_SERVER_ERROR, "metrics cannot be written out; the log says why")
                finally:
                    self._next_at = loop.time() + min(REST * (loop.time() - started), MAX_REST_SECONDS)
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """End the thread, without waiting for it."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, request: AdminRequest) -> AdminAnswer:
        environ = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": request.path,
            "QUERY_STRING": request.query,
            "HTTP_ACCEPT": request.headers.get("accept", ""),
            "HTTP_ACCEPT_ENCODING": request.headers.get("accept-encoding", ""),
        }
        said: list[Any] = []
        body = b"".join(self._app(environ, lambda *what: said.extend(what)))  # type: ignore[arg-type]
        status, headers = said[:2]
        return AdminAnswer(HTTPStatus(int(status.split(" ")[0])), body, tuple(headers))


MAX_CONNECTIONS = 256
BACKLOG = 512
# What is read, and thrown away, of a request whose answer does not wait for it.
MAX_LEFT_BYTES = 1 << 20
# For a handshake and a request, and again for taking the answer.
CLIENT_TIMEOUT_SECONDS = 10.0
LINGER_SECONDS = 1.0
# Between two that each take another's place.
CROWDED_PAUSE_SECONDS = 0.001
# While descriptors are short, which the calls that are served need more.
ACCEPT_PAUSE_SECONDS = 0.1


class AdminServer:
    """Answers until it is closed; a context manager."""

    def __init__(
        self,
        host: str,
        port: int,
        metrics_app: "WSGIApplication",
        is_ready: Callable[[], bool],
        access: AdminAccess | None = None,
        troubles: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Listen and start answering.

        Args:
            host: Address to listen on.
            port: Port, 0 for any free one; `self.port` says which.
            metrics_app: Answers /metrics; called on a thread of its own.
            is_ready: Whether /readyz says so; called from another thread.
            access: Certificate and tokens; by default there are none.
            troubles: Returns what else `/readyz?verbose` tells, line by line; called from another thread.

        Raises:
            ConfigError: If the address cannot be listened on.
        """
        self.access = access or AdminAccess()
        self._is_ready, self._troubles = is_ready, troubles
        self._socket = _listen(host, port)
        self.port: int = self._socket.getsockname()[1]
        self._connections: dict[asyncio.Task[None], None] = {}
        self._loop = asyncio.new_event_loop()
        self._scrapes = Scrapes(metrics_app)
        self._accepting = self._loop.create_task(self._accept())
        self._thread = Thread(target=self._run, name="admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port; closing again does nothing."""
        if self._thread.is_alive():
            with contextlib.suppress(RuntimeError):  # the loop has closed meanwhile
                self._loop.call_soon_threadsafe(self._accepting.cancel)
            self._thread.join()

    def __enter__(self) -> "AdminServer":
        """Return the server, which already answers."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def reload(self) -> None:
        """Read certificate and tokens again, from any thread; connections that come from now on meet the new ones.

        Raises:
            ConfigError: Naming the setting whose file cannot be used; then everything stays as it was.
        """
        self.access.reload()

    def _run(self) -> None:
        """Answer until `_accepting` is cancelled, and tidy up."""
        try:
            with contextlib.suppress(asyncio.CancelledError):
                self._loop.run_until_complete(self._accepting)
            self._loop.run_until_complete(self._end_all())
        finally:
            self._scrapes.close()
            self._socket.close()
            self._loop.close()

    async def _accept(self) -> None:
        """Take connections one by one, each time the loop has been through everything else."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                await self._until_somebody_comes()
                continue
            except OSError:
                await asyncio.sleep(ACCEPT_PAUSE_SECONDS)
                continue
            connection.setblocking(False)
            if len(self._connections) >= MAX_CONNECTIONS:
                try:
                    await self._make_room()
                except asyncio.CancelledError:
                    connection.close()
                    raise
            task = self._loop.create_task(self._serve(connection))
            self._connections[task] = None
            task.add_done_callback(partial(self._forget, connection))
            await asyncio.sleep(0)

    async def _until_somebody_comes(self) -> None:
        """Wait; `loop.sock_accept` would lose the connection that comes just when it is cancelled."""
        coming = self._loop.create_future()
        self._loop.add_reader(self._socket, _settle, coming)
        try:
            await coming
        finally:
            self._loop.remove_reader(self._socket)

    def _forget(self, connection: socket.socket, task: "asyncio.Task[None]") -> None:
        self._connections.pop(task, None)
        connection.close()  # where the task was ended before it began
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a request to the metrics port failed", exc_info=error)

    async def _make_room(self) -> None:
        """End the oldest connection."""
        oldest = next(iter(self._connections))
        oldest.cancel()
        await asyncio.wait([oldest])
        await asyncio.sleep(CROWDED_PAUSE_SECONDS)

    async def _end_all(self) -> None:
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # in which their sockets are closed

    async def _serve(self, connection: socket.socket) -> None:
        """Answer one request and end the connection; a client that is too slow, or goes away, is let go."""
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(CLIENT_TIMEOUT_SECONDS):
                reader, writer = await self._open(connection)
                request = await _read(reader)
            answer = await self._answer(request)
            async with asyncio.timeout(CLIENT_TIMEOUT_SECONDS):
                writer.write(answer.to_bytes(has_body=not isinstance(request, AdminRequest) or request.method != "HEAD"))
                await _finish(reader, writer)
        except (OSError, TimeoutError, EOFError):
            pass  # it went away, or takes too long
        finally:
            if writer is not None:
                writer.transport.abort()

    async def _open(self, connection: socket.socket) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Return both ends of a connection, after the handshake if there is to be one."""
        reader = asyncio.StreamReader(MAX_HEAD_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        context = self.access.context
        seconds = None if context is None else CLIENT_TIMEOUT_SECONDS
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol, connection, ssl=context, ssl_handshake_timeout=seconds, ssl_shutdown_timeout=seconds
        )
        transport.set_write_buffer_limits(high=1, low=0)  # so that draining means that everything has been taken
        return reader, asyncio.StreamWriter(transport, protocol, reader, self._loop)

    async def _answer(self, request: AdminRequest | BadRequest) -> AdminAnswer:
        if isinstance(request, BadRequest):
            return AdminAnswer.text(request.status, request.status.phrase)
        if request.method not in ("GET", "HEAD"):
            return AdminAnswer.text(HTTPStatus.METHOD_NOT_ALLOWED, "use GET", ("Allow", "GET, HEAD"))
        match request.path:
            case "/metrics":
                return await self._scrapes.answer(request) if self._admits(request) else _not_admitted()
            case "/healthz":
                return AdminAnswer.text(HTTPStatus.OK, "ok")
            case "/readyz":
                return self._answer_readiness(request)
            case _:
                return AdminAnswer.text(HTTPStatus.NOT_FOUND, "try /metrics, /healthz or /readyz")

    def _answer_readiness(self, request: AdminRequest) -> AdminAnswer:
        """Answer whether requests are welcome, and who asks for more and may know it what is not as is wanted."""
        status, text = (HTTPStatus.OK, "ready") if self._is_ready() else (HTTPStatus.SERVICE_UNAVAILABLE, "not ready")
        if "verbose" not in parse_qs(request.query, keep_blank_values=True):
            return AdminAnswer.text(status, text)
        if not self._admits(request):
            return _not_admitted()
        return AdminAnswer.text(status, "\n".join((text, *self._troubles())))

    def _admits(self, request: AdminRequest) -> bool:
        return self.access.admits(request.headers.get("authorization", ""))


def _not_admitted() -> AdminAnswer:
    return AdminAnswer.text(HTTPStatus.UNAUTHORIZED, "a bearer token is needed", ("WWW-Authenticate", "Bearer"))


def _settle(coming: asyncio.Future[None]) -> None:
    if not coming.done():
        coming.set_result(None)


async def _read(reader: asyncio.StreamReader) -> AdminRequest | BadRequest:
    """Return the request that comes first, or what is wrong with it."""
    try:
        return AdminRequest.parse(await reader.readuntil(b"\r\n\r\n"))
    except asyncio.LimitOverrunError:
        return BadRequest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
    except BadRequest as error:
        return error


async def _finish(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Wait until an answer has been taken, and a moment for the client's end: what it still sends would undo the answer."""
    await writer.drain()
    async with asyncio.timeout(LINGER_SECONDS):
        if not writer.can_write_eof():  # TLS says so by itself
            writer.close()
            await writer.wait_closed()
            return
        writer.write_eof()
        num_left = MAX_LEFT_BYTES
        while num_left > 0 and (left := await reader.read(num_left)):
            num_left -= len(left)


def _listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens.

    Raises:
        ConfigError: If the address cannot be listened on.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        # Not with SO_REUSEPORT: two servers on one port would share its connections silently; the second must fail instead.
        listener = socket.socket(family, socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise cannot_listen("metrics_port", host, port, error) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise cannot_listen("metrics_port", host, port, error) from error
    listener.setblocking(False)
    return listener
