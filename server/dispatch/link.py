"""ZeroMQ links of an event loop: to an engine, and between frontend processes and their dispatcher."""

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
    """A ZeroMQ socket whose messages are handed on by the event loop, several in one turn."""

    def __init__(self, kind: int, on_message: Callable[[list[bytes]], None], on_error: Callable[[], None] = lambda: None) -> None:
        """Open it; must be called within the event loop that uses it.

        Args:
            kind: Of the socket.
            on_message: Called with the parts of each message.
            on_error: Called when that has raised, which is logged.
        """
        self._loop = asyncio.get_running_loop()
        self._on_message, self._on_error = on_message, on_error
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.set_hwm(0)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._descriptor: int | None = None

    def open(self, begin: Callable[[zmq.Socket[Any]], object]) -> None:
        """Bind or connect, and begin to receive.

        Raises:
            zmq.ZMQError: If that fails; the socket is closed then.
        """
        try:
            begin(self._socket)
        except zmq.ZMQError:
            self.close()
            raise
        # The descriptor says that something has happened on the socket, once; what that was is for the socket to say.
        self._descriptor = self._socket.fileno()
        self._loop.add_reader(self._descriptor, self._receive)

    def send(self, *parts: bytes) -> None:
        """Send a message; after `close` that does nothing."""
        if self._socket.closed:
            return
        self._socket.send_multipart(parts, zmq.NOBLOCK)
        # Sending may swallow what the descriptor would have said of a message that has arrived.
        if self._has_arrivals():
            self._loop.call_soon(self._receive)

    def close(self) -> None:
        """Send and receive no more; closing again does nothing."""
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
    """A connection to an engine process or to a remote dispatcher: commands out, events in."""

    def __init__(self, endpoint: str, hear: Callable[[Event], None], on_error: Callable[[], None], identity: bytes = b"") -> None:
        """Connect to who listens at an endpoint, or will.

        Args:
            endpoint: ZeroMQ address.
            hear: Called with each event, in order.
            on_error: Called when an event cannot be decoded or handled.
            identity: By which the other end knows the connection; no two links ever have the same. By default ZeroMQ makes one up.

        Raises:
            zmq.ZMQError: If there is no room for a socket.
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
        """Send a command; after `close` that does nothing."""
        self._socket.send(self._encoder.encode(command))

    def close(self) -> None:
        """Disconnect; doing so again does nothing."""
        self._socket.close()
