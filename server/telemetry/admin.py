"""The plain HTTP port for operators: /metrics, /healthz and /readyz.

It runs on threads of its own, so a scrape never waits for the event loop, and /healthz answers as long as the process lives.
"""

import socket
import sys
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from threading import Thread
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from dragoman.server.config import ConfigError

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

CLIENT_TIMEOUT_SECONDS = 10.0


class AdminServer:
    """Answers until it is closed; a context manager."""

    def __init__(self, host: str, port: int, metrics_app: "WSGIApplication", is_ready: Callable[[], bool]) -> None:
        """Listen and start answering.

        Args:
            host: Address to listen on.
            port: Port, 0 for any free one; `self.port` says which.
            metrics_app: Answers /metrics.
            is_ready: Whether /readyz says so; called from another thread.

        Raises:
            ConfigError: If the address cannot be listened on.
        """
        self._metrics_app = metrics_app
        self._is_ready = is_ready
        try:
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
            self._server = _server_class(family)((str(address[0]), port), _Handler)
        except OSError as error:
            raise ConfigError(f"metrics_port: cannot listen on {host}:{port}: {error.strerror}") from error
        self._server.set_app(self._answer)
        self.port: int = self._server.server_address[1]
        self._thread = Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.1}, name="admin", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering and free the port; closing again does nothing."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> "AdminServer":
        """Return the server, which already answers."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close."""
        self.close()

    def _answer(self, environ: "WSGIEnvironment", start_response: "StartResponse") -> Iterable[bytes]:
        match environ["PATH_INFO"]:
            case "/metrics":
                return self._metrics_app(environ, start_response)
            case "/healthz":
                status, body = "200 OK", b"ok\n"
            case "/readyz":
                status, body = ("200 OK", b"ready\n") if self._is_ready() else ("503 Service Unavailable", b"not ready\n")
            case _:
                status, body = "404 Not Found", b"try /metrics, /healthz or /readyz\n"
        start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Content-Length", str(len(body)))])
        return [body]


class _Server(ThreadingMixIn, WSGIServer):
    daemon_threads = True
    # Two servers on one port would share its connections silently; the second must fail instead.
    allow_reuse_port = False

    def server_bind(self) -> None:
        """Bind without the reverse name look-up of the base class, which can take seconds."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]
        self.setup_environ()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that went away; anything else is printed as usual."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _Server6(_Server):
    address_family = socket.AF_INET6


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:
        """Stay silent: probes come every few seconds."""


def _server_class(family: socket.AddressFamily) -> type[_Server]:
    return _Server6 if family == socket.AF_INET6 else _Server
