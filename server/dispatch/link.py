"""ZeroMQ sockets on an asyncio event loop: links to engines, and between frontend processes and dispatchers."""

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import structlog
import zmq

from dragoman.server.engine.messages import Command, Event

log = structlog.get_logger("dragoman.dispatch")

# As a plain number: `&` of enumerations makes an object each time.
POLLIN = int(zmq.POLLIN)


class Socket:
    """ZeroMQ socket that passes its messages to a callback on the event loop, several in one turn."""

    def __init__(self, kind: int, on_message: Callable[[list[bytes]], None], on_error: Callable[[], None] = lambda: None) -> None:
        """Create the socket, on the event loop that uses it; `on_error` is called after an exception of `on_message` is logged."""
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_error = on_message, on_error
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._descriptor: int | None = None

    def open(self, begin: Callable[[zmq.Socket[Any]], object]) -> None:
        """Bind or connect, and start receiving; close the socket and raise `zmq.ZMQError` if that fails."""
        try:
            begin(self._socket)
        except zmq.ZMQError:
            self.close()
            raise
        # The descriptor is edge-triggered: it signals that the state has changed, `zmq.EVENTS` gives the state.
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._receive)

    def send(self, *parts: bytes) -> None:
        """Send a message; no effect after `close`."""
        if self._socket.closed:
            return
        self._socket.send_multipart(parts, zmq.NOBLOCK)
        # Sending may consume the edge of a message that has arrived.
        if self._has_arrivals():
            self._loop.call_soon(self._receive)

    def close(self) -> None:
        """Close the socket; idempotent."""
        if self._descriptor is not None:
            self._loop.remove_reader(self._descriptor)
            self._descriptor = None
        self._socket.close()
        self._context.term()

    def _receive(self) -> None:
        while self._descriptor is not None and self._has_arrivals():
            parts = self._socket.recv_multipart(zmq.NOBLOCK)
            try:
                self._on_message(parts)
            except Exception:
                log.exception("a message cannot be handled")
                self._on_error()

    def _has_arrivals(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN)


class Link:
    """Connection to an engine process or a remote dispatcher: commands out, events in."""

    def __init__(self, endpoint: str, hear: Callable[[Event], None], on_error: Callable[[], None], identity: bytes = b"") -> None:
        """Connect to an endpoint, which need not be bound yet; raise `zmq.ZMQError` if no socket can be created.

        `on_error` is called for an event that cannot be decoded or handled. A peer `identity` is unique among all links ever made.
        """
        self._encoder = msgspec.msgpack.Encoder()
        decoder = msgspec.msgpack.Decoder(Event)

        def begin(socket: "zmq.Socket[Any]") -> None:
            socket.setsockopt(zmq.RECONNECT_IVL, 20)
            if identity:
                socket.setsockopt(zmq.IDENTITY, identity)
            socket.connect(endpoint)

        self._socket = Socket(zmq.DEALER, lambda parts: hear(decoder.decode(parts[0])), on_error)
        self._socket.open(begin)

    def send(self, command: Command) -> None:
        """Send a command; no effect after `close`."""
        self._socket.send(self._encoder.encode(command))

    def close(self) -> None:
        """Disconnect; idempotent."""
        self._socket.close()
