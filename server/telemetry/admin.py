"""The HTTP port for operators: /metrics, /healthz and /readyz.

It runs on a thread and an event loop of its own, so a scrape never waits for the calls that are served, and /healthz answers as
long as the process lives. Who comes gets one answer and the end of the connection. The probes of Kubernetes bring no token, so none
is asked for but on /metrics and on /readyz?verbose, which tells of versions that are refused, too.

There are never more than `MAX_CONNECTIONS`: the next one takes the place of the oldest, whatever that does. Who holds connections
so holds up nobody: each newcomer has the time in which as many others come, and those are taken one a millisecond.
"""

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterable
from functools import partial
from http import HTTPStatus
from threading import Thread
from typing import TYPE_CHECKING
from urllib.parse import parse_qs

import structlog

from dragoman.server.addresses import cannot_listen
from dragoman.server.telemetry.admin_access import AdminAccess
from dragoman.server.telemetry.admin_request import MAX_HEAD_BYTES, AdminAnswer, AdminRequest, BadRequest
from dragoman.server.telemetry.scrapes import Scrapes

if TYPE_CHECKING:
    from wsgiref.types import WSGIApplication

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

log = structlog.get_logger("dragoman.admin")


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
